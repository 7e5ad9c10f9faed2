package outbox_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/outbox"
)

const insufficientPrivilege = "42501"

// as returns a transaction that has the rights of the role alone.
func (db *database) as(role string) pgx.Tx {
	db.t.Helper()
	tx := begin(db.t, db.pool, pgx.ReadCommitted)
	_, err := tx.Exec(db.t.Context(), `SET LOCAL ROLE `+role)
	must(db.t, err)
	return tx
}

func TestEnqueueNeedsOnlyInsertUnlessAKeyExists(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		db.applyRoles()
		tx := db.begin(nil)
		must(t, tx.Exec(`SET LOCAL ROLE outbox_producer`))
		result, err := tx.Enqueue(outbox.Producer{}, event("a"), event("b"), event("a"))
		must(t, err)
		equal(t, "result", result, outbox.Result{Inserted: 2, Duplicates: []string{"a"}})
		must(t, tx.Commit())
		equal(t, "deliveries", db.deliveries(), []string{"a>", "b>"})

		tx = db.begin(nil)
		must(t, tx.Exec(`SET LOCAL ROLE outbox_producer`))
		_, err = tx.Enqueue(outbox.Producer{}, event("a"))
		equal(t, "code", refusal(t, err), insufficientPrivilege)
		equal(t, "error", err.Error(), `outbox: compare events whose keys exist: ERROR: permission denied for table outbox (SQLSTATE 42501); `+
			`grant outbox_reader beside outbox_producer to tell duplicates from reused keys, see migrations/roles.sql`)
		must(t, tx.Rollback())

		tx = db.begin(nil)
		must(t, tx.Exec(`SET LOCAL ROLE outbox_relay`))
		_, err = tx.Enqueue(outbox.Producer{}, event("c"))
		equal(t, "error", err.Error(), `outbox: insert events: ERROR: permission denied for table outbox (SQLSTATE 42501); `+
			`grant outbox_producer to the role, see migrations/roles.sql`)
		must(t, tx.Rollback())
	})
}

func TestReaderBesideProducerTellsDuplicates(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.applyRoles()
	rolesLock.Lock()
	db.exec(`DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'billing') THEN
			CREATE ROLE billing IN ROLE outbox_producer, outbox_reader;
		END IF;
	END $$`)
	rolesLock.Unlock()
	for _, want := range []outbox.Result{{Inserted: 1}, {Duplicates: []string{"a"}}} {
		tx := db.as("billing")
		got, err := outbox.Enqueue(t.Context(), tx, event("a"))
		must(t, err)
		must(t, tx.Commit(t.Context()))
		equal(t, "result", got, want)
	}
}

// The trigger runs with its owner's rights: nothing that a producer makes may take the place of what it uses.
func TestSecurityProducerCannotDivertTheTrigger(t *testing.T) {
	t.Parallel()
	for name, decoys := range map[string]string{
		"temporary tables": `
			CREATE TEMP TABLE outbox_delivery (event_id bigint, destination text, next_attempt_at timestamptz, ordering_key text, payload_bytes integer);
			CREATE TEMP TABLE outbox_route (pattern text, destination text, like_pattern text);
			INSERT INTO outbox_route VALUES ('*', 'evil', '%');
			CREATE TEMP TABLE new_event (id bigint)`,
		"own schema first": `
			SET LOCAL search_path = evil, public;
			CREATE TABLE outbox_delivery (event_id bigint, destination text, next_attempt_at timestamptz, ordering_key text, payload_bytes integer);
			CREATE TABLE outbox_route (pattern text, destination text, like_pattern text);
			INSERT INTO outbox_route VALUES ('*', 'evil', '%');
			CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''2100-01-01''::timestamptz';
			CREATE FUNCTION everything(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
			CREATE OPERATOR ~~ (FUNCTION = everything, LEFTARG = text, RIGHTARG = text)`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			db.applyRoles()
			db.exec(`INSERT INTO outbox_route VALUES ('t', 'logistics'), ('other', 'unrelated')`)
			db.exec(`CREATE SCHEMA evil`)
			db.exec(`GRANT ALL ON SCHEMA evil TO outbox_producer`)
			tx := db.as("outbox_producer")
			_, err := tx.Exec(t.Context(), decoys)
			must(t, err)
			_, err = tx.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`)
			must(t, err)
			var diverted int
			must(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM outbox_delivery`).Scan(&diverted))
			equal(t, "rows in the decoy", diverted, 0)
			must(t, tx.Commit(t.Context()))
			equal(t, "deliveries", db.strings(`SELECT destination FROM public.outbox_delivery WHERE next_attempt_at < now()`), []string{"logistics"})
		})
	}
}
