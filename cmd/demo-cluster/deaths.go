package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// fillRelay runs a relay, kills it now and then, and starts another.
func (s *stage) fillRelay() {
	relay := &process.Unit{
		Role: "the relay", Launch: func(string, int) process.Command { return s.relay() }, Ended: func(string) { s.relayKills.Add(1) },
	}
	s.Fill(relay)
	s.disturb(s.KillRelay, func(context.Context) error { relay.Kill(); return nil })
}

// relay returns the command of a relay.
func (s *stage) relay() process.Command {
	return process.Command{Argv: []string{s.Stage.Relay, "run"}, Env: []string{
		"OUTBOX_DATABASE_URL=" + s.Server.DSN("finance"), "OUTBOX_CONFIG=" + s.config, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none",
	}}
}

// fillConsumer runs a consumer, which dies after a commit, or is killed anywhere.
func (s *stage) fillConsumer(number int) {
	unit := &process.Unit{Role: fmt.Sprintf("consumer %d", number), Ended: func(string) { s.consumerEnds.Add(1) }}
	unit.Launch = func(_ string, life int) process.Command {
		command := s.consumer(s.count)
		if life%2 == 1 && !s.isCalm() {
			command.Argv = append(command.Argv, "--die-after", strconv.Itoa(50+10*number+life))
		}
		return command
	}
	s.Fill(unit)
	s.disturb(3*s.KillOne, func(context.Context) error { unit.Kill(); return nil }) // there are three of them
}

// consumer returns the command of a consumer, which writes a line for each event.
func (s *stage) consumer(report func(line string)) process.Command {
	return process.Command{Argv: []string{
		s.Self, "--consumer", "--log", s.Log, "--url", s.log.url(), "--database", s.Server.DSN("logistics"),
		"--partitions", strconv.Itoa(s.Partitions), "--receiver", s.Receiver,
	}, Env: []string{"DEMO_SECRET=" + s.Stage.Secret}, Stdout: report}
}

// count counts what consumers report.
func (s *stage) count(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.results[consumer.Result(line)]++
}

// disturb kills something every so often. In the calm after the last event it no longer does: a
// relay that never lives for longer than a publication takes would leave the last ones for ever.
func (s *stage) disturb(every time.Duration, kill func(context.Context) error) {
	s.Go(func(ctx context.Context) error {
		for {
			select {
			case <-time.After(every):
			case <-s.calm:
				return nil
			case <-ctx.Done():
				return nil
			}
			if err := kill(ctx); err != nil {
				return err
			}
		}
	})
}

func (s *stage) isCalm() bool {
	select {
	case <-s.calm:
		return true
	default:
		return false
	}
}
