package hangup

import (
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"
)

// A process that imports the package survives SIGHUP, and receives the signals that come after
// Handle.
func TestSignalBeforeHandleIsIgnored(t *testing.T) {
	hangUp(t)
	received := make(chan os.Signal, 1)
	signal.Notify(received, syscall.SIGHUP)
	t.Cleanup(func() {
		signal.Stop(received)
		before = ignoreHangups() // as it was when the process started, for the next run of this test
	})
	// Notify asked the kernel for the signal. What Handle gives back is this, and it must not be
	// lost to what came before.
	Handle()
	hangUp(t)
	select {
	case <-received:
	case <-time.After(10 * time.Second):
		t.Fatal("no signal was received after Handle")
	}
}

// A process that was started with the signal ignored, as nohup does, ignores it after Handle too.
func TestSignalIgnoredByTheParentStaysIgnored(t *testing.T) {
	if os.Getenv("HANGUP_TEST_CHILD") != "" {
		Handle()
		hangUp(t)
		return
	}
	test := exec.CommandContext(t.Context(), "sh", "-c", `trap '' HUP; exec "$0" -test.run='^TestSignalIgnoredByTheParentStaysIgnored$'`, os.Args[0])
	test.Env = append(os.Environ(), "HANGUP_TEST_CHILD=1")
	if output, err := test.CombinedOutput(); err != nil {
		t.Fatalf("the process did not survive SIGHUP: %v\n%s", err, output)
	}
}

func hangUp(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}
