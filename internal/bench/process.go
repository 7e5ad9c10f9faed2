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
	guarded "github.com/outbox-relay/outbox-relay/internal/process"
)

// A process is one participant of a measurement.
type process struct {
	*measure.Process                  // this program in a role; nil: a relay
	relay            *guarded.Process // nil: a role
	pid              int              // whose processor time counts
}

// startRole starts this program in a role. The end of ctx ends it.
func startRole(ctx context.Context, env []string, role string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"role", role}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	// Ctrl-C reaches this program alone, which then ends the others in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 20 * time.Second
	started, err := measure.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	return &process{Process: started, pid: started.PID()}, nil
}

// startRelay starts the measured program. Its guard ends it with this one, so that a killed
// benchmark leaves no relay behind.
func startRelay(env []string, argv ...string) (*process, error) {
	report := func(line string) { fmt.Fprintln(os.Stderr, line) }
	p, err := guarded.Start(guarded.Command{Argv: argv, Env: env, Stdout: report, Stderr: report})
	if err != nil {
		return nil, err
	}
	return &process{relay: p, pid: p.PID}, nil
}

// Stop ends the process and returns when it is gone.
func (p *process) Stop() error {
	if p.relay == nil {
		return p.Process.Stop()
	}
	p.relay.Stop(10 * time.Second)
	return nil
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
	if role == "receiver" {
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
