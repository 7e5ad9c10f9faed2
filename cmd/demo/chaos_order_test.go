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
var chaosOrder = flag.Bool("chaos-order", false, "TestChaosOrder issues 200 events of each of 200 ordering keys, instead of a few, and TestSurvivorTakesOver judges the time")

// While any of three relays is killed at any time, and the receiver fails one request in twenty,
// the events of each ordering key arrive in the order in which they become due, each with one
// effect. A fifth of them become due some time after their commit. See decision 72.
func TestChaosOrder(t *testing.T) {
	testsize.Long(t)
	keys, each := 40, 50
	if *chaosOrder {
		keys, each = 200, 200
	}
	s := newStage(t)
	s.absence = 200 * time.Millisecond
	relays := s.enter(t, 3, faults{Refuse: 0.05, Lose: 0.01}, "OUTBOX_DEFAULTS_RETRY_SCHEDULE=100ms,300ms,1s", "OUTBOX_RELAY_LEASE=60s")
	s.outliveStart(t)

	begun := time.Now()
	done := make(chan error, 1)
	s.Go(func(context.Context) error {
		err := s.issue(order{Prefix: "INV", Invoices: keys * each, PlainSQL: plainSQL, Keys: keys, Later: 0.2})
		if err == nil {
			err = s.drained(10 * time.Minute)
		}
		done <- err
		return nil
	})
	random := rand.New(rand.NewPCG(seed, 0))
	for over := false; !over; {
		select {
		case <-time.After(100*time.Millisecond + rand.N(900*time.Millisecond)):
			_, _, err := s.killBusy(relays[random.IntN(len(relays))], 0, killEvery)
			s.try(t, err)
		case err := <-done:
			s.try(t, err)
			over = true
		}
	}
	took := time.Since(begun)
	s.network.calm.Store(true)
	n := s.settle(t)
	sequences := value[int](t, s, `SELECT count(DISTINCT ordering_key) FROM facts.event`)
	longest := value[int](t, s, `SELECT max(count) FROM (SELECT count(*) FROM facts.event WHERE ordering_key IS NOT NULL GROUP BY ordering_key) c`)
	later := value[int](t, s, `SELECT count(*) FROM facts.event WHERE due IS NOT NULL`)
	lost := value[int](t, s, `SELECT (SELECT count(*) FROM demo_lost_claim) + (SELECT coalesce(sum(events), 0)::bigint FROM demo_lost_range)`)
	// A chaos in which nothing went wrong proves nothing.
	if n.Committed != keys*each || sequences != keys || longest != each || later == 0 || n.RelaysKilled == 0 || lost == 0 || n.Refused == 0 || n.AnswersLost == 0 {
		t.Errorf("%d events of %d keys, %d due later, %d relays killed, %d claims lost, %d requests refused, %d answers lost; want %d of %d, and more than 0 of each",
			n.Committed, sequences, later, n.RelaysKilled, lost, n.Refused, n.AnswersLost, keys*each, keys)
	}
	t.Logf("order: %d keys × %d events in %s: %d committed, %d of them due later, %d requests, %d refused, %d answers lost, %d duplicates suppressed, %d effects, %d lost, %d doubled; "+
		"%d relays killed, %d claims taken over; every key in its order: %t",
		keys, each, took.Round(time.Millisecond), n.Committed, later, n.Posts, n.Refused, n.AnswersLost, n.Suppressed, n.Effects, n.Lost, n.Doubled, n.RelaysKilled, lost, !t.Failed())
}
