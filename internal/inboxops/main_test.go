package inboxops_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// A desk is where an operator works: a receiver's database, and the tables as the owner sees them.
type desk struct {
	*testing.T
	dsn  string
	pool *pgxpool.Pool
	ops  *inboxops.Ops
}

func newDesk(t *testing.T) *desk {
	t.Helper()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.Pool(t, dsn)
	return &desk{t, dsn, pool, inboxops.New(pgtest.Pool(t, dsn))}
}

func (d *desk) exec(query string, args ...any) {
	d.Helper()
	if _, err := d.pool.Exec(d.Context(), query, args...); err != nil {
		d.Fatalf("%s: %v", query, err)
	}
}

func (d *desk) count(query string, args ...any) (n int) {
	d.Helper()
	if err := d.pool.QueryRow(d.Context(), query, args...).Scan(&n); err != nil {
		d.Fatalf("%s: %v", query, err)
	}
	return n
}

// event puts an event into the inbox of the receiver shipping and the source finance, and remembers
// it. columns are more of them, with their values as SQL.
func (d *desk) event(id int, state string, columns ...string) {
	d.Helper()
	d.eventOf("shipping", "finance", id, state, columns...)
}

func (d *desk) eventOf(receiver, source string, id int, state string, columns ...string) {
	d.Helper()
	names, values := "", ""
	for pair := range slices.Chunk(columns, 2) {
		names, values = names+", "+pair[0], values+", "+pair[1]
	}
	if state == inboxops.Pending && !strings.Contains(names, "next_attempt_at") {
		names, values = names+", next_attempt_at", values+", now()"
	}
	d.exec(fmt.Sprintf(`INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, attempts, interruptions, payload%s)
		SELECT $1, $2, 'k' || $3::int, 't', $4, $3::int, 7, 3, '{}'%s`, names, values), receiver, source, id, state)
	d.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state) VALUES ($1, $2, 'k' || $3::int, 't', 'recorded')`, receiver, source, id)
}

// ids returns the inbox ids of a query, in order, without blanks between them.
func (d *desk) ids(where string) (ids string) {
	d.Helper()
	pgtest.Must(d, d.pool.QueryRow(d.Context(), `SELECT coalesce(string_agg(inbox_id::text, '' ORDER BY inbox_id), '') FROM inbox_events WHERE `+where).Scan(&ids))
	return ids
}

// must calls one of the operations, which must succeed.
func (d *desk) must(operation func(context.Context, inboxops.Selection, func(inboxops.Bulk)) (inboxops.Bulk, error), s inboxops.Selection) inboxops.Bulk {
	d.Helper()
	b, err := operation(d.Context(), s, nil)
	if err != nil {
		d.Fatalf("%+v: %v", s, err)
	}
	return b
}
