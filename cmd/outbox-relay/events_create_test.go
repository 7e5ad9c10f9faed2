package main

import "testing"

// Events without deliveries get theirs after a yes, once.
func TestEventsCreateDeliveries(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, `INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics'), ('*', 'analytics')`)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k1'), ('paid', '{}', 'k2')`)
	execute(t, db, `DELETE FROM outbox_delivery WHERE event_id = 2`)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	command(env, "events", "create-deliveries").expect(t, 2, "",
		"outbox-relay: create the deliveries of 1 event without any, the first is event 2, as the stored routes say; nothing was done: run the command on a terminal, where it asks first\n")
	command(env, "events", "create-deliveries", "--yes").expect(t, 0, "2 deliveries created for 1 event\n", "")
	command(env, "events", "create-deliveries", "--yes").expect(t, 0, "0 deliveries created for 0 events\n", "")
	command(env, "events", "create-deliveries", "--json").expect(t, 0, "{\n  \"events\": 0,\n  \"deliveries\": 0\n}\n", "")
}
