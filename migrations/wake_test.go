package migrations_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// listen returns a connection that hears what wakes relays, and a context for waiting.
func listen(t *testing.T, dsn string) (context.Context, *pgx.Conn) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	listener, err := pgx.Connect(ctx, dsn)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = listener.Close(context.WithoutCancel(ctx)) })
	_, err = listener.Exec(ctx, `LISTEN outbox_wake`)
	pgtest.Must(t, err)
	return ctx, listener
}

// A transaction wakes relays once, however many events it inserts; also if the savepoint in which
// it did so was rolled back.
func TestTransactionWakesOnce(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	ctx, listener := listen(t, dsn)
	pool := pgtest.Pool(t, dsn)
	pgtest.Exec(t, pool, `SELECT setval('outbox_armed', (extract(epoch FROM now() + interval '1 hour') * 1000)::bigint)`)
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '1', gen_random_uuid() FROM generate_series(1, 1000)`
	const calls = `SELECT coalesce(sum(calls), 0)::int FROM pg_stat_xact_user_functions WHERE funcname = 'outbox_wake'`
	for statements, want := range map[string]int{insert + `; ` + insert: 1, `SAVEPOINT s; ` + insert + `; ROLLBACK TO s; ` + insert: 2} {
		pgtest.Must(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			before := pgtest.Row[int](t, tx, calls)
			_, err := tx.Exec(ctx, `SET LOCAL track_functions = 'all'; `+statements)
			pgtest.Must(t, err)
			testkit.Equal(t, statements, pgtest.Row[int](t, tx, calls)-before, want)
			return nil
		}))
		_, err := listener.WaitForNotification(ctx)
		pgtest.Must(t, err)
	}
}

// Two outboxes in one database, each in its schema: a transaction wakes the relays of both.
func TestTransactionWakesEachOutbox(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	ctx, listener := listen(t, dsn)
	const other = `"o'ther"`
	_, err := listener.Exec(ctx, `CREATE SCHEMA `+other)
	pgtest.Must(t, err)
	pgtest.Migrate(t, dsn+"&search_path="+url.QueryEscape(other), migrations.Outbox)
	const arm = `SELECT setval('%s.outbox_armed', (extract(epoch FROM now() + interval '1 hour') * 1000)::bigint); `
	const insert = `INSERT INTO %s.outbox (event_type, payload, idempotency_key) VALUES ('t', '1', gen_random_uuid()); `
	pool := pgtest.Pool(t, dsn)
	for _, schema := range []string{"public", other} {
		pgtest.Exec(t, pool, fmt.Sprintf(arm, strings.ReplaceAll(schema, "'", "''")))
	}
	pgtest.Exec(t, pool, fmt.Sprintf(insert+insert+insert, "public", other, "public"))
	var woken []string
	for range 2 {
		n, err := listener.WaitForNotification(ctx)
		pgtest.Must(t, err)
		woken = append(woken, n.Payload)
	}
	slices.Sort(woken)
	testkit.Equal(t, "schemas", fmt.Sprint(woken), "[o'ther public]")
	pgtest.Exec(t, pool, `ALTER SCHEMA `+other+` RENAME TO renamed; `+fmt.Sprintf(insert, "renamed")) // no relay wakes, and the insert is not refused
}

// Events share their ids with their deliveries, also those of events that are gone: whoever empties
// outbox empties outbox_delivery first, or new events would get the deliveries of old ones.
func TestOutboxIsNotEmptiedUnderItsDeliveries(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
	pgtest.Exec(t, pool, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k'); TRUNCATE outbox RESTART IDENTITY;
		INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k'); INSERT INTO outbox_delivery (event_id, destination) VALUES (1, 'd')`)
	_, err := pool.Exec(t.Context(), `TRUNCATE outbox RESTART IDENTITY`)
	if err == nil || hintOf(err) == "" {
		t.Errorf("truncated: %v", err)
	}
	pgtest.Exec(t, pool, `TRUNCATE outbox_delivery; TRUNCATE outbox`)
}

// Whoever publishes all tables of a database, as the first step of a move by logical replication,
// can still delete rows from each.
func TestTablesHaveAReplicaIdentity(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Outbox, migrations.Inbox))
	without := pgtest.Row[[]string](t, pool, `SELECT coalesce(array_agg(relname::text), '{}') FROM pg_class c
		WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND relreplident <> 'f' AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)`)
	if len(without) > 0 {
		t.Errorf("without: %v", without)
	}
}
