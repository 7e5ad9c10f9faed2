package measure

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
)

// A Process is a participant of a measurement, which runs [Serve]. Its methods are for one
// goroutine at a time.
type Process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
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

// Start starts a process. Where its context ends a command, that closes its input.
func Start(cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.in, p.out = in, bufio.NewReaderSize(out, 1<<20)
	if cmd.Cancel != nil {
		cmd.Cancel = in.Close
	}
	return p, cmd.Start()
}

// PID returns the number of the process.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Call sends one command and decodes its answer into reply, which may be nil.
func (p *Process) Call(name string, arg, reply any) error {
	encoded, err := json.Marshal(arg)
	if err == nil {
		err = json.NewEncoder(p.in).Encode(command{name, encoded})
	}
	if err != nil {
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
		return errors.New(a.Error)
	}
	if reply == nil {
		return nil
	}
	return json.Unmarshal(a.Value, reply)
}

// Stop closes the input of the process and waits until it is gone.
func (p *Process) Stop() error {
	_ = p.in.Close() // fails only when it is closed
	if err := p.cmd.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("stop process %d: %w", p.PID(), err)
	}
	return nil
}

// Serve answers the commands of [Process.Call] until the input ends. That ends the context of a
// command that is under way, too, however the caller came to end.
func Serve(ctx context.Context, in io.Reader, out io.Writer, handle func(ctx context.Context, name string, arg json.RawMessage) (any, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	commands := make(chan command)
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(commands)
		defer cancel()
		for decoder := json.NewDecoder(in); ; {
			var next command
			if decoder.Decode(&next) != nil {
				return
			}
			commands <- next
		}
	})
	defer reading.Wait()
	for next := range commands {
		var a answer
		value, err := handle(ctx, next.Name, next.Arg)
		if err == nil {
			a.Value, err = json.Marshal(value)
		}
		if err != nil {
			a.Error = err.Error()
		}
		_ = json.NewEncoder(out).Encode(a) // without a reader the input ends as well
	}
	return nil
}
