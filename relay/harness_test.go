package relay

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

const days = 24 * time.Hour

// patience bounds every wait.
const patience = relaytest.Patience

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	relaytest.Eventually(t, what, done)
}

func must(t testing.TB, err error) {
	t.Helper()
	relaytest.Must(t, err)
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
	fresh := relaytest.New(t, destinations...)
	db := &database{TB: t, dsn: fresh.DSN, pool: fresh.Pool}
	db.putPoolerBefore()
	return db
}

// plain returns the database for the functions of relaytest.
func (db *database) plain() *relaytest.Database {
	return &relaytest.Database{TB: db.TB, DSN: db.dsn, Pool: db.pool}
}

func (db *database) route(destinations ...string) {
	db.Helper()
	db.plain().Route(destinations...)
}

// exec runs a statement, or several without arguments, and returns how many rows the last one touched.
func (db *database) exec(statement string, args ...any) int64 {
	db.Helper()
	return db.plain().Exec(statement, args...)
}

// insert adds n events of type "t" with the keys prefix-1 … prefix-n and a small payload.
func (db *database) insert(n int, prefix string) {
	db.Helper()
	db.plain().Insert(n, prefix)
}

// rows returns the only column of every row.
func rows[T any](db *database, query string, args ...any) []T {
	db.Helper()
	return relaytest.Rows[T](db.plain(), query, args...)
}

// row returns the only column of the only row.
func row[T any](db *database, query string, args ...any) T {
	db.Helper()
	return relaytest.Row[T](db.plain(), query, args...)
}

// becomes waits until a query's only value is want.
func becomes[T comparable](db *database, want T, query string, args ...any) {
	db.Helper()
	relaytest.Becomes(db.plain(), want, query, args...)
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

// to returns a destination that retries at once, so that only the test of the schedule has to care about it. A receiver may wait
// for half of a lease, or a slow test would see the request that it holds given up and sent again.
func to(url string) post.Destination {
	return post.Destination{
		Name: "default", URL: url, Timeout: DefaultLease / 2,
		Retry: policy.RetryPolicy{Schedule: []time.Duration{time.Millisecond}},
	}
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
		instance, alive = r.current()
		return alive
	})
	return instance
}

func (r *Relay) lane(name string) *lane { return r.lanes.get(name) }

func (r *Relay) laneList() []*lane { return r.lanes.list() }

// loneSenders returns senders without a database, for attempts that need none.
func loneSenders(t testing.TB) *senders {
	c := &core{taking: t.Context(), doing: t.Context()}
	c.effective.Store(&Config{})
	return &senders{core: c}
}

// first decides on the first attempt.
func first(v policy.Result, moved policy.Responses) policy.Decision {
	return policy.Decide(v, policy.Circumstances{Attempt: 1, Retry: policy.RetryPolicy{}.WithDefaults(), Responses: moved})
}
