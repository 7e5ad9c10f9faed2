package main

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// What a producer rolls back leaves no row and causes no request.
func TestProducerRollsBack(t *testing.T) {
	s := newStage(t)
	s.enter(t, 1, faults{}, nil)
	s.try(t, s.issue(order{prefix: "INV", invoices: 400, rollback: 0.5, plainSQL: 0.5}))
	f := s.settle(t)
	n := f.figures()
	if n.committed+n.rolledBack != 400 || n.committed < 100 || n.rolledBack < 100 {
		t.Errorf("%d committed, %d rolled back; want about 200 each", n.committed, n.rolledBack)
	}
	if len(f.events) != n.committed || n.posts != n.committed {
		t.Errorf("%d events and %d requests for %d invoices", len(f.events), n.posts, n.committed)
	}
	t.Logf("producer rolls back: %d committed, %d rolled back, %d requests", n.committed, n.rolledBack, n.posts)
}

const countMemory = `SELECT (SELECT count(*) FROM processed_events), (SELECT count(*) FROM shipments)`

// What a receiver rolls back leaves no memory, so that the next attempt is not taken for a duplicate.
func TestReceiverRollsBack(t *testing.T) {
	testsize.Long(t)
	const events = 20
	s := newStage(t)
	// The breaker opens as soon as some events are refused, and the rest are its probes.
	s.enter(t, 1, faults{Refuse: 1}, nil, "OUTBOX_RETRY_SCHEDULE=200ms", "OUTBOX_BREAKER_PROBE_AFTER=100ms", "OUTBOX_BREAKER_PROBE_MAX=100ms")
	s.try(t, s.issue(order{prefix: "INV", invoices: events}))
	s.try(t, s.await("every event to be refused", func(h *history) bool {
		refused := map[string]bool{}
		for _, r := range h.requests {
			refused[r.Key] = refused[r.Key] || r.status == 500
		}
		return len(refused) == events
	}))
	var processed, shipped int
	s.try(t, s.logistics.QueryRow(t.Context(), countMemory).Scan(&processed, &shipped))
	if processed != 0 || shipped != 0 {
		t.Errorf("after refusals: %d processed events, %d shipments; want none", processed, shipped)
	}
	s.try(t, s.behave())
	n := s.settle(t).figures()
	if n.effects != events || n.suppressed != 0 || n.refused < events {
		t.Errorf("%d effects, %d duplicates, %d refusals; want %d, 0, at least %d", n.effects, n.suppressed, n.refused, events, events)
	}
	t.Logf("receiver rolls back: %d refusals left nothing, then %d effects", n.refused, n.effects)
}

// A receiver that dies between its commit and its answer gets the event once more, and remembers it.
func TestReceiverDiesBetweenCommitAndAnswer(t *testing.T) {
	testsize.Long(t)
	s := newStage(t)
	s.enter(t, 1, faults{}, []int{1}, "OUTBOX_RETRY_SCHEDULE=500ms")
	s.try(t, s.issue(order{prefix: "INV", invoices: 1}))
	f := s.settle(t)
	if f.suicides != 1 || len(f.deaths) != 1 {
		t.Fatalf("%d of %d receivers died between commit and answer, want 1 of 1", f.suicides, len(f.deaths))
	}
	if len(f.requests) != 2 {
		t.Fatalf("%d requests, want 2", len(f.requests))
	}
	first, second := f.requests[0], f.requests[1]
	if first.Attempt != 1 || first.replayed || first.receiver != "logistics.1" {
		t.Errorf("the first request is attempt %d, replayed %t, to %s", first.Attempt, first.replayed, first.receiver)
	}
	if second.Attempt != 2 || !second.replayed || second.receiver != "logistics.2" || second.status != first.status {
		t.Errorf("the second request is attempt %d, replayed %t, to %s, answered %d; want attempt 2, answered from storage with %d",
			second.Attempt, second.replayed, second.receiver, second.status, first.status)
	}
	if n := len(f.effects[first.Key]); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
	if e := f.events[first.Key]; e.attempts != 2 {
		t.Errorf("%d attempts are counted, want 2", e.attempts)
	}
	t.Logf("receiver dies after commit: answered %d from storage %s later", second.status, short(second.answeredAt.Sub(first.answeredAt)))
}
