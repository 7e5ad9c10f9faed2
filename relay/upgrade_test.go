package relay

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A schema that is reverted under a running relay ends it, with the reason; a table that is away
// for a moment does not.
func TestRevertedSchemaEndsTheRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := config(db, to("http://receiver.test/"))
	other := start(t, cfg)
	other.relayID()
	db.Exec(`ALTER TABLE outbox_relay RENAME TO away`)
	// A new connection is compared with the one before, by what is away; that says nothing about
	// the schema either.
	db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
	other.await(t, "a failed beat", func(o *observer) bool { return o.failures["session"] > 0 })
	db.Exec(`ALTER TABLE away RENAME TO outbox_relay`)
	other.relayID()
	other.stop()

	r := prepared(t, cfg)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	r.relayID()
	db.Exec(`DELETE FROM outbox_schema_version WHERE version_id > 2; ALTER TABLE outbox_relay DROP COLUMN lease`)
	endedBySchema(t, ended)
}

// A relay that finds the schema reverted when its session comes back ends, too: then nothing but
// the session's own statements fails.
func TestSchemaRevertedWhileAwayEndsTheRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(t, config(db, to("http://receiver.test/")))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	r.relayID()
	relaytest.Must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `DELETE FROM outbox_schema_version WHERE version_id > 2; ALTER TABLE outbox_relay DROP COLUMN lease;
			SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		return err
	}))
	endedBySchema(t, ended)
}

func endedBySchema(t *testing.T, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		if !errors.Is(err, pg.ErrSchema) || !strings.Contains(err.Error(), "outbox-relay migrate up") {
			t.Errorf("Run: %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the relay works on, on a schema that was reverted")
	}
}
