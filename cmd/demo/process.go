package main

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

// A command is what to run. Its standard input is empty, and its directory the root, so that no file that happens to lie
// in the current one changes what it does.
type command struct {
	argv   []string
	env    []string          // beyond that of this process
	stdout func(line string) // nil: discarded
}

// A process is a running command. It does not outlive this process, however that one ends: a guard, in a session of its
// own that Ctrl-C does not reach, kills it when the pipe to the guard closes.
type process struct {
	pid    int // of the command, not of the guard
	guard  *exec.Cmd
	orders io.WriteCloser
	errors *tail
	ended  chan struct{} // closed when the process is gone and everything it wrote has been passed on
}

// start starts a command.
func start(c command) (*process, error) {
	report, tell, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	defer report.Close()
	defer tell.Close()

	p := &process{errors: &tail{}, ended: make(chan struct{})}
	p.guard = exec.Command("/bin/sh", append([]string{"-c", guardScript, "guard"}, c.argv...)...)
	p.guard.Dir = "/"
	p.guard.Env = append(os.Environ(), c.env...)
	p.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p.guard.ExtraFiles = []*os.File{tell}
	p.guard.Stderr = &lines{each: p.errors.add}
	if c.stdout != nil {
		p.guard.Stdout = &lines{each: c.stdout}
	}
	if p.orders, err = p.guard.StdinPipe(); err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	if err := p.guard.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.argv[0], err)
	}
	tell.Close()
	pid, err := bufio.NewReader(report).ReadString('\n')
	if err == nil {
		p.pid, err = strconv.Atoi(strings.TrimSpace(pid))
	}
	go func() {
		_ = p.guard.Wait() // the exit code is asked for when it matters
		close(p.ended)
	}()
	if err != nil {
		p.kill()
		return nil, fmt.Errorf("start %s: its guard did not tell a pid: %w", c.argv[0], err)
	}
	return p, nil
}

// signal sends a signal by its name without SIG. A process that is gone takes none.
func (p *process) signal(name string) {
	_, _ = io.WriteString(p.orders, name+"\n") // fails only when the guard has gone, and the process before it
}

// kill ends the process with SIGKILL and returns when it is gone.
func (p *process) kill() {
	p.signal("KILL")
	_ = p.orders.Close()
	<-p.ended
}

// stop ends the process with SIGTERM, and with SIGKILL if that takes longer than patience.
func (p *process) stop(patience time.Duration) {
	p.signal("TERM")
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.kill()
	}
}

// run runs a command to its end. Its failure is an error.
func run(ctx context.Context, c command) error {
	p, err := start(c)
	if err != nil {
		return err
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		p.kill()
		return context.Cause(ctx)
	}
	return p.failure()
}

// failure returns what the process wrote last to stderr, if it ended other than with code 0 or by a signal that the demo
// sent.
func (p *process) failure() error {
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
