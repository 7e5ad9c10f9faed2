package main

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The whole demo, only faster.
func TestPlay(t *testing.T) {
	testsize.Long(t)
	var out bytes.Buffer
	p := newPlay(options{
		Relay: relayBinary(t), Events: 600, Seed: seed, Steady: 3 * time.Second, Pause: 500 * time.Millisecond, Absence: 200 * time.Millisecond,
	}, &out)
	if err := p.run(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if n := strings.Count(out.String(), "kept"); n != 6 {
		t.Errorf("%d promises kept, want 6:\n%s", n, &out)
	}
	if left := processes(t, p.stage.Server.Dir()); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// However the demo ends, it leaves no process and no directory behind.
func TestDemoLeavesNothing(t *testing.T) {
	testsize.Long(t)
	for name, test := range map[string]struct {
		signal syscall.Signal
		code   int
	}{
		"killed":      {syscall.SIGKILL, -1},
		"interrupted": {syscall.SIGINT, exitInterrupted},
	} {
		t.Run(name, func(t *testing.T) {
			binary := relayBinary(t)
			self, err := os.Executable()
			pgtest.Must(t, err)
			out := &testkit.Buffer{}
			cmd := exec.Command(self, "--relay", binary)
			cmd.Env = append(os.Environ(), asDemo+"=1", "HOME=")
			cmd.Stdout, cmd.Stderr = out, out
			pgtest.Must(t, cmd.Start())
			t.Cleanup(func() { _ = cmd.Process.Kill() }) // unless it has ended
			testkit.Eventually(t, "finance to issue", func() bool { return strings.Contains(out.String(), "finance issues") })
			found := regexp.MustCompile(`PostgreSQL runs in (\S+);`).FindStringSubmatch(out.String())
			if found == nil {
				t.Fatalf("the demo names no directory:\n%s", out)
			}
			dir := found[1]
			if n := len(processes(t, dir, binary)); n < 5 {
				t.Fatalf("only %d processes run: %q", n, processes(t, dir, binary))
			}
			pgtest.Must(t, cmd.Process.Signal(test.signal))
			_ = cmd.Wait() // the code says more
			if code := cmd.ProcessState.ExitCode(); code != test.code {
				t.Errorf("exit code %d, want %d:\n%s", code, test.code, out)
			}
			testkit.Eventually(t, "every process to go", func() bool { return len(processes(t, dir, binary)) == 0 })
			testkit.Eventually(t, "the directory to go", func() bool { _, err := os.Stat(dir); return os.IsNotExist(err) })
		})
	}
}
