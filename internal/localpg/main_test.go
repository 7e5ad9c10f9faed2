//go:build unix

package localpg

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// ownerStage, in the environment, makes the test binary play an owner that
// comes to an end at the stage it names. See [own].
const ownerStage = "LOCALPG_TEST_OWNER"

func TestMain(m *testing.M) {
	if stage := os.Getenv(ownerStage); stage != "" {
		if err := own(stage); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// start starts a server that is stopped when t ends.
func start(t *testing.T, o Options) *Server {
	t.Helper()
	s, err := Start(t.Context(), o)
	testkit.Must(t, err)
	t.Cleanup(func() { s.Stop() }) // fails only after a test has broken it, which then reports it
	return s
}

// wantNothingLeft waits until the directory and every process that was started
// on it are gone.
func wantNothingLeft(t *testing.T, dir string) {
	t.Helper()
	testkit.Eventually(t, dir+" to go", func() bool { return !exists(dir) })
	testkit.Eventually(t, "the processes of "+dir+" to go", func() bool { return len(processes(t, dir)) == 0 })
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// processes lists the commands that name dir: the janitor and PostgreSQL.
func processes(t *testing.T, dir string) (found []string) {
	t.Helper()
	if _, err := os.Stat("/proc/self/cmdline"); err != nil {
		out, err := exec.Command("ps", "-axww", "-o", "args=").Output()
		if err != nil {
			t.Fatalf("list processes: %v", err)
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, dir) {
				found = append(found, line)
			}
		}
		return found
	}
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		args, _ := os.ReadFile(path) // empty once the process has gone
		if strings.Contains(string(args), dir) {
			found = append(found, string(args))
		}
	}
	return found
}

// own is the life of an owner. It prints the directory once there is one, and
// then ends, by SIGKILL unless the stage says otherwise:
//
//	janitor  before initdb
//	init     during initdb
//	launch   while PostgreSQL is starting
//	run      lives until the test or the end of its input ends it
//	stop     stops the server in order, then exits
//	exit     exits without stopping it
func own(stage string) error {
	ctx := context.Background()
	switch stage {
	case "run", "stop", "exit":
		s, err := Start(ctx, Options{})
		if err != nil {
			return err
		}
		if err := s.CreateDatabase(ctx, "some", ""); err != nil {
			return err
		}
		fmt.Println(s.Dir())
		switch stage {
		case "run":
			// Started in the background of a script, a process ignores interrupts unless it asks
			// for them.
			interrupts := make(chan os.Signal, 1)
			signal.Notify(interrupts, os.Interrupt)
			go func() {
				<-interrupts
				os.Exit(130)
			}()
			io.Copy(io.Discard, os.Stdin)
		case "stop":
			return s.Stop()
		}
		return nil
	}
	binDir, err := findBinDir(ctx, "", binDirs)
	if err != nil {
		return err
	}
	dir := prefix + "test-" + stage + fmt.Sprint(os.Getpid())
	j, err := startJanitor(janitorScript, dir, binDir, unprivileged(), nil)
	if err != nil {
		return err
	}
	fmt.Println(dir)
	switch stage {
	case "init":
		fmt.Fprintln(j.in, "init")
	case "launch":
		if _, err := j.ask("init"); err != nil {
			return err
		}
		fmt.Fprintln(j.in, "start 5432")
	}
	return syscall.Kill(os.Getpid(), syscall.SIGKILL)
}
