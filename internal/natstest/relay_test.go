package natstest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay"
)

// runRelay runs a relay until the test ends.
func runRelay(t testing.TB, db *relaytest.Database, hooks relay.Hooks, destinations ...relay.Destination) {
	t.Helper()
	t.Cleanup(startRelay(t, db, relay.Config{PollInterval: time.Second, Destinations: destinations, Hooks: hooks}))
}

// startRelay runs a relay until stop is called.
func startRelay(t testing.TB, db *relaytest.Database, cfg relay.Config) (stop func()) {
	t.Helper()
	var err error
	cfg.AllowSuperuser = true
	cfg.Pool, err = pgxpool.ParseConfig(db.DSN)
	pgtest.Must(t, err)
	r, err := relay.New(cfg)
	pgtest.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// insertOrdered adds n events of each of some keys, numbered within their key.
func insertOrdered(db *relaytest.Database, keys, n int) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 'paid', json_build_object('n', i), k || '-' || i, 'key-' || k FROM generate_series(1, $2) i, generate_series(1, $1) k ORDER BY i, k`, keys, n)
}

// stored returns the numbers of the events of each key, in the order of the stream, each where it
// stands first; and how many messages repeat another one.
func stored(t testing.TB, stream jetstream.Stream) (numbers map[string][]string, repeated int) {
	t.Helper()
	info, err := stream.Info(t.Context())
	pgtest.Must(t, err)
	numbers = map[string][]string{}
	for sequence := range info.State.LastSeq {
		m, err := stream.GetMsg(t.Context(), sequence+1)
		pgtest.Must(t, err)
		key, number := m.Header.Get("X-Outbox-Ordering-Key"), m.Header.Get("X-Idempotency-Key")
		if slices.Contains(numbers[key], number) {
			repeated++
			continue
		}
		numbers[key] = append(numbers[key], number)
	}
	return numbers, repeated
}

// A server that is killed and comes back, several times, loses no event and no order, and costs no
// attempt.
func TestRelayOutlivesTheServer(t *testing.T) {
	t.Parallel()
	const keys, perKey, kills = 20, 30, 3
	dir := t.TempDir()
	s := startServer(t, func(o *server.Options) { o.StoreDir = dir })
	_, js := admin(t, s)
	addStream(t, js, func(c *jetstream.StreamConfig) { c.Storage = jetstream.FileStorage })
	db := relaytest.Covered(t, "audit")
	attempts := make(chan relay.Attempt, 1000)
	insertOrdered(db, keys, perKey)
	d := settingsOf("nats://"+addressOf(s), func(d *relay.Destination) {
		d.Timeout = 2 * time.Second
		d.Retry.Schedule = []time.Duration{time.Second}
		d.Breaker.ProbeAfter, d.Breaker.ProbeMax = 50*time.Millisecond, 200*time.Millisecond
	})
	runRelay(t, db, relay.Hooks{Attempted: func(a relay.Attempt) {
		select {
		case attempts <- a:
		default:
		}
	}}, d)
	address := addressOf(s)
	for range kills {
		for range 40 {
			<-attempts
		}
		s.Shutdown()
		s.WaitForShutdown()
		relaytest.Eventually(t, "an attempt that fails", func() bool {
			select {
			case a := <-attempts:
				return a.Outcome != policy.Delivered
			default:
				return false
			}
		})
		s = restart(t, address, dir)
	}
	relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE status <> 'delivered'`)
	_, js = admin(t, s)
	stream, err := js.Stream(t.Context(), "EVENTS")
	pgtest.Must(t, err)
	numbers, repeated := stored(t, stream)
	for k := range keys {
		var want []string
		for i := range perKey {
			want = append(want, fmt.Sprintf("%d-%d", k+1, i+1))
		}
		if got := numbers[fmt.Sprintf("key-%d", k+1)]; !slices.Equal(got, want) {
			t.Errorf("key %d: %v", k+1, got)
		}
	}
	t.Logf("%d events, %d kills, 0 lost, %d stored twice", keys*perKey, kills, repeated)
}

// restart starts a server where another one was, with what that wrote.
func restart(t testing.TB, address, dir string) *server.Server {
	t.Helper()
	host, port := split(t, address)
	return startWith(t, &server.Options{Host: host, Port: port, JetStream: true, StoreDir: dir, NoLog: true, NoSigs: true})
}

// A stream that does not exist holds its events, and no others: nothing is lost, and what another
// destination gets does not wait.
func TestMissingStreamHoldsItsLane(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	_, js := admin(t, s)
	good := addStream(t, js)
	db := relaytest.Covered(t, "audit", "lost")
	other := settingsOf("nats://"+addressOf(s), func(d *relay.Destination) {
		d.Name, d.NATS.Stream, d.NATS.Subject = "lost", "LATER", "later.{type}"
		d.Retry.Schedule = []time.Duration{time.Second}
		d.Breaker.ProbeAfter, d.Breaker.ProbeMax = 50*time.Millisecond, 200*time.Millisecond
	})
	runRelay(t, db, relay.Hooks{}, settingsOf("nats://"+addressOf(s)), other)
	db.Insert(50, "k")
	relaytest.Becomes(db, 50, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'audit' AND status = 'delivered'`)
	relaytest.Becomes(db, true, `SELECT count(*) > 0 FROM outbox_destination WHERE destination = 'lost' AND breaker <> 'closed'`)
	if cause := relaytest.Row[string](db, `SELECT breaker_error FROM outbox_destination WHERE destination = 'lost'`); cause == "" {
		t.Error("nothing says why")
	}
	adviseStream(t, db, other, "Create the stream: nats stream add 'LATER' --subjects 'later.t' (or a pattern that covers all its subjects), or correct destinations.lost.nats.stream")
	later := addStream(t, js, func(c *jetstream.StreamConfig) { c.Name, c.Subjects = "LATER", []string{"later.>"} })
	relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE status <> 'delivered'`)
	for _, stream := range []jetstream.Stream{good, later} {
		if info, err := stream.Info(t.Context()); err != nil || info.State.Msgs != 50 {
			t.Errorf("%s holds %d, %v", info.Config.Name, info.State.Msgs, err)
		}
	}
}

// adviseStream checks that status and doctor say what to do about the stream of a destination.
func adviseStream(t *testing.T, db *relaytest.Database, d relay.Destination, want string) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), db.DSN)
	pgtest.Must(t, err)
	defer pool.Close()
	s, err := ops.New(pool).Status(t.Context(), "")
	pgtest.Must(t, err)
	if !slices.ContainsFunc(s.Advice, func(a ops.Advice) bool { return strings.Contains(a.Remedy, want) }) {
		t.Errorf("status does not advise %q: %+v", want, s.Advice)
	}
	want, _, _ = strings.Cut(want, "later.") // whose pattern doctor asks about
	found, err := ops.New(pool).Examine(t.Context(), ops.ExamineConfig{Destinations: []relay.Destination{d}})
	pgtest.Must(t, err)
	if !slices.ContainsFunc(found.Findings, func(f ops.Finding) bool { return f.Check == "destinations" && strings.HasPrefix(f.Remedy, want) }) {
		t.Errorf("doctor does not advise %q: %+v", want, found.Findings)
	}
}
