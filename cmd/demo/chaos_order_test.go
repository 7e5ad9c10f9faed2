package main

import (
	"context"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// chaosOrder plays TestChaosOrder in full: `make chaos-order`.
var chaosOrder = flag.Bool("chaos-order", false, "TestChaosOrder issues 200 events of each of 200 ordering keys, instead of a few")

// While any of three relays is killed at any time, and the receiver fails one request in twenty, the events of each
// ordering key arrive in the order of their commits, each with one effect.
func TestChaosOrder(t *testing.T) {
	testsize.Long(t)
	keys, each := 40, 50
	if *chaosOrder {
		keys, each = 200, 200
	}
	s := newStage(t)
	s.absence = 200 * time.Millisecond
	relays := s.enter(t, 3, faults{Refuse: 0.05, Lose: 0.01}, nil, "OUTBOX_RETRY_SCHEDULE=100ms,300ms,1s", "OUTBOX_LEASE=60s")
	s.outliveStart(t)

	begun := time.Now()
	done := make(chan error, 1)
	s.units.Go(func() {
		err := s.issue(order{prefix: "INV", invoices: keys * each, block: 100, plainSQL: plainSQL, keys: keys})
		if err == nil {
			err = s.pollFor(10*time.Minute, "the backlog to drain", func(ctx context.Context) (bool, error) {
				var n int
				err := s.finance.QueryRow(ctx, countPending).Scan(&n)
				return n == 0, err
			})
		}
		done <- err
	})
	random := rand.New(rand.NewPCG(seed, 0))
	for over := false; !over; {
		select {
		case <-time.After(100*time.Millisecond + rand.N(900*time.Millisecond)):
			s.killRelay(relays[random.IntN(len(relays))])
		case err := <-done:
			s.try(t, err)
			over = true
		}
	}
	took := time.Since(begun)
	s.try(t, s.behave())
	f := s.settle(t)

	n := f.figures()
	sequences, longest := len(f.inOrder), 0
	for _, list := range f.inOrder {
		longest = max(longest, len(list))
	}
	// A chaos in which nothing went wrong proves nothing.
	if n.committed != keys*each || sequences != keys || longest != each || n.relaysKilled == 0 || len(f.lost) == 0 || n.refused == 0 || n.answersLost == 0 {
		t.Errorf("%d events of %d keys, %d relays killed, %d claims lost, %d requests refused, %d answers lost; want %d of %d, and more than 0 of each",
			n.committed, sequences, n.relaysKilled, len(f.lost), n.refused, n.answersLost, keys*each, keys)
	}
	t.Logf("order: %d keys × %d events in %s: %d committed, %d requests, %d refused, %d answers lost, %d duplicates suppressed, %d effects, %d lost, %d doubled; "+
		"%d relays killed, %d claims taken over; every key in the order of its commits",
		keys, each, took.Round(time.Millisecond), n.committed, n.posts, n.refused, n.answersLost, n.suppressed, n.effects, n.lost, n.doubled, n.relaysKilled, len(f.lost))
}
