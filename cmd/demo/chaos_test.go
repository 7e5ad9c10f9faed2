package main

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// chaosTime is how long TestChaos kills. The full acceptance is `make chaos`.
var chaosTime = flag.Duration("chaos", 6*time.Second, "how long TestChaos kills; from 20s on it also judges the takeover")

const (
	killEvery   = 500 * time.Millisecond
	chaosRate   = 530 // invoices a second: more than 10,000 committed ones in the full run
	chaosBlock  = 150 // of them at once, so that kills find much in flight, or little
	fullChaos   = 20 * time.Second
	maxTakeover = 2 * time.Second
	answersLost = 0.02 // share
)

// While relays are killed and answers are lost, nothing is lost and nothing happens twice, and no
// request is made that a recorded kill or loss does not explain.
func TestChaos(t *testing.T) {
	lasts := testsize.Of(*chaosTime, min(*chaosTime, 3*killEvery))
	s := newStage(t)
	relays := s.enter(t, 2, faults{Lose: answersLost}, nil, "OUTBOX_RETRY_SCHEDULE=500ms,1s,2s", "OUTBOX_LEASE=60s")

	s.outliveStart(t)

	kills := 0
	var takeovers []*takeover
	var mu sync.Mutex // guards takeovers
	var watching sync.WaitGroup
	kill := func(while time.Duration) {
		k, _, err := s.killBusy(relays[kills%len(relays)], 0, while)
		s.try(t, err)
		kills++
		watching.Go(func() {
			if err := s.takenOver(k); err != nil && s.Ctx.Err() == nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			takeovers = append(takeovers, k)
		})
	}
	claims := func() (all int) {
		watching.Wait()
		for _, k := range takeovers {
			all += k.claims
		}
		return all
	}

	issued := s.issueMeanwhile(order{Prefix: "INV", Invoices: int(chaosRate * lasts.Seconds()), PerSecond: chaosRate, Block: chaosBlock, Rollback: 0.05, PlainSQL: plainSQL})
	tick := time.NewTicker(killEvery)
	defer tick.Stop()
	for range int(lasts / killEvery) {
		select {
		case <-tick.C:
		case <-s.Ctx.Done():
			s.try(t, s.Ctx.Err())
		}
		kill(killEvery)
	}
	s.try(t, <-issued)
	// A chaos in which nothing went wrong proves nothing. On a slow machine the kills may all have hit relays that had not begun.
	for more := 1; claims() == 0 || s.network.lostAnswers() == 0; more++ {
		issued := s.issueMeanwhile(order{Prefix: fmt.Sprintf("MORE%d", more), Invoices: 4 * chaosBlock})
		kill(patience)
		s.try(t, <-issued)
	}
	s.network.calm.Store(true)
	n := s.settle(t)

	var slowest takeover
	for _, k := range takeovers {
		if k.took > slowest.took {
			slowest = *k
		}
	}
	if n.RelaysKilled != kills || n.Suppressed == 0 {
		t.Errorf("%d relays killed, %d duplicates suppressed; want %d and more than 0", n.RelaysKilled, n.Suppressed, kills)
	}
	if lasts >= fullChaos && slowest.took > maxTakeover {
		t.Errorf("the claims of %s were taken over after %s, want %s at most", slowest.life, slowest.took, maxTakeover)
	}
	t.Logf("chaos for %s: %d committed, %d rolled back, %d requests, %d retries, %d duplicates suppressed, %d effects, %d lost, %d doubled; "+
		"%d relays killed, %d claims taken over, the slowest after %s; %d answers lost; p50 %s, p99 %s",
		lasts, n.Committed, n.RolledBack, n.Posts, n.Retries, n.Suppressed, n.Effects, n.Lost, n.Doubled,
		n.RelaysKilled, claims(), slowest.took.Round(time.Millisecond), n.AnswersLost, short(n.P50), short(n.P99))
}

// The relay that is left takes over from a dead one without waiting for its leases to end.
func TestSurvivorTakesOver(t *testing.T) {
	testsize.Long(t)
	s := newStage(t)
	s.absence = time.Hour // no process comes back
	relays := s.enter(t, 2, faults{Late: 1}, nil, "OUTBOX_LEASE=60s")
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
	if *chaosTime >= fullChaos && takeover.took > maxTakeover {
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
