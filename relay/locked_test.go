package relay

import (
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"
)

// FAULTS 67: somebody locks a row that is in flight, in a psql that is then forgotten. The outcome of that delivery
// cannot be written; all others can.
func TestLockedRowKeepsNoOther(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "a", "b")
	g := newGate(t)
	a := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.key == "first-1" && r.number == 1 {
			g.pass(r)
		}
	})
	b := newReceiver(t, nil)
	db.insert(1, "first")
	toA, toB := to(a.URL), to(b.URL)
	toA.Name, toB.Name = "a", "b"
	r := start(t, db.config(toA, toB))
	<-g.arrived
	operator, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	defer func() { _ = operator.Close(t.Context()) }()
	_, err = operator.Exec(t.Context(), `BEGIN; SELECT FROM outbox_delivery WHERE destination = 'a' AND event_id = 1 FOR UPDATE`)
	must(t, err)
	g.open()
	db.insert(1000, "more")
	r.settles(t, Delivered, 2002) // the locked one counts: nothing more can be done about it
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`); n != 2001 {
		t.Errorf("%d of the 2001 others are delivered", n)
	}
	_, err = operator.Exec(t.Context(), `ROLLBACK`)
	must(t, err)
	db.exec(`UPDATE outbox_delivery SET lease_expires_at = now() WHERE status = 'pending'`)
	becomes(db, 2002, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`)
}

// A whole table is locked, as migrations do: that ends, and is waited for. Nothing is sent twice for it.
func TestLockedTableIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(20, "key")
	r := start(t, db.config(to(rc.URL)))
	for range 20 {
		<-g.arrived
	}
	migration, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	defer func() { _ = migration.Close(t.Context()) }()
	_, err = migration.Exec(t.Context(), `BEGIN; LOCK TABLE outbox_delivery IN ACCESS EXCLUSIVE MODE`)
	must(t, err)
	g.open()
	r.await(t, "two vain settles", func(o *observer) bool { return o.failures["settle"] >= 2 })
	_, err = migration.Exec(t.Context(), `COMMIT`)
	must(t, err)
	r.settles(t, Delivered, 20)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`); n != 20 || rc.total() != 20 {
		t.Errorf("%d of 20 delivered, %d requests", n, rc.total())
	}
}
