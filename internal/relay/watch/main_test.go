package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// enginePool returns a pool with the settings of a relay's own.
func enginePool(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, dsn, func(cfg *pgxpool.Config) { pg.SetDirect(cfg, "") })
}

// engineConn returns one connection of such a pool.
func engineConn(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := enginePool(t, dsn).Acquire(t.Context())
	relaytest.Must(t, err)
	t.Cleanup(conn.Release)
	return conn.Conn()
}

// newWatcher returns the watcher of one relay, for which no other relay's look is recent enough.
func newWatcher(t testing.TB, db pg.DB, limits alert.Config) *Watcher {
	limits = limits.WithDefaults()
	return &Watcher{
		DB: db, Config: func() Config { return Config{Interval: time.Nanosecond}.WithDefaults() }, Alerts: func() alert.Config { return limits },
		Lenient: func() []string { return nil }, Alive: func() bool { return true }, Rest: func(_, took time.Duration) time.Duration { return took },
		Looked: func() {}, Due: func() {}, Failed: func(operation string, err error) { t.Errorf("%s: %v", operation, err) },
	}
}

// look takes a look and returns what was seen.
func look(t testing.TB, w *Watcher) Watch {
	t.Helper()
	relaytest.Must(t, w.Look(t.Context()))
	seen, ok := w.Recent()
	if !ok {
		t.Fatal("no look")
	}
	return seen
}

// lookLater takes a look four minutes after the last one.
func lookLater(db *relaytest.Database, w *Watcher) {
	db.Helper()
	db.Exec(`UPDATE outbox_watch SET watched_at = watched_at - interval '4 minutes'`)
	relaytest.Must(db, w.Look(db.Context()))
}

// wantAlerts checks which rules have an open alert.
func wantAlerts(db *relaytest.Database, want ...string) {
	db.Helper()
	if got := relaytest.Rows[string](db, `SELECT rule FROM outbox_alert WHERE resolved_at IS NULL ORDER BY rule`); !slices.Equal(got, want) {
		db.Errorf("alerts %q, want %q", got, want)
	}
}
