package main

import (
	"context"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

const (
	killEvery   = 500 * time.Millisecond
	maxTakeover = 2 * time.Second
)

// The relay that is left takes over from a dead one without waiting for its leases to end.
func TestSurvivorTakesOver(t *testing.T) {
	testsize.Long(t)
	s := newStage(t)
	s.absence = time.Hour // no process comes back
	relays := s.enter(t, 2, faults{Late: 1}, "OUTBOX_RELAY_LEASE=60s")
	s.outliveStart(t)

	s.try(t, s.issue(order{Prefix: "INV", Invoices: 400}))
	victim, holding := relays[0], 0
	s.try(t, s.Poll(patience, "the relay to hold something", func(ctx context.Context) (busy bool, err error) {
		life, _ := victim.Current()
		holding, err = s.holding(ctx, life)
		return holding >= 10, err
	}))
	takeover := s.killRelay(victim)
	s.try(t, s.takenOver(takeover))
	s.network.calm.Store(true)
	n := s.settle(t)

	if takeover.claims == 0 {
		t.Error("nothing was taken over")
	}
	if *chaosOrder && takeover.took > maxTakeover { // beside other tests it may take longer
		t.Errorf("the claims were taken over after %s, want %s at most", takeover.took, maxTakeover)
	}
	t.Logf("survivor: %d claims taken over after %s; %d committed, %d requests, %d duplicates suppressed, %d effects",
		takeover.claims, takeover.took.Round(time.Millisecond), n.Committed, n.Posts, n.Suppressed, n.Effects)
}

// outliveStart waits until the server is old enough: one that has just started may have been
// restarted, with no time yet for relays to take their locks again, and so none is taken for dead.
func (s *stage) outliveStart(t *testing.T) {
	t.Helper()
	s.try(t, s.Poll(patience, "the server's first seconds to pass", func(ctx context.Context) (old bool, err error) {
		err = s.finance.QueryRow(ctx, `SELECT now() - pg_postmaster_start_time() > interval '3 seconds'`).Scan(&old)
		return old, err
	}))
}
