package history

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// A stage has the connections of a relay, which search pg_catalog alone.
func stage(t testing.TB) (*relaytest.Database, pg.DB) {
	db := relaytest.Covered(t, "shop")
	pool := pgtest.PoolWith(t, db.DSN, func(cfg *pgxpool.Config) { pg.SetDirect(cfg, "") })
	return db, pg.ReadCommitted(pool, pg.NewNames("", "outbox_schema_version"))
}

// pooled returns the connections of a relay behind a pooler.
func pooled(t testing.TB, db *relaytest.Database) pg.DB {
	var settings map[string]string
	own := pgtest.PoolWith(t, db.DSN, func(cfg *pgxpool.Config) { settings = pg.SetPooled(cfg, "public") })
	return pg.NewTransactions(own, settings, func(_ context.Context, names, values []string) (string, []any) {
		return pg.SetForTransaction, []any{names, values}
	}, func(err error) error { return err })
}

// What two relays did, one of them behind a pooler, is added up: counts, histograms of different
// length, and the backlog, which both see, not twice.
func TestRelaysAddUp(t *testing.T) {
	t.Parallel()
	db, conn := stage(t)
	db.Insert(3, "k")
	paid := Key{"shop", "paid"}
	one, two := New(), New()
	for range 95 {
		one.Attempted(paid, policy.Delivered, 10*time.Millisecond, time.Minute)
	}
	for range 5 {
		two.Attempted(Key{"shop", "sent"}, policy.Delivered, 3*time.Second, time.Hour)
	}
	two.Attempted(paid, policy.Fail, 0, 0)
	two.Attempted(paid, policy.Hold, 0, 0)
	two.Attempted(Key{"mail", "paid"}, policy.Retry, 0, 0)
	through := conn
	for _, r := range []*Recorder{one, two, one, New()} { // what was written is not written again
		relaytest.Must(t, r.Flush(t.Context(), through, []string{"shop", "mail"}))
		through = pooled(t, db)
	}
	two.Attempted(paid, policy.Delivered, time.Millisecond, time.Millisecond) // is seen before it is written
	for _, span := range Spans() {
		points, err := Read(t.Context(), conn, "shop", span)
		relaytest.Must(t, err)
		past := Build(points, "shop", two.Unwritten(), span, time.Now())
		if s := past.Sum; s.Delivered != 101 || s.Failed != 1 || s.Probes != 1 || s.Retried != 0 || *s.Response.P50 > 0.02 || *s.Response.P99 < 2 || *s.Latency.P99 < 1800 {
			t.Errorf("%s: %+v", span.Name, s)
		}
		if len(past.Types) != 2 || past.Types[0].EventType != "paid" || past.Types[1].Delivered != 5 {
			t.Errorf("%s: types %+v", span.Name, past.Types)
		}
		if points := int(span.Back / span.Step); len(past.Series.Times) < points-1 || len(past.Series.Times) > points || past.Series.Delivered[0] != nil {
			t.Errorf("%s: %d points", span.Name, len(past.Series.Times))
		}
	}
	for _, destination := range []string{"", "shop"} {
		if n := relaytest.Row[int](db, `SELECT max(backlog)::int FROM outbox_history WHERE step = 1 AND destination = $1`, destination); n != 3 {
			t.Errorf("backlog %d of %q", n, destination)
		}
	}
	each, err := ReadEach(t.Context(), conn, []string{"mail"})
	relaytest.Must(t, err)
	if past := Build(each, "mail", nil, SpanOf("1h"), time.Now()); past.Sum.Retried != 1 {
		t.Errorf("%+v", past.Sum)
	}
}

// However many destinations there are, a minute has a bounded number of rows. What is old is
// removed, and what could not be written is kept.
func TestHistoryIsBounded(t *testing.T) {
	t.Parallel()
	db, conn := stage(t)
	r := New()
	for i := range 3 * maxKeys {
		for range 1 + i%2 {
			r.Attempted(Key{fmt.Sprintf("d%d", i), "t"}, policy.Delivered, 0, 0)
		}
	}
	db.Exec(`INSERT INTO outbox_history SELECT s, 'old', now() - make_interval(hours => h), '', 1, 0, 0, 0, NULL, '{}', '{}' FROM (VALUES (1, 24), (1, 26), (60, 26), (60, 338)) v (s, h);
		ALTER TABLE outbox_history RENAME TO away`)
	if err := r.Flush(t.Context(), conn, nil); err == nil {
		t.Error("written without a table")
	}
	db.Exec(`ALTER TABLE away RENAME TO outbox_history`)
	relaytest.Must(t, r.Flush(t.Context(), conn, nil))
	for statement, want := range map[string]int{
		`SELECT count(*) FROM outbox_history WHERE step = 1 AND destination <> 'old'`:                                                  1 + 1 + Busiest + Busiest,
		`SELECT delivered FROM outbox_history WHERE step = 60 AND destination = '' AND event_type = ''`:                                9 * maxKeys / 2,
		`SELECT sum(delivered) FROM outbox_history WHERE step = 60 AND destination <> '' AND destination <> 'old' AND event_type = ''`: 9 * maxKeys / 2,
		`SELECT count(*) FROM outbox_history WHERE destination = 'old'`:                                                                2,
	} {
		if n := relaytest.Row[int](db, statement); n != want {
			t.Errorf("%s: %d, want %d", statement, n, want)
		}
	}
}

// BenchmarkFlush measures the statement of a minute at its widest.
func BenchmarkFlush(b *testing.B) {
	_, conn := stage(b)
	for b.Loop() {
		r := New()
		for i := range Busiest {
			for j := range 20 {
				r.Attempted(Key{fmt.Sprintf("d%d", i), "t"}, policy.Delivered, time.Duration(1+j)*7*time.Millisecond, time.Duration(1+j)*9*time.Millisecond)
			}
		}
		relaytest.Must(b, r.Flush(b.Context(), conn, []string{"shop"}))
	}
}
