package relay

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The tests of this package need the engine: most of them a whole relay with its database and
// receivers, the others its claimer. Each states what only the parts together can show, such as
// that nothing is lost or sent out of order when something fails between two of them. What one room
// can show alone is tested in that room, and not again here.

const days = 24 * time.Hour

// within fails the test if c does not close.
func within(t testing.TB, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(relaytest.Patience):
		t.Fatalf("never came: %s", what)
	}
}

// settings parses the DSN for a relay.
func settings(t testing.TB, dsn string) *pgxpool.Config {
	t.Helper()
	pool, err := pgxpool.ParseConfig(dsn)
	relaytest.Must(t, err)
	return pool
}

// config returns a configuration over the database that polls as often as is allowed.
func config(db *relaytest.Database, destinations ...post.Destination) Config {
	db.Helper()
	return Config{
		Pool: settings(db, db.DSN), Destinations: destinations, PollInterval: time.Second, Name: "test", AllowSuperuser: true,
		Alerts: alert.Config{After: 1, AfterByRule: map[string]time.Duration{alert.RuleFailed: 0}}, // at once
	}
}

// rarely makes a relay poll once an hour, so that what it finds sooner it did not find by polling.
func rarely(cfg Config) Config {
	cfg.PollInterval = time.Hour
	return cfg
}

// to returns a destination that retries at once, so that only the test of the schedule has to care
// about it. A receiver may wait for half of a lease, or a slow test would see the request that it
// holds given up and sent again.
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
	relaytest.Must(t, err)
	relay.restFactor = 1 // not longer than patience, however slow the machine makes one scan
	r.Relay = relay
	return r
}

// shortLease is shorter than a configuration may have it, for tests that wait until one ends.
const shortLease = lane.SendMargin + time.Second

func startWithLease(t testing.TB, cfg Config, lease time.Duration) *running {
	t.Helper()
	r := prepared(t, cfg)
	r.cfg.Lease = lease
	r.begin()
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

// relayID waits until the relay is registered and returns its number.
func (r *running) relayID() int32 {
	r.t.Helper()
	var relayID int32
	relaytest.Eventually(r.t, "the relay's registration", func() (alive bool) {
		// The session appears before Run, but not its connection.
		relayID, alive = r.current()
		return alive
	})
	return relayID
}

// looks waits for one more look at everything.
func (r *running) looks() {
	r.t.Helper()
	idle := sees(r.observer, func(o *observer) int { return o.idle })
	r.mailbox.post(agenda.CauseSweep)
	r.await(r.t, "a look at everything", func(o *observer) bool { return o.idle > idle })
}

// patient makes the relay want more of a lease to be left than it is.
func (r *running) patient(timeout time.Duration) {
	r.t.Helper()
	slower := slices.Clone(r.config().Destinations)
	for i := range slower {
		slower[i].Timeout = timeout
	}
	relaytest.Must(r.t, r.lanes.Set(time.Now(), slower, nil))
}

func (r *Relay) lane(name string) *lane.Lane { return r.lanes.Get(name) }

func (r *Relay) laneList() []*lane.Lane { return r.lanes.List() }
