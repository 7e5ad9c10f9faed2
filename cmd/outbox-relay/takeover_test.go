package main

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// A relayProcess is outbox-relay run as a process of its own.
type relayProcess struct {
	started
	program *exec.Cmd
}

// launchAs starts a relay in a folder, with nothing but these arguments and variables, and waits until it works.
func launchAs(t testing.TB, dir string, args []string, env ...string) *relayProcess {
	t.Helper()
	p := &relayProcess{
		started: started{stderr: &awaited{written: make(chan struct{}, 1)}, code: make(chan int, 1)},
		program: exec.CommandContext(t.Context(), os.Args[0], args...),
	}
	p.program.Dir, p.program.Env, p.program.Stderr = dir, append([]string{asProgram + "=1", allowSuperuser}, env...), p.stderr
	pgtest.Must(t, p.program.Start())
	go func() {
		_ = p.program.Wait()
		p.code <- p.program.ProcessState.ExitCode()
	}()
	p.stderr.wait(t, `"registered"`, p.code)
	return p
}

func (p *relayProcess) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	pgtest.Must(t, p.program.Process.Signal(s))
}

// stop ends the relay as an orchestrator does.
func (p *relayProcess) stop(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGTERM)
	if code := <-p.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, p.stderr)
	}
}

func (p *relayProcess) kill(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGKILL)
	<-p.code
}

// awaitUntil waits until a condition holds that neither a log line nor a channel tells of.
func awaitUntil(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 600 {
		if holds() {
			return
		}
		<-time.After(100 * time.Millisecond)
	}
	t.Fatalf("never came: %s", what)
}
