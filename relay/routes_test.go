package relay

import (
	"testing"
)

// TestReconnectKeepsLaterRoutes cuts the session of an old relay while one with a newer configuration runs beside it, as
// in a deploy: events for the new destination must not be lost to the old one's routes.
func TestReconnectKeepsLaterRoutes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec("DELETE FROM outbox_route")
	rc := newReceiver(t, nil)
	logistics, analytics := to(rc.URL), to(rc.URL)
	logistics.Name, analytics.Name = "logistics", "analytics"
	older := start(t, db.config(logistics))
	becomes(db, "logistics", "SELECT coalesce(string_agg(destination, ' ' ORDER BY destination), '') FROM outbox_route")
	start(t, db.config(logistics, analytics))
	becomes(db, "analytics logistics", "SELECT coalesce(string_agg(destination, ' ' ORDER BY destination), '') FROM outbox_route")

	const holder = `SELECT coalesce(max(pid), 0) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = $1::int::bigint::oid
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	instance := older.instance()
	before := row[int](db, holder, instance)
	db.terminate(instance)
	becomes(db, true, "SELECT pid NOT IN (0, $2) FROM ("+holder+") h (pid)", instance, before)
	db.insert(1, "k")
	becomes(db, 2, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'")
	if got := row[string](db, "SELECT coalesce(string_agg(destination, ' ' ORDER BY destination), '') FROM outbox_route"); got != "analytics logistics" {
		t.Errorf("the old relay left these routes: %s", got)
	}
}
