package main

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Without faults, every event is one request and one attempt, however many relays work.
func TestCalm(t *testing.T) {
	testsize.Long(t)
	const events = 10_000
	s := newStage(t)
	s.enter(t, 2, faults{}, nil)
	begun := time.Now()
	s.try(t, s.issue(order{prefix: "INV", invoices: events, plainSQL: plainSQL}))
	issued := time.Since(begun)
	f := s.settle(t)
	took := time.Since(begun)

	n := f.figures()
	if n.committed != events || n.posts != events || n.effects != events || n.suppressed != 0 {
		t.Errorf("%d invoices, %d requests, %d effects, %d duplicates; want %d, %d, %d, 0",
			n.committed, n.posts, n.effects, n.suppressed, events, events, events)
	}
	for key, e := range f.events {
		if e.attempts != 1 || e.status != "delivered" {
			t.Errorf("%s is %s after %d attempts", key, e.status, e.attempts)
		}
	}
	senders := map[string]int{}
	for _, req := range f.requests {
		senders[req.Relay]++
	}
	if len(senders) != 2 {
		t.Errorf("only %v sent; the other relay had nothing to do", senders)
	}
	t.Logf("calm: %d events issued in %s, delivered after %s (%.0f/s): %d requests %v, %d effects, p50 %s, p99 %s",
		events, issued.Round(time.Millisecond), took.Round(time.Millisecond), float64(events)/took.Seconds(), n.posts, senders,
		n.effects, short(n.p50), short(n.p99))
}
