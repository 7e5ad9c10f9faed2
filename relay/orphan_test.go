package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// The answers to claims are lost, again and again, and the session resumes. What those claims took is sent at once
// instead of when its lease ends, and what was claimed before keeps its claim.
func TestClaimWithoutAcknowledgementIsGivenBack(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	l := newLink(t, db.dsn)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.key == "held-1" {
			g.pass(r)
		}
	})
	cfg := db.config(to(rc.URL))
	cfg.Pool, cfg.Lease, cfg.PollInterval = settings(t, l.dsn), time.Hour, time.Second
	cfg.Destinations[0].Timeout = patience
	r := start(t, cfg)
	db.insert(1, "held")
	<-g.arrived
	for round := 1; round <= 3; round++ {
		within(t, "a claim", l.holdAfter(func() { db.insert(10, fmt.Sprint("round-", round)) }, claimDue))
		becomes(db, 11, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
		l.cut()
		l.pass()
		r.settles(t, policy.Delivered, 10*round)
	}
	g.open()
	r.settles(t, policy.Delivered, 31)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 AND rescues = 0`); n != 31 || rc.total() != 31 {
		t.Errorf("%d of 31 were sent once, with %d requests", n, rc.total())
	}
}

// A claim that the database still executes when its connection is lost is waited for.
func TestGiveBackWaitsForARunningClaim(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(1, "key")
	s, instance := db.registered()
	claiming, err := db.pool.Begin(t.Context())
	must(t, err)
	_, err = claiming.Exec(t.Context(), `SELECT FROM outbox_relay WHERE instance = $1 FOR KEY SHARE`, instance)
	must(t, err)
	given := make(chan error, 1)
	go func() { given <- session.GiveBackUnacknowledged(t.Context(), db.pool, instance, time.Time{}) }()
	becomes(db, 1, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
	_, err = claiming.Exec(t.Context(), `UPDATE outbox_delivery SET claimed_by = $1, lease_expires_at = clock_timestamp() + interval '60 seconds'`, instance)
	must(t, err)
	must(t, claiming.Commit(t.Context()))
	must(t, <-given)
	requests := []claimRequest{{destination: "default", scans: []scan{{free: 10}}}}
	first, err := s.claim(t.Context(), instance, time.Minute, requests)
	if err != nil || len(first.deliveries) != 1 {
		t.Fatalf("%d claimed, %v", len(first.deliveries), err)
	}
	// The new claim stands, also when a later one is lost.
	must(t, session.GiveBackUnacknowledged(t.Context(), db.pool, instance, first.at.Add(time.Minute)))
	if again, err := s.claim(t.Context(), instance, time.Minute, requests); err != nil || len(again.deliveries) != 0 {
		t.Errorf("%d claimed again, %v", len(again.deliveries), err)
	}
}

// A relay that lives loses acknowledgements for days: what is over does not pile up.
func TestVoidClaimsAreForgotten(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	_, instance := db.registered()
	for range 3 {
		must(t, session.GiveBackUnacknowledged(t.Context(), db.pool, instance, time.Time{}))
		db.exec(`UPDATE outbox_void SET until = until - interval '1 hour' WHERE until > now()`)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_void`); n != 1 {
		t.Errorf("%d rows", n)
	}
}

// While claims are made in parts, around damaged data, the answer to one part is lost after another has brought something.
func TestPartOfAClaimWithoutAcknowledgementIsGivenBack(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "a", "b")
	rc := newReceiver(t, nil)
	toA, toB := to(rc.URL), to(rc.URL)
	toA.Name, toB.Name = "a", "b"
	cfg := db.config(toA, toB)
	cfg.Lease = time.Hour
	lossy := &lossyExecutor{destination: "b"}
	r := sessionThrough(t, cfg, func(pool pg.Pool) pg.Pool {
		lossy.Pool = pool
		return lossy
	})
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	db.insert(1, "key")
	c := r.newClaimer()
	c.pace, c.damaged.until = policy.Pace{Poll: time.Hour}, time.Now().Add(time.Hour)
	for rc.total() < 2 {
		if _, err := c.claimIfDue(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.senders.wait()
		if t.Context().Err() != nil || lossy.claims > 100 {
			t.Fatalf("%d of 2 were sent", rc.total())
		}
		for _, l := range r.laneList() {
			l.walkNow()
		}
		c.pace.Look()
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
	db := newDatabase(t)
	db.insert(3, "key")
	s, instance := db.registered()
	request := claimRequest{destination: "default", scans: []scan{{free: 1}, {class: backlog, free: 10}}}
	db.exec(`DELETE FROM outbox_relay WHERE instance = $1`, instance)
	result, err := s.claim(t.Context(), instance, time.Minute, []claimRequest{request})
	must(t, err)
	for i, read := range result.scans {
		if read.last != (keyset{}) || read.more || len(read.keys) > 0 {
			t.Errorf("scan %d: %+v", i, read)
		}
	}
	if len(result.deliveries) > 0 || result.at.IsZero() {
		t.Errorf("%d deliveries at %v", len(result.deliveries), result.at)
	}
}
