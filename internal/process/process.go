package process

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:embed guard.sh
var guardScript string

// A Command is what to run. Its standard input is empty, and its directory the root, so that no
// file that happens to lie in the current one changes what it does.
type Command struct {
	Argv   []string
	Env    []string          // beyond that of this process
	Stdout func(line string) // nil: discarded
	Stderr func(line string) // nil: only the last lines are kept, for [Process.Failure]
}

// A Process is a running command. It does not outlive this process, however that one ends: a guard,
// in its own session that Ctrl-C does not reach, kills it when the pipe to the guard closes.
type Process struct {
	PID    int // of the command, not of the guard
	guard  *exec.Cmd
	orders io.WriteCloser
	errors *tail
	Ended  chan struct{} // closed when the process is gone and everything it wrote has been passed on
}

// Start starts a command.
func Start(c Command) (*Process, error) {
	report, tell, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	defer report.Close()
	defer tell.Close()

	p := &Process{errors: &tail{}, Ended: make(chan struct{})}
	p.guard = exec.Command("/bin/sh", append([]string{"-c", guardScript, "guard"}, c.Argv...)...)
	p.guard.Dir = "/"
	p.guard.Env = append(os.Environ(), c.Env...)
	p.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p.guard.ExtraFiles = []*os.File{tell}
	p.guard.Stderr = &lines{each: func(line string) {
		p.errors.add(line)
		if c.Stderr != nil {
			c.Stderr(line)
		}
	}}
	if c.Stdout != nil {
		p.guard.Stdout = &lines{each: c.Stdout}
	}
	if p.orders, err = p.guard.StdinPipe(); err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	if err := p.guard.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Argv[0], err)
	}
	tell.Close()
	pid, err := bufio.NewReader(report).ReadString('\n')
	if err == nil {
		p.PID, err = strconv.Atoi(strings.TrimSpace(pid))
	}
	go func() {
		_ = p.guard.Wait() // the exit code is asked for when it matters
		close(p.Ended)
	}()
	if err != nil {
		p.Kill()
		return nil, fmt.Errorf("start %s: its guard did not tell a pid: %w", c.Argv[0], err)
	}
	return p, nil
}

// Signal sends a signal by its name without SIG. A process that is gone takes none.
func (p *Process) Signal(name string) {
	_, _ = io.WriteString(p.orders, name+"\n") // fails only when the guard has gone, and the process before it
}

// Kill ends the process with SIGKILL and returns when it is gone.
func (p *Process) Kill() {
	p.Signal("KILL")
	_ = p.orders.Close()
	<-p.Ended
}

// Stop ends the process with SIGTERM, and with SIGKILL if that takes longer than patience. It
// reports whether SIGTERM was enough.
func (p *Process) Stop(patience time.Duration) (inTime bool) {
	p.Signal("TERM")
	select {
	case <-p.Ended:
		return true
	case <-time.After(patience):
		p.Kill()
		return false
	}
}

// Run runs a command to its end. Its failure is an error.
func Run(ctx context.Context, c Command) error {
	p, err := Start(c)
	if err != nil {
		return err
	}
	select {
	case <-p.Ended:
	case <-ctx.Done():
		p.Kill()
		return context.Cause(ctx)
	}
	return p.Failure()
}

// Failure returns what the process wrote last to stderr, if it ended other than with code 0 or by a
// signal that the demo sent.
func (p *Process) Failure() error {
	const signalled = 128 // and the signal, as shells count
	code := p.guard.ProcessState.ExitCode()
	switch code {
	case 0, signalled + int(syscall.SIGKILL), signalled + int(syscall.SIGTERM), signalled + int(syscall.SIGINT):
		return nil
	}
	return errors.New(strings.TrimSpace(fmt.Sprintf("exit code %d\n%s", code, p.errors)))
}

// lines is a writer that passes on whole lines.
type lines struct {
	each func(line string)
	rest []byte
}

func (l *lines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		line, rest, found := bytes.Cut(l.rest, []byte("\n"))
		if !found {
			return len(b), nil
		}
		l.each(string(line))
		l.rest = rest
	}
}

// tail keeps the last lines that were added.
type tail struct {
	mu    sync.Mutex
	lines []string
}

const tailLines = 15

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines[max(0, len(t.lines)+1-tailLines):], line)
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "\n")
}
