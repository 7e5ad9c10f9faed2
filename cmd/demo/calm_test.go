package main

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Without faults, every event is one request and one attempt, however many relays work.
func TestCalm(t *testing.T) {
	testsize.Long(t)
	const events = 10_000
	s := newStage(t)
	s.enter(t, 2, faults{}, nil)
	begun := time.Now()
	s.try(t, s.issue(order{Prefix: "INV", Invoices: events, PlainSQL: plainSQL}))
	issued := time.Since(begun)
	n := s.settle(t)
	took := time.Since(begun)
	if n.Committed != events || n.Posts != events || n.Effects != events || n.Suppressed != 0 {
		t.Errorf("%d invoices, %d requests, %d effects, %d duplicates; want %d, %d, %d, 0",
			n.Committed, n.Posts, n.Effects, n.Suppressed, events, events, events)
	}
	testkit.Equal(t, "events not delivered by their first attempt", value[int](t, s, `SELECT count(*) FROM facts.event WHERE attempts <> 1 OR status <> 'delivered'`), 0)
	senders := map[string]int{}
	for _, req := range s.network.seen() {
		senders[req.relay]++
	}
	if len(senders) != 2 {
		t.Errorf("only %v sent; the other relay had nothing to do", senders)
	}
	t.Logf("calm: %d events issued in %s, delivered after %s (%.0f/s): %d requests %v, %d effects, p50 %s, p99 %s",
		events, issued.Round(time.Millisecond), took.Round(time.Millisecond), float64(events)/took.Seconds(), n.Posts, senders,
		n.Effects, short(n.P50), short(n.P99))
}
