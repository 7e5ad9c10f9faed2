package migrations_test

import (
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// The switch waits for a producer who has inserted an event, but no other producer waits with it. Each event from before it has its
// deliveries, each one from after it a transaction that relays have yet to take.
func TestSwitchBesideProducers(t *testing.T) {
	t.Parallel()
	const before = 14
	db := open(t, pgtest.New(t, migrations.Outbox))
	waits := make(chan struct{}, 1000)
	m, err := migrations.New(db, migrations.Outbox, migrations.Options{
		LockTimeout: 20 * time.Millisecond, OnWait: func(*migrations.LockedError) { waits <- struct{}{} },
	})
	pgtest.Must(t, err)
	if _, err := m.DownTo(t.Context(), before); err != nil {
		t.Fatal(err)
	}
	first := produce(t, db)
	var migrating sync.WaitGroup
	migrating.Go(func() {
		if _, err := m.Up(t.Context()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(migrating.Wait)
	t.Cleanup(func() { _ = first.Rollback() })
	<-waits
	if _, err := db.ExecContext(t.Context(), insert, "beside"); err != nil {
		t.Fatal(err)
	}
	<-waits
	pgtest.Must(t, first.Commit())
	migrating.Wait()
	if _, err := db.ExecContext(t.Context(), insert, "after"); err != nil {
		t.Fatal(err)
	}
	const events = `SELECT string_agg(e.idempotency_key || ' ' || (SELECT count(*) FROM outbox_delivery d WHERE d.event_id = e.id) || ' ' ||
		pg_visible_in_snapshot(e.xid, (SELECT target FROM outbox_range ORDER BY seq DESC LIMIT 1)), ', ' ORDER BY e.id) FROM outbox e`
	if got := scan[string](t, db, events); got != "open 1 true, beside 1 true, after 0 false" {
		t.Errorf("deliveries, and whether relays pass an event over: %s", got)
	}
}
