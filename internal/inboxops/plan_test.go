package inboxops_test

import (
	"net/url"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// What a session has read since it was asked last: sequential scans, and entries of indexes.
const readSoFar = `
SELECT pg_stat_force_next_flush(), (SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname IN ('inbox_events', 'processed_events')),
       (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname IN ('inbox_events', 'processed_events'))`

// fillLarge adds $1 events of 20 receivers and sources: 94 of 100 succeeded, 2 failed, 1 was
// ignored, 3 are pending. $2 is how many ordering keys the two of five have that are in order.
const fillLarge = `
WITH event AS (
    SELECT i, 'receiver ' || i % 4 AS receiver, 'source ' || i % 5 AS source, CASE WHEN i % 5 < 2 THEN 'o' || i % $2::int END AS ordering_key,
           CASE WHEN i % 97 < 91 THEN 'succeeded' WHEN i % 97 < 93 THEN 'failed' WHEN i % 97 < 94 THEN 'ignored' ELSE 'pending' END AS state
    FROM generate_series(1, $1::int) i
), remembered AS (
    INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state)
    SELECT receiver, source, 'invoice-' || i, 't' || i % 50, 'recorded' FROM event
)
INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, next_attempt_at, ordering_key, sequence, attempts, payload, last_error)
SELECT receiver, source, 'invoice-' || i, 't' || i % 50, state, nextval('inbox_id_seq'), CASE WHEN state = 'pending' AND ordering_key IS NULL THEN now() END, ordering_key, i, 1,
       convert_to(repeat('x', 200), 'UTF8'), CASE WHEN state = 'failed' THEN 'no such customer' END
FROM event`

// No command reads an inbox as a whole, whether or not the tables were ever analysed: most of its
// 20,000 events succeeded, and are no concern of it.
func TestNothingReadsTheWholeInbox(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn, err := url.Parse(pgtest.New(t, migrations.Inbox))
	pgtest.Must(t, err)
	query := dsn.Query()
	query.Set("pool_max_conns", "1") // one session counts
	dsn.RawQuery = query.Encode()
	pool := pgtest.Pool(t, dsn.String())
	ops := inboxops.New(pool)
	exec := func(query string, args ...any) {
		t.Helper()
		pgtest.Exec(t, pool, query, args...)
	}
	var version int
	if err := pool.QueryRow(t.Context(), "SELECT current_setting('server_version_num')::int").Scan(&version); err != nil || version < 150000 {
		t.Skipf("PostgreSQL before 15 does not say at once what it has read: %d, %v", version, err)
	}
	exec("ALTER TABLE inbox_events SET (autovacuum_enabled = off)")
	exec("ALTER TABLE processed_events SET (autovacuum_enabled = off)")
	exec(fillLarge, 20_000, 100)
	const few = 3000 // more than 20 senders' events that wait, failed or were ignored, which are 1,237
	type sel = inboxops.Selection
	list := func(s inboxops.Selection) func() error {
		s.Limit = 50
		return func() error {
			_, err := ops.List(t.Context(), s)
			return err
		}
	}
	for _, when := range []string{"loaded", "analysed"} {
		for name, command := range map[string]func() error{
			"status": func() error {
				_, err := ops.Status(t.Context(), "", "")
				return err
			},
			"list":                 list(sel{}),
			"list of a receiver":   list(sel{Receiver: "receiver 1"}),
			"list failed":          list(sel{States: []string{failed}}),
			"list pending":         list(sel{States: []string{pending}}),
			"list processing":      list(sel{States: []string{processing}}),
			"list a key":           list(sel{Key: "invoice-77"}),
			"list an ordering key": list(sel{OrderingKey: "o5", States: []string{pending, failed}}),
			"list failed pending":  list(sel{States: []string{pending, failed}}),
			"show": func() error {
				_, err := ops.Show(t.Context(), 0, sel{Key: "invoice-77"})
				return err
			},
			"remembered": func() error {
				_, err := ops.Remembered(t.Context(), sel{Key: "invoice-77", Limit: 50}, inboxops.MemoryKey{})
				return err
			},
			"preview": func() error {
				_, err := ops.PreviewReplay(t.Context(), sel{Type: "t7"})
				return err
			},
			"replay a key": func() error {
				_, err := ops.Replay(t.Context(), sel{Key: "invoice-77", States: []string{pending, failed, ignored, succeeded}}, nil)
				return err
			},
			"ignore what is pending of a type": func() error {
				_, err := ops.Ignore(t.Context(), sel{States: []string{pending}, Type: "t49"}, nil)
				return err
			},
		} {
			var scans, entries, scansNow, entriesNow int64
			pgtest.Must(t, pool.QueryRow(t.Context(), readSoFar).Scan(nil, &scans, &entries))
			pgtest.Must(t, pool.QueryRow(t.Context(), readSoFar).Scan(nil, &scans, &entries))
			if err := command(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			for range 2 { // what the first one flushes shows in the second
				pgtest.Must(t, pool.QueryRow(t.Context(), readSoFar).Scan(nil, &scansNow, &entriesNow))
			}
			if scansNow != scans || entriesNow-entries > few {
				t.Errorf("%s, %s: %d scans of a table, %d entries of indexes are read", name, when, scansNow-scans, entriesNow-entries)
			}
		}
		exec("VACUUM ANALYZE inbox_events, processed_events")
	}
}
