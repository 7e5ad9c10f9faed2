package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// The configuration is compared with what the database does, so both must understand a pattern alike.
func TestRouteMatchesAsTheDatabaseDoes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	patterns := []string{"*", "a", "a*", "*a", "*a*", "a*a", "a*b*c", "**", "a**b", "*.b.*", "a_c", "a%c", `a\c`, "a*bc*c", "abc*abc", "A*"}
	types := []string{"a", "aa", "ab", "abc", "a.b.c", "axbyc", "abcabc", "a_c", "axc", "a%c", `a\c`, "abcc", "abcbc", "b", "ba", "A"}
	db.exec(`DELETE FROM outbox_route`)
	db.exec(`INSERT INTO outbox_route SELECT unnest($1::text[]), 'default'`, patterns)
	for _, eventType := range types {
		stored, err := NewOps(db.pool).RoutesOf(t.Context(), eventType)
		must(t, err)
		for _, pattern := range patterns {
			database := slices.ContainsFunc(stored, func(r RouteStatus) bool { return r.Event == pattern })
			if got := (Route{Event: pattern}).Matches(eventType); got != database {
				t.Errorf("%s matches %s: %v, in the database %v", pattern, eventType, got, database)
			}
		}
	}
	all, err := NewOps(db.pool).Routes(t.Context())
	must(t, err)
	if len(all) != len(patterns) {
		t.Errorf("%d routes", len(all))
	}
}

// A destination that was renamed before it was empty: a relay that no longer has it does not start, unless it is told
// that somebody else serves it.
func TestUnservedDestinations(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "default", "old", "other")
	db.insert(3, "k")
	db.settled("failed", "destination = 'other'") // waits for an operator, not for a relay
	db.exec(`DELETE FROM outbox_route`)
	db.insert(1, "parked")
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE destination = 'old'`)
	rc := newReceiver(t, nil)

	r, err := New(db.config(to(rc.URL)))
	must(t, err)
	err = r.Run(t.Context())
	if !errors.Is(err, ErrUnserved) || !strings.Contains(err.Error(), ": old (3). Put it back") || !strings.Contains(err.Error(), "outbox-relay discard --destination old;") {
		t.Errorf("Run: %v", err)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_route`); n != 0 || rc.total() != 0 {
		t.Error("a relay that does not start did something")
	}
	cfg := db.config(to(rc.URL))
	cfg.AllowUnserved = true
	start(t, cfg).settles(t, Delivered, 4) // also what was parked until a route came
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'old' AND status = 'pending'`); n != 3 {
		t.Errorf("%d of 3 still wait", n)
	}
	if got := (Unserved{"old", 10_001}).String(); got != "old (more than 10000)" {
		t.Error(got)
	}
}

// Neither a relay's start nor a pause may take longer the more waits.
func TestPlanOfUnserved(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.fill(100_000, 10)
	db.exec(`VACUUM ANALYZE`)
	for statement, conn := range map[string]*pgx.Conn{selectUnserved: engineConn(t, db), selectDestinationNames: commandConn(t, db)} {
		args := []any{pgx.QueryExecModeExec}
		if statement == selectUnserved {
			args = append(args, []string{"default"})
		}
		result, err := conn.Query(t.Context(), `EXPLAIN (COSTS OFF) `+statement, args...)
		must(t, err)
		lines, err := pgx.CollectRows(result, pgx.RowTo[string])
		must(t, err)
		if plan := strings.Join(lines, "\n"); strings.Contains(plan, "Seq Scan on outbox_delivery") || !strings.Contains(plan, "using outbox_delivery_due") {
			t.Error(plan)
		}
	}
}

// commandConn returns a connection as commands have it.
func commandConn(t testing.TB, db *database) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}
