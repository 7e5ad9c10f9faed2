package relay

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// A claim whose acknowledgement was lost is known to the database alone: a relay that leaves must not take it along
// until its lease ends. To leave is not to die: it counts as no rescue.
func TestLeavingGivesBackWhatIsStillClaimed(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := newDatabase(t)
	db.insert(3, "key")
	conn, err := pgx.Connect(ctx, db.dsn)
	must(t, err)
	defer func() { _ = conn.Close(ctx) }()
	instance, err := session.Register(ctx, conn, true, "leaving", "", time.Hour)
	must(t, err)
	s := &store{pool: db.pool}
	if n := db.exec(`UPDATE outbox_delivery SET claim = 1, claimed_by = CASE event_id WHEN 1 THEN $1::int + 1 ELSE $1 END,
		lease_expires_at = now() + $2::interval`, instance, time.Hour); n != 3 {
		t.Fatalf("%d deliveries", n)
	}
	must(t, session.Deregister(ctx, conn, instance))
	if !row[bool](db, `SELECT count(*) = 0 FROM outbox_relay`) {
		t.Error("the relay is still registered")
	}
	if got := rows[int64](db, `SELECT event_id FROM outbox_delivery d WHERE `+pg.IsFree+` ORDER BY 1`); len(got) != 2 {
		t.Errorf("given back: %v, want the two that were its own", got)
	}
	// What was sent before is settled under its claim all the same.
	sent := settlement{delivery: delivery{eventID: 2, destination: "default", fence: 1}, Decision: policy.Decision{Outcome: policy.Delivered, Result: policy.Result{Posted: true}}}
	missed, stale, err := s.settle(ctx, instance, &batch{settlements: []settlement{sent}})
	if err != nil || stale != 0 || len(missed) != 0 {
		t.Errorf("stale %d, missed %d, %v", stale, len(missed), err)
	}
}
