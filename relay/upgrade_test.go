package relay

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// During a deploy the schema is newer than the relays that still run, or start once more.
func TestNewerSchemaThatOnlyAdds(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_schema_version (version_id, is_applied) VALUES (9999, true)`)
	db.insert(1, "key")
	r := start(t, db.config(to(newReceiver(t, nil).URL)))
	r.settles(t, policy.Delivered, 1)
}

// A schema that is reverted under a running relay ends it, with the reason; a table that is away for a moment does not.
func TestRevertedSchemaEndsTheRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	other := start(t, cfg)
	other.instance()
	db.exec(`ALTER TABLE outbox_relay RENAME TO away`)
	// A new connection is compared with the one before, by what is away; that says nothing about the schema either.
	db.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
	other.await(t, "a failed beat", func(o *observer) bool { return o.failures["session"] > 0 })
	db.exec(`ALTER TABLE away RENAME TO outbox_relay`)
	other.instance()
	other.stop()

	r := prepared(t, cfg)
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	r.instance()
	db.exec(`DELETE FROM outbox_schema_version WHERE version_id > 2; ALTER TABLE outbox_relay DROP COLUMN lease`)
	endedBySchema(t, ended)
}

// A relay that finds the schema reverted when its session comes back ends, too: then nothing but the session's own
// statements fails.
func TestSchemaRevertedWhileAwayEndsTheRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	r := prepared(t, db.config(to("http://receiver.test/")))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	r.instance()
	must(t, pgx.BeginFunc(t.Context(), db.pool, func(tx pgx.Tx) error {
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

// A connection that cannot be lent, because a table it is checked by is away, says nothing about the schema.
func TestMissingTableIsNotAMissingSchema(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.pool.Config()
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SELECT 'away'::regclass")
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	defer pool.Close()
	if _, err := pg.CheckSchema(t.Context(), pool); !pg.HasCode(err, pg.UndefinedTable) || errors.Is(err, pg.ErrSchema) {
		t.Errorf("with a table away: %v", err)
	}
	db.exec("DROP TABLE outbox_schema_version")
	if _, err := pg.CheckSchema(t.Context(), db.pool); !errors.Is(err, pg.ErrSchema) {
		t.Errorf("without a schema: %v", err)
	}
}
