package main

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/process"
)

// grace is how long a process may take to stop in order.
const grace = 30 * time.Second

// keepRelay runs a relay, kills it now and then, and starts another.
func (s *stage) keepRelay(ctx context.Context) error {
	for {
		p, err := process.Start(s.relay())
		if err != nil {
			return err
		}
		if s.outlives(ctx, p, s.KillRelay) {
			return nil
		}
		if err := p.Failure(); err != nil {
			return fmt.Errorf("the relay ended by itself: %w", err)
		}
		s.relayKills.Add(1)
	}
}

// relay returns the command of a relay.
func (s *stage) relay() process.Command {
	return process.Command{Argv: []string{s.Relay, "run"}, Env: []string{
		"OUTBOX_DATABASE_URL=" + s.postgres.DSN("finance"), "OUTBOX_CONFIG=" + s.config, "OUTBOX_METRICS_LISTEN=off", "OUTBOX_ADMIN_LISTEN=off",
	}}
}

// outlives waits until the process has ended, was killed after its time, or was stopped with the play. In the calm after the last event no
// process is killed: a relay that never lives for longer than a publication takes would leave the last ones for ever.
func (s *stage) outlives(ctx context.Context, p *process.Process, life time.Duration) (stopped bool) {
	timer := time.NewTimer(life)
	defer timer.Stop()
	select {
	case <-timer.C:
		p.Kill()
		return false
	case <-p.Ended:
		return false
	case <-s.calm:
	case <-ctx.Done():
	}
	select {
	case <-p.Ended:
		return false
	case <-ctx.Done():
		p.Stop(grace)
		return true
	}
}

// keepConsumer runs a consumer, which dies after a commit, or is killed anywhere.
func (s *stage) keepConsumer(ctx context.Context, number int) error {
	for life := 1; ; life++ {
		argv := s.consumer()
		if life%2 == 1 && !s.isCalm() {
			argv = append(argv, "--die-after", strconv.Itoa(50+10*number+life))
		}
		p, err := process.Start(process.Command{Argv: argv, Env: []string{"DEMO_SECRET=" + s.Secret}, Stdout: s.count})
		if err != nil {
			return err
		}
		if s.outlives(ctx, p, 3*s.KillOne) { // there are three of them
			return nil
		}
		if err := p.Failure(); err != nil {
			return fmt.Errorf("consumer %d ended by itself: %w", number, err)
		}
		s.consumerEnds.Add(1)
	}
}

func (s *stage) isCalm() bool {
	select {
	case <-s.calm:
		return true
	default:
		return false
	}
}

// count counts what consumers report.
func (s *stage) count(line string) {
	n, _ := s.results.LoadOrStore(line, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
}

// disturbLog kills what carries the events, now and then.
func (s *stage) disturbLog(ctx context.Context) error {
	for {
		select {
		case <-time.After(s.KillLeader):
		case <-s.calm:
			return nil
		case <-ctx.Done():
			return nil
		}
		if err := s.log.disturb(ctx); err != nil {
			return err
		}
	}
}
