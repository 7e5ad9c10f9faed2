package relay

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// patience bounds every wait: who reaches it has waited for something that does not come. It measures nothing.
const patience = time.Minute

// eventually waits until done is true. It is for what no hook tells, such as what stands in the database.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(patience)
	for !done() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("never came: %s", what)
		}
	}
}

// within fails the test if c does not close.
func within(t testing.TB, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatalf("never came: %s", what)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A database is a fresh outbox, with a pool to look at it.
type database struct {
	testing.TB
	dsn    string // as a relay reaches it
	pool   *pgxpool.Pool
	pooler *localpg.Pooler //nolint:unused // between a relay and the server, with the tag pgbouncer; nil: none
}

// newDatabase returns an outbox that routes everything to the given destinations, "default" if none is given.
func newDatabase(t testing.TB, destinations ...string) *database {
	t.Helper()
	dsn := pgtest.New(t, migrations.Outbox)
	db := &database{TB: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
	db.putPoolerBefore()
	db.route(destinations...)
	return db
}

func (db *database) route(destinations ...string) {
	db.Helper()
	if len(destinations) == 0 {
		destinations = []string{"default"}
	}
	db.exec(`INSERT INTO outbox_route (pattern, destination) SELECT '*', unnest($1::text[])`, destinations)
	db.exec(`DELETE FROM outbox_destination WHERE destination = ANY ($1) AND NOT paused AND breaker = 'closed'`, destinations) // nothing is parked
}

// exec runs a statement, or several without arguments, and returns how many rows the last one touched.
func (db *database) exec(statement string, args ...any) int64 {
	db.Helper()
	tag, err := db.pool.Exec(db.Context(), statement, args...)
	if err != nil {
		db.Fatalf("%s: %v", statement, err)
	}
	return tag.RowsAffected()
}

// insert adds n events of type "t" with the keys prefix-1 … prefix-n and a small payload.
func (db *database) insert(n int, prefix string) {
	db.Helper()
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key)
		SELECT 't', '{"n": 1}', $1 || '-' || i FROM generate_series(1, $2) i`, prefix, n)
}

// rows returns the only column of every row.
func rows[T any](db *database, query string, args ...any) []T {
	db.Helper()
	result, err := db.pool.Query(db.Context(), query, args...)
	if err != nil {
		db.Fatalf("%s: %v", query, err)
	}
	values, err := pgx.CollectRows(result, pgx.RowTo[T])
	if err != nil {
		db.Fatalf("%s: %v", query, err)
	}
	return values
}

// row returns the only column of the only row.
func row[T any](db *database, query string, args ...any) T {
	db.Helper()
	values := rows[T](db, query, args...)
	if len(values) != 1 {
		db.Fatalf("%s: %d rows", query, len(values))
	}
	return values[0]
}

// becomes waits until a query's only value is want.
func becomes[T comparable](db *database, want T, query string, args ...any) {
	db.Helper()
	var got T
	defer func() {
		if got != want {
			db.Logf("%s: got %v, want %v", query, got, want)
		}
	}()
	eventually(db, query, func() bool {
		got = row[T](db, query, args...)
		return got == want
	})
}

// settings parses the DSN for a relay.
func settings(t testing.TB, dsn string) *pgxpool.Config {
	t.Helper()
	pool, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	return pool
}

// config returns a configuration over the database that polls as often as is allowed.
func (db *database) config(destinations ...post.Destination) Config {
	db.Helper()
	return Config{Pool: settings(db, db.dsn), Destinations: destinations, PollInterval: time.Second, Name: "test"}
}

// to returns a destination that retries at once, so that only the test of the schedule has to care about it.
func to(url string) post.Destination {
	return post.Destination{Name: "default", URL: url, Retry: policy.RetryPolicy{Schedule: []time.Duration{time.Millisecond}}}
}

// A running relay is stopped, and has to stop without an error, when its test ends.
type running struct {
	*Relay
	*observer
	t      testing.TB
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

func start(t testing.TB, cfg Config) *running {
	t.Helper()
	r := prepared(t, cfg)
	r.begin()
	return r
}

// prepared returns a relay that does not run yet, for tests that change it first.
func prepared(t testing.TB, cfg Config) *running {
	t.Helper()
	r := &running{observer: newObserver(), t: t, done: make(chan struct{})}
	cfg.Hooks = r.hooks(cfg.Hooks)
	relay, err := New(cfg)
	must(t, err)
	relay.restTimes = 1 // not longer than patience, however slow the machine makes one look
	r.Relay = relay
	return r
}

func (r *running) begin() {
	var ctx context.Context
	ctx, r.cancel = context.WithCancel(context.WithoutCancel(r.t.Context()))
	go func() {
		defer close(r.done)
		r.err = r.Run(ctx)
	}()
	r.t.Cleanup(func() {
		r.Abort()
		r.stop()
	})
}

// stop tells the relay to stop and waits until it has.
func (r *running) stop() {
	r.t.Helper()
	r.cancel()
	within(r.t, "the end of Run", r.done)
	if r.err != nil {
		r.t.Errorf("Run: %v", r.err)
	}
}

// instance waits until the relay is registered and returns its number.
func (r *running) instance() int32 {
	r.t.Helper()
	var instance int32
	eventually(r.t, "the relay's registration", func() (alive bool) {
		// The session appears before Run, but not its connection.
		instance, alive = r.session.current()
		return alive
	})
	return instance
}

// first decides on the first attempt.
func first(v policy.Result, moved policy.Responses) policy.Decision {
	return policy.Decide(v, policy.Circumstances{Attempt: 1, Retry: policy.RetryPolicy{}.WithDefaults(), Responses: moved})
}
