package relay

import (
	"context"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Passwords that are fetched for every connection come in BeforeConnect: the session's connection needs them too.
func TestSessionConnectsAsThePoolDoes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.insert(1, "key")
	cfg := db.config(to(rc.URL))
	right := cfg.Pool.ConnConfig.Database
	cfg.Pool.ConnConfig.Database = "nowhere"
	cfg.Pool.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
		conn.Database = right
		return nil
	}
	var connected atomic.Int32
	cfg.Pool.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		connected.Add(1)
		_, err := conn.Exec(ctx, `SET application_name = 'prepared'`)
		return err
	}
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 1)
	// All of the relay's connections, one of which listens, went through both, or are about to: the pool may be opening one.
	becomes(db, 0, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox-relay'`)
	if n := connected.Load(); n < 2 {
		t.Errorf("%d connections with AfterConnect", n)
	}
}

// The body is UTF-8 whatever the database's own encoding is.
func TestPayloadIsUTF8FromADatabaseInLatin1(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := newDatabase(t)
	u, err := url.Parse(server.dsn)
	must(t, err)
	name := row[string](server, `SELECT current_database() || '_latin1'`)
	server.exec(`CREATE DATABASE ` + name + ` ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	t.Cleanup(func() {
		_, _ = server.pool.Exec(context.WithoutCancel(t.Context()), `DROP DATABASE `+name+` WITH (FORCE)`)
	})
	u.Path = "/" + name
	plain := u.String()
	query := u.Query()
	query.Set("client_encoding", "UTF8")
	u.RawQuery = query.Encode()
	pgtest.Migrate(t, plain, migrations.Outbox)
	db := &database{TB: t, dsn: plain, pool: pgtest.Pool(t, u.String())}
	db.route()
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{"name": "Müller"}', 'key')`)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 1)
	if got := string(rc.all()[0].body); got != `{"name": "Müller"}` {
		t.Errorf("body %q", got)
	}
}
