package relay

import (
	"fmt"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The answers to claims are lost, again and again, and the session resumes. What those claims took
// is sent at once instead of when its lease ends, and what was claimed before keeps its claim.
func TestClaimWithoutAcknowledgementIsGivenBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	l := newLink(t, db.DSN)
	g, rc := relaytest.NewGated(t, "held-1")
	cfg := config(db, to(rc.URL))
	cfg.Pool, cfg.Lease, cfg.PollInterval = settings(t, l.dsn), time.Hour, time.Second
	cfg.Destinations[0].Timeout = relaytest.Patience
	r := prepared(t, cfg)
	r.restFactor = 1_000_000 // or a cursor that has rested would be claimed for alone, and find nothing new
	r.begin()
	db.Insert(1, "held")
	<-g.Arrived
	for round := 1; round <= 3; round++ {
		within(t, "a claim", l.holdAfter(func() { db.Insert(10, fmt.Sprint("round-", round)) }, claim.ClaimDue))
		relaytest.Becomes(db, 11, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
		l.cut()
		l.pass()
		r.settles(t, policy.Delivered, 10*round)
	}
	g.Open()
	r.settles(t, policy.Delivered, 31)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 AND rescues = 0`); n != 31 || rc.Total() != 31 {
		t.Errorf("%d of 31 were sent once, with %d requests", n, rc.Total())
	}
}
