package outbox_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/outbox"
)

const insufficientPrivilege = "42501"

// as returns a transaction that has the rights of the role alone.
func (db *database) as(role string) pgx.Tx {
	db.t.Helper()
	tx := begin(db.t, db.pool, pgx.ReadCommitted)
	_, err := tx.Exec(db.t.Context(), `SET LOCAL ROLE `+role)
	pgtest.Must(db.t, err)
	return tx
}

func TestEnqueueNeedsOnlyTheRoleOfProducers(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		db.applyRoles()
		tx := db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL ROLE outbox_producer`))
		result, err := tx.Enqueue(outbox.Producer{}, event("a"), event("b"), event("a"))
		pgtest.Must(t, err)
		equal(t, "result", result, outbox.Result{Inserted: 2, Duplicates: []string{"a"}})
		pgtest.Must(t, tx.Commit())
		equal(t, "events", db.keys(), []string{"a", "b"})

		tx = db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL ROLE outbox_producer`))
		result, err = tx.Enqueue(outbox.Producer{}, event("a"), event("c"))
		pgtest.Must(t, err)
		equal(t, "result of a repeated event", result, outbox.Result{Inserted: 1, Duplicates: []string{"a"}})
		reused := event("b")
		reused.Payload = []byte(`2`)
		_, err = tx.Enqueue(outbox.Producer{}, reused)
		if !errors.Is(err, outbox.ErrKeyReused) || !strings.Contains(err.Error(), "Payload") {
			t.Errorf("a reused key: %v", err)
		}
		pgtest.Must(t, tx.Rollback())

		tx = db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL ROLE outbox_relay`))
		_, err = tx.Enqueue(outbox.Producer{}, event("c"))
		equal(t, "error", err.Error(), `outbox: insert events: ERROR: permission denied for table outbox (SQLSTATE 42501); `+
			`grant outbox_producer to the role, see migrations/roles.sql`)
		pgtest.Must(t, tx.Rollback())
	})
}

// The default of xid runs with the producer's rights, and the function that it calls with those of the owner. Nothing that a
// producer makes may take the place of what they use.
func TestSecurityProducerCannotDivertTheDefault(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.applyRoles()
	db.exec(`CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO outbox_producer;
		SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 600000)`)
	listener, err := pgx.Connect(t.Context(), db.dsn)
	pgtest.Must(t, err)
	defer listener.Close(t.Context())
	_, err = listener.Exec(t.Context(), `LISTEN outbox_wake`)
	pgtest.Must(t, err)
	tx := db.as("outbox_producer")
	_, err = tx.Exec(t.Context(), `
		CREATE TEMP SEQUENCE outbox_armed;
		SET LOCAL search_path = evil, public;
		CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''2100-01-01''::timestamptz';
		CREATE FUNCTION pg_current_xact_id() RETURNS xid8 LANGUAGE sql AS 'SELECT ''7''::xid8';
		CREATE FUNCTION outbox_wake() RETURNS xid8 LANGUAGE sql AS 'SELECT ''7''::xid8';
		CREATE FUNCTION pg_sequence_last_value(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
		CREATE FUNCTION pg_notification_queue_usage() RETURNS float8 LANGUAGE sql AS 'SELECT 1::float8';
		CREATE FUNCTION pg_notify(text, name) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''as %'', current_user; END';
		INSERT INTO public.outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
	pgtest.Must(t, err)
	var xid string
	pgtest.Must(t, tx.QueryRow(t.Context(), `SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text`).Scan(&xid))
	pgtest.Must(t, tx.Commit(t.Context()))
	equal(t, "xid", db.strings(`SELECT xid::text FROM outbox`), []string{xid})
	notification, err := listener.WaitForNotification(t.Context())
	pgtest.Must(t, err)
	equal(t, "payload", notification.Payload, "public")
}
