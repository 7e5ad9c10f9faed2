package chaos

import (
	"context"
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

var downTime = flag.Duration("down", 2*time.Second, "how long TestDatabaseIsDown keeps the database away")

// Relays outlive their database, however long it is away: nothing is lost or sent twice without a
// cause, and deliveries continue when it is back.
func TestDatabaseIsDown(t *testing.T) {
	s := newStage(t, 1, 3)
	s.making = "database is down"
	ended := s.produceMeanwhile(200, 0)
	var back []time.Duration
	for range testsize.Of(10, 1) {
		<-time.After(time.Second)
		over := s.fault("", history.Undoes)
		s.must(s.Server.StopImmediate(s.Ctx))
		<-time.After(*downTime)
		s.must(s.Server.StartAgain(s.Ctx))
		back = append(back, time.Since(s.history.Began))
		s.databaseIsBack()
		over()
		before := s.wire.turn.Load() // the history is too long by now to look through it again and again: that holds up those who write it
		s.until("a request", func(context.Context) (bool, error) { return s.wire.turn.Load() > before, nil })
	}
	ended()
	s.drained()
	t.Log(s.judge())
	calls := s.history.Calls()
	for _, since := range back {
		first := slices.IndexFunc(calls, func(c history.Call) bool { return c.Kind == history.Post && c.At >= since })
		if first < 0 {
			t.Fatalf("no request came after %s", since)
		}
		t.Logf("down for %v: the first request came %v after the database accepted connections", *downTime, (calls[first].At - since).Round(time.Millisecond))
	}
}
