package main

import (
	"context"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// What a producer rolls back leaves no row and causes no request.
func TestProducerRollsBack(t *testing.T) {
	s := newStage(t)
	s.enter(t, 1, faults{}, nil)
	s.try(t, s.issue(order{Prefix: "INV", Invoices: 400, Rollback: 0.5, PlainSQL: 0.5}))
	n := s.settle(t)
	if n.Committed+n.RolledBack != 400 || n.Committed < 100 || n.RolledBack < 100 {
		t.Errorf("%d committed, %d rolled back; want about 200 each", n.Committed, n.RolledBack)
	}
	if events := value[int](t, s, `SELECT count(*) FROM facts.event`); events != n.Committed || n.Posts != n.Committed {
		t.Errorf("%d events and %d requests for %d invoices", events, n.Posts, n.Committed)
	}
	t.Logf("producer rolls back: %d committed, %d rolled back, %d requests", n.Committed, n.RolledBack, n.Posts)
}

const countMemory = `SELECT (SELECT count(*) FROM processed_events), (SELECT count(*) FROM shipments)`

// What a receiver rolls back leaves no memory, so that the next attempt is not taken for a
// duplicate.
func TestReceiverRollsBack(t *testing.T) {
	testsize.Long(t)
	const events = 20
	s := newStage(t)
	// The breaker opens as soon as some events are refused, and the rest are its probes.
	s.enter(t, 1, faults{Refuse: 1}, nil, "OUTBOX_RETRY_SCHEDULE=200ms", "OUTBOX_BREAKER_PROBE_AFTER=100ms", "OUTBOX_BREAKER_PROBE_MAX=100ms")
	s.try(t, s.issue(order{Prefix: "INV", Invoices: events}))
	s.try(t, s.Poll(patience, "every event to be refused", func(context.Context) (bool, error) {
		refused := map[string]bool{}
		for _, r := range s.network.seen() {
			if r.status == 500 {
				refused[r.key] = true
			}
		}
		return len(refused) == events, nil
	}))
	var processed, shipped int
	s.try(t, s.logistics.QueryRow(t.Context(), countMemory).Scan(&processed, &shipped))
	if processed != 0 || shipped != 0 {
		t.Errorf("after refusals: %d processed events, %d shipments; want none", processed, shipped)
	}
	s.network.calm.Store(true)
	n := s.settle(t)
	if n.Effects != events || n.Suppressed != 0 || n.Refused < events {
		t.Errorf("%d effects, %d duplicates, %d refusals; want %d, 0, at least %d", n.Effects, n.Suppressed, n.Refused, events, events)
	}
	t.Logf("receiver rolls back: %d refusals left nothing, then %d effects", n.Refused, n.Effects)
}

// A receiver that dies between its commit and its answer gets the event once more, and remembers
// it.
func TestReceiverDiesBetweenCommitAndAnswer(t *testing.T) {
	testsize.Long(t)
	s := newStage(t)
	s.enter(t, 1, faults{}, []int{1}, "OUTBOX_RETRY_SCHEDULE=500ms")
	s.try(t, s.issue(order{Prefix: "INV", Invoices: 1}))
	n := s.settle(t)
	if n.ReceiversKilled != 1 {
		t.Fatalf("%d receivers died, want 1", n.ReceiversKilled)
	}
	requests := s.network.seen()
	if len(requests) != 2 {
		t.Fatalf("%d requests, want 2", len(requests))
	}
	first, second := requests[0], requests[1]
	if first.attempt != 1 || first.status != 0 {
		t.Errorf("the first request is attempt %d, answered %d; want attempt 1 without an answer", first.attempt, first.status)
	}
	if second.attempt != 2 || !second.replayed || second.status/100 != 2 {
		t.Errorf("the second request is attempt %d, replayed %t, answered %d; want attempt 2, answered from storage with success",
			second.attempt, second.replayed, second.status)
	}
	if n.Effects != 1 {
		t.Errorf("%d effects, want 1", n.Effects)
	}
	testkit.Equal(t, "attempts counted", value[int](t, s, `SELECT attempts FROM facts.event`), 2)
	t.Logf("receiver dies after commit: answered %d from storage %s later", second.status, short(second.answeredAt.Sub(first.at)))
}
