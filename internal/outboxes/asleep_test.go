package outboxes

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// sleeping is how many relays are asleep.
	sleeping = `SELECT count(*) FROM outbox_relay WHERE asleep`
	awake    = `SELECT count(*) FROM outbox_relay WHERE NOT asleep`
	// connected is how many connections this test's process has to the database.
	connected = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'`
)

// A schema is an outbox in its own schema of a database.
type schema struct {
	*relaytest.Database
	name string
}

func schemas(t *testing.T, n int) (all []schema) {
	t.Helper()
	dsn := pgtest.New(t)
	for i := range n {
		name := fmt.Sprintf("tenant %d", i)
		pgtest.Exec(t, pgtest.Pool(t, dsn), fmt.Sprintf("CREATE SCHEMA %q", name))
		own := dsn + "&search_path=" + url.PathEscape(strconv.Quote(name))
		pgtest.Migrate(t, own, migrations.Outbox)
		all = append(all, schema{&relaytest.Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, own)}, name})
	}
	return all
}

func serve(t *testing.T, cfg relay.Config, all []schema, observe func(string) (Observer, error)) (g *Group, entries []Outbox, stop func()) {
	t.Helper()
	for _, s := range all {
		entries = append(entries, Outbox{Name: s.name, Pool: pool(t, s.DSN), Schema: s.name})
	}
	g, err := New(cfg, entries, observe)
	relaytest.Must(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = g.Run(ctx) })
	stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(stop)
	return g, entries, stop
}

// Outboxes in which nothing happens sleep: one connection is left of all of them. An event wakes
// its own, and a reload wakes all; one that has anything to do stays awake. A stop deregisters
// those that are asleep.
func TestOutboxesSleep(t *testing.T) {
	t.Parallel()
	all := schemas(t, 4)
	rc, other := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	var mu sync.Mutex
	states := map[string]func() relay.State{}
	observe := func(name string) (Observer, error) {
		return Observer{Follow: func(state func() relay.State, _ Count) { mu.Lock(); states[name] = state; mu.Unlock() }}, nil
	}
	state := func(s schema) relay.State {
		mu.Lock()
		defer mu.Unlock()
		return states[s.name]()
	}
	cfg := to(rc.URL)
	cfg.SleepAfter = time.Second
	all[3].Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '{}', 'tomorrow', now() + interval '1 day')`)
	g, entries, stop := serve(t, cfg, all, observe)
	for _, s := range all[:3] {
		relaytest.Becomes(s.Database, 1, sleeping)
		relaytest.Eventually(t, "what says that it sleeps", func() bool { return state(s).Asleep && state(s).Registered })
	}
	relaytest.Eventually(t, "the end of connections", func() bool { return relaytest.Row[int](all[0].Database, connected) <= 1+4 })

	relayID := relaytest.Row[int](all[1].Database, `SELECT id FROM outbox_relay`)
	all[1].Insert(1, "wakes")
	relaytest.Eventually(t, "the event", func() bool { return rc.Total() == 1 })
	relaytest.Becomes(all[1].Database, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	if now := relaytest.Row[int](all[1].Database, `SELECT id FROM outbox_relay`); now != relayID {
		t.Errorf("relay %d woke up as %d", relayID, now)
	}
	testkit.Equal(t, "others that are still asleep", relaytest.Row[int](all[0].Database, sleeping)+relaytest.Row[int](all[2].Database, sleeping), 2)
	testkit.Equal(t, "one sleeps although an event waits for tomorrow", relaytest.Row[int](all[3].Database, awake), 1)
	relaytest.Becomes(all[1].Database, 1, sleeping)

	changed := to(other.URL)
	changed.SleepAfter = time.Second
	if changes, err := g.Reload(changed, entries); err != nil || len(changes) != 1 {
		t.Errorf("changed: %v, %v", changes, err)
	}
	all[2].Insert(1, "elsewhere")
	relaytest.Eventually(t, "the event at the other place", func() bool { return other.Total() == 1 })
	for _, s := range all[:3] {
		relaytest.Becomes(s.Database, 1, sleeping)
	}
	stop()
	for _, s := range all {
		if n := relaytest.Row[int](s.Database, `SELECT count(*) FROM outbox_relay`); n != 0 {
			t.Errorf("after the stop, %d relays are registered in %s", n, s.name)
		}
	}
}

// What no notification tells of is found by a beat: an event that was committed while nobody
// listened, a row that an operator releases.
func TestBeatsFindWhatNobodyToldOf(t *testing.T) {
	t.Parallel()
	all := schemas(t, 2)
	rc := relaytest.NewReceiver(t, nil)
	cfg := to(rc.URL)
	cfg.SleepAfter = time.Second
	_, _, _ = serve(t, cfg, all, func(string) (Observer, error) { return Observer{}, nil })
	for _, s := range all {
		relaytest.Becomes(s.Database, 1, sleeping)
	}
	all[0].Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'`)
	all[0].Exec(`SELECT setval('outbox_armed', 0)`)
	all[0].Insert(1, "silent")
	relaytest.Eventually(t, "the event", func() bool { return rc.Total() == 1 })
	testkit.Equal(t, "the other was woken by the end of a connection", relaytest.Row[int](all[1].Database, sleeping), 1)
}

// A relay that wakes is as it was when it slept, until it has registered or has had a minute for
// that.
func TestWakingRelayIsReady(t *testing.T) {
	t.Parallel()
	var now, slept relay.State
	state := wakingAs(func() relay.State { return now }, func() relay.State { return slept })
	slept = relay.State{Asleep: true, Beat: time.Now()}
	if !state().Asleep {
		t.Error("one that is starting is not as it was")
	}
	slept.Beat = time.Now().Add(-time.Hour)
	if state().Asleep {
		t.Error("after an hour it is still as it was")
	}
	slept.Beat, now.Beat = time.Now(), time.Now()
	if state().Asleep {
		t.Error("once it beats it is still as it was")
	}
}
