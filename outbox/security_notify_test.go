package outbox_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A login with CONNECT alone listens, leaves a transaction open and fills the server's queue of notifications. Producers
// insert all the same: an event that wakes no relay is found by polling. PostgreSQL 17 lets the queue be small enough to try.
func TestSecurityFullNotificationQueue(t *testing.T) {
	t.Parallel()
	if newDatabase(t).strings(`SELECT CASE WHEN current_setting('server_version_num')::int < 170000 THEN 'old' ELSE 'new' END`)[0] == "old" {
		t.Skip("the queue holds 8 GB before PostgreSQL 17")
	}
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"max_notify_queue_pages": "64"}})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := &database{t: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
	db.applyRoles()
	for _, login := range []string{"producer", "stranger"} {
		db.exec(`CREATE ROLE attack_` + login + ` LOGIN`)
	}
	db.exec(`GRANT outbox_producer TO attack_producer`)
	db.exec(`SELECT setval('outbox_armed', (extract(epoch FROM now() + interval '1 hour') * 1000)::bigint)`) // relays are idle
	listener, filler := db.login("stranger"), db.login("stranger")
	listener.runs(`LISTEN x`)
	listener.runs(`BEGIN; SELECT 1`)
	for i := range 100 {
		if _, err := filler.conn.Exec(t.Context(), fmt.Sprintf(`SELECT pg_notify('x', '%d%s')`, i, strings.Repeat("x", 7900))); err != nil {
			break
		}
	}
	producer := db.login("producer")
	producer.runs(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	equal(t, "events", db.keys(), []string{"k"})
}
