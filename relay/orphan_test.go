package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The answers to claims are lost, again and again, and the session resumes. What those claims took is sent at once
// instead of when its lease ends, and what was claimed before keeps its claim.
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
		within(t, "a claim", l.holdAfter(func() { db.Insert(10, fmt.Sprint("round-", round)) }, claimDue))
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

// While claims are made in parts, around damaged data, the answer to one part is lost after another has brought something.
func TestPartOfAClaimWithoutAcknowledgementIsGivenBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	rc := relaytest.NewReceiver(t, nil)
	toA, toB := named("a", to(rc.URL)), named("b", to(rc.URL))
	cfg := config(db, toA, toB)
	cfg.Lease = time.Hour
	lossy := &lossyExecutor{destination: "b"}
	r := sessionThrough(t, cfg, func(pool pg.Pool) pg.Pool {
		lossy.Pool = pool
		return lossy
	})
	db.Insert(1, "key")
	c := r.newClaimer()
	c.pace, c.rows.damaged.until = agenda.Pace{Poll: time.Hour}, time.Now().Add(time.Hour)
	for rc.Total() < 2 {
		turnOf(t, c)
		r.senders.wait()
		if t.Context().Err() != nil || lossy.claims > 100 {
			t.Fatalf("%d of 2 were sent", rc.Total())
		}
		for _, l := range r.laneList() {
			l.restartScans()
		}
		c.agenda.At(agenda.CauseScan, time.Now())
	}
}

// A lossyExecutor loses the answer to the first claim for one destination.
type lossyExecutor struct {
	pg.Pool
	destination string
	claims      int
}

func (e *lossyExecutor) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	results := e.Pool.SendBatch(ctx, b)
	first := b.QueuedQueries[0]
	if first.SQL != claimDue || first.Arguments[4].([]string)[0] != e.destination {
		return results
	}
	if e.claims++; e.claims > 1 {
		return results
	}
	return lostAnswer{results}
}

// A lostAnswer is that of a batch that has committed.
type lostAnswer struct{ pgx.BatchResults }

func (l lostAnswer) Close() error { return errors.Join(l.BatchResults.Close(), io.ErrUnexpectedEOF) }

// A relay whose row is gone claims nothing, and must not move past what it cannot claim: a walk that did would rest a hundred times
// as long as it lasted before it looked again.
func TestClaimOfARemovedRelayMovesNowhere(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "key")
	s, instance := registered(db)
	request := claimRequest{destination: "default", scans: []scan{{free: 1}, {class: backlog, free: 10}}}
	db.Exec(`DELETE FROM outbox_relay WHERE instance = $1`, instance)
	result, err := s.claim(t.Context(), instance, time.Minute, []claimRequest{request})
	relaytest.Must(t, err)
	for i, read := range result.scans {
		if read.last != (keyset{}) || read.more || len(read.keys) > 0 {
			t.Errorf("scan %d: %+v", i, read)
		}
	}
	if len(result.deliveries) > 0 || result.at.IsZero() {
		t.Errorf("%d deliveries at %v", len(result.deliveries), result.at)
	}
}
