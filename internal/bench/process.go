package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// A process is one participant of a measurement: this program in another role. It reads one JSON command a line and
// answers each with one line.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	pid int // whose processor time counts
}

// A command is one line to a process.
type command struct {
	Name string          `json:"name"`
	Arg  json.RawMessage `json:"arg,omitempty"`
}

// An answer is one line back.
type answer struct {
	Error string          `json:"error,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// startRole starts this program in a role. The end of ctx ends it.
func startRole(ctx context.Context, env []string, role string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	p := &process{cmd: exec.CommandContext(ctx, self, append([]string{"role", role}, args...)...)}
	p.cmd.Env = append(environment(), env...)
	p.cmd.Stderr = os.Stderr
	// Ctrl-C reaches this program alone, which then ends the others in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	p.out = bufio.NewReaderSize(out, 1<<20)
	p.cmd.Cancel = p.in.Close
	p.cmd.WaitDelay = 20 * time.Second
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	p.pid = p.cmd.Process.Pid
	return p, nil
}

// startGuarded starts another program, which ends with this one.
func startGuarded(ctx context.Context, env []string, program string, args ...string) (*process, error) {
	p, err := startRole(ctx, env, "guard", append([]string{program}, args...)...)
	if err != nil {
		return nil, err
	}
	if err := p.call("pid", nil, &p.pid); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	return p, nil
}

// call sends one command and decodes its answer into reply, which may be nil.
func (p *process) call(name string, arg, reply any) error {
	c := command{Name: name}
	if arg != nil {
		encoded, err := json.Marshal(arg)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		c.Arg = encoded
	}
	if err := json.NewEncoder(p.in).Encode(c); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("%s: the process ended: %w", name, err)
	}
	var a answer
	if err := json.Unmarshal(line, &a); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if a.Error != "" {
		return fmt.Errorf("%s: %s", name, a.Error)
	}
	if reply == nil || a.Value == nil {
		return nil
	}
	return json.Unmarshal(a.Value, reply)
}

// stop ends the process and waits until it is gone.
func (p *process) stop() error {
	p.in.Close()
	if err := p.cmd.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("stop process %d: %w", p.pid, err)
	}
	return nil
}

// A commander is the other end of [process.call].
type commander struct {
	in     io.Reader
	out    io.Writer
	cancel context.CancelFunc // called at the end of the input, so that a command under way ends too
}

// serve answers commands until the input ends.
func (c *commander) serve(ctx context.Context, handle func(ctx context.Context, name string, arg json.RawMessage) (any, error)) error {
	commands := make(chan command)
	go func() {
		defer c.cancel()
		defer close(commands)
		for decoder := json.NewDecoder(c.in); ; {
			var next command
			if decoder.Decode(&next) != nil {
				return
			}
			commands <- next
		}
	}()
	for next := range commands {
		var a answer
		value, err := handle(ctx, next.Name, next.Arg)
		if err == nil {
			a.Value, err = json.Marshal(value)
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := json.NewEncoder(c.out).Encode(a); err != nil {
			return err
		}
	}
	return nil
}

// guard runs a program until its own input ends, so that a killed benchmark leaves no relay behind.
func guard(ctx context.Context, commands *commander, args []string) error {
	if len(args) == 0 {
		return errors.New("guard: name a program")
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	err := commands.serve(ctx, func(context.Context, string, json.RawMessage) (any, error) { return cmd.Process.Pid, nil })
	commands.cancel()
	_ = cmd.Wait() // it was asked to end
	return err
}
