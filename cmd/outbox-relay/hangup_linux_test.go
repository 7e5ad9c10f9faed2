package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// ignoresHangups reports whether a process ignores SIGHUP.
func ignoresHangups(t *testing.T, pid int) bool {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	pgtest.Must(t, err)
	_, rest, _ := strings.Cut(string(status), "SigIgn:\t")
	mask, _, _ := strings.Cut(rest, "\n")
	bits, err := strconv.ParseUint(mask, 16, 64)
	if err != nil {
		t.Fatalf("%s: %v", status, err)
	}
	return bits>>(syscall.SIGHUP-1)&1 == 1
}

// From its first moments on, before it has initialised its packages and read its configuration, a
// relay does not end at SIGHUP. It comes up, and reloads.
func TestHangupsWhileARelayStarts(t *testing.T) {
	t.Parallel()
	dsn, dir := pgtest.New(t, migrations.Outbox), t.TempDir()
	const starts = 100
	for range starts {
		s := launch(t, dir, []string{"run"}, "OUTBOX_DATABASE_URL="+dsn, "OUTBOX_DESTINATION_URL=http://127.0.0.1:9/in", "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none")
		ignores := false
		for !ignores && s.stderr.String() == "" && len(s.code) == 0 {
			ignores = ignoresHangups(t, s.program.Process.Pid)
		}
		if !ignores { // this test was too slow to see it
			_ = s.program.Process.Kill()
			<-s.code
			continue
		}
		for !strings.Contains(s.stderr.String(), `"msg":"registered"`) && len(s.code) == 0 {
			_ = s.program.Process.Signal(syscall.SIGHUP)
		}
		s.stderr.wait(t, `"msg":"registered"`, s.code)
		s.stderr.wait(t, "configuration read again", s.code)
		s.stop(t)
		return
	}
	t.Errorf("in %d starts the program was never seen to ignore SIGHUP", starts)
}

// A command that is no relay ends with its terminal.
func TestHangupEndsAnotherCommand(t *testing.T) {
	t.Parallel()
	program := exec.CommandContext(t.Context(), os.Args[0], "status", "--watch")
	program.Env = append(os.Environ(), asProgram+"=1", "OUTBOX_DATABASE_URL="+pgtest.New(t, migrations.Outbox))
	out := &awaited{written: make(chan struct{}, 1)}
	program.Stdout, program.Stderr = out, out
	pgtest.Must(t, program.Start())
	out.wait(t, "\n", nil)
	_ = program.Process.Signal(syscall.SIGHUP)
	_ = program.Wait()
	if status, _ := program.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGHUP {
		t.Errorf("%s", program.ProcessState)
	}
}
