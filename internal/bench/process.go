package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/measure"
)

// A process is one participant of a measurement: this program in another role, or another program
// under its guard.
type process struct {
	*measure.Process
	pid int // whose processor time counts
}

// startRole starts this program in a role. The end of ctx ends it.
func startRole(ctx context.Context, env []string, role string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"role", role}, args...)...)
	cmd.Env = append(environment(), env...)
	cmd.Stderr = os.Stderr
	// Ctrl-C reaches this program alone, which then ends the others in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 20 * time.Second
	started, err := measure.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	return &process{started, started.PID()}, nil
}

// startGuarded starts another program, which ends with this one.
func startGuarded(ctx context.Context, env []string, program string, args ...string) (*process, error) {
	p, err := startRole(ctx, env, "guard", append([]string{program}, args...)...)
	if err != nil {
		return nil, err
	}
	if err := p.Call("pid", nil, &p.pid); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func stopAll(processes []*process) error {
	failures := make([]error, len(processes))
	for i, p := range processes {
		failures[i] = p.Stop()
	}
	return errors.Join(failures...)
}

// playRole runs one of the processes that a measurement starts. It ends when its standard input
// does, so that nothing outlives the run, however that ends.
func playRole(ctx context.Context, role string, args []string) error {
	switch role {
	case "guard":
		return guard(ctx, args)
	case "receiver":
		return receive(ctx)
	}
	play, ok := map[string]func(context.Context, *peer) error{"loop": playLoop, "river": playRiver, "textbook": playTextbook}[role]
	if !ok {
		return fmt.Errorf("there is no role %q", role)
	}
	var p peer
	if err := p.parse(args); err != nil {
		return err
	}
	defer p.close()
	return play(ctx, &p)
}

// untilEnd runs something until it ends, or until the standard input does.
func untilEnd(ctx context.Context, run func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	var failed error
	running.Go(func() {
		if err := run(ctx); ctx.Err() == nil {
			failed = err
		}
	})
	err := serve(ctx, func(context.Context, string, json.RawMessage) (any, error) { return nil, nil })
	cancel()
	running.Wait()
	return errors.Join(err, failed)
}

// serve answers the commands of the program that started this process.
func serve(ctx context.Context, handle func(ctx context.Context, name string, arg json.RawMessage) (any, error)) error {
	return measure.Serve(ctx, os.Stdin, os.Stdout, handle)
}

// guard runs a program until its own input ends, so that a killed benchmark leaves no relay behind.
func guard(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("guard: name a program")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	err := serve(ctx, func(context.Context, string, json.RawMessage) (any, error) { return cmd.Process.Pid, nil })
	cancel()
	_ = cmd.Wait() // it was asked to end
	return err
}
