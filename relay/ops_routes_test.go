package relay

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
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

// A destination that was renamed before it was empty: its deliveries are unserved, which the log, status, events show and
// an alert say, until a relay serves it.
func TestUnservedDeliveries(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "default", "old", "other")
	db.insert(3, "k")
	db.settled("failed", "destination = 'other'") // waits for an operator, not for a relay
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE destination = 'old'`)
	rc := newReceiver(t, nil)
	ops := &pager{name: "ops"}
	cfg := db.config(to(rc.URL))
	cfg.Alerts.Channels = []alert.Channel{ops}
	cfg.Watching.Interval = 100 * time.Millisecond
	logged := &safeBuffer{}
	cfg.Log = zerolog.New(logged)
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 3)
	if !strings.Contains(logged.String(), `"destinations":["old (3)"],"message":"deliveries wait for destinations that no running relay serves; `+
		`configure them, or give up what waits: outbox-relay discard --destination old"`) {
		t.Errorf("the log says\n%s", logged)
	}
	ops.await(t, alert.RuleUnserved, "firing")
	if got := ops.of(alert.RuleUnserved)[0]; got.Subject != "old" || !strings.Contains(got.Text(), `Deliveries to "old" are unserved: 3 pending`) {
		t.Errorf("the alert is %q", got.Text())
	}
	served := func() string {
		status, err := NewOps(db.pool).Status(t.Context())
		must(t, err)
		waits, err := NewOps(db.pool).Waits(t.Context(), 1)
		must(t, err)
		var texts []string
		for _, d := range status.Destinations {
			texts = append(texts, fmt.Sprint(d.Destination, " ", d.Served))
		}
		for _, w := range waits {
			texts = append(texts, w.Destination+" "+w.Why)
		}
		return strings.Join(texts, ", ")
	}
	if got, want := served(), "default true, old false, other false, old not_due, old unserved"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}

	second := start(t, db.config(named("old", to(rc.URL))))
	second.instance()
	if got, want := served(), "default true, old true, other false, old not_due"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	becomes(db, true, `SELECT resolved_at IS NOT NULL FROM outbox_alert WHERE rule = 'unserved'`)
	if got := (unservedDestination{"old", 10_001}).String(); got != "old (more than 10000)" {
		t.Error(got)
	}
}

// Neither a relay's start nor a pause may take longer the more waits.
func TestPlanOfUnserved(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.fill(100_000, 10)
	db.exec(`VACUUM ANALYZE`)
	for statement, conn := range map[string]*pgx.Conn{pg.Unserved: engineConn(t, db), selectDestinationNames: commandConn(t, db)} {
		result, err := conn.Query(t.Context(), `EXPLAIN (COSTS OFF) `+statement, pgx.QueryExecModeExec)
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
