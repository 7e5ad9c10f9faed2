package outboxes

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

func pool(t *testing.T, dsn string) *pgxpool.Config {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	relaytest.Must(t, err)
	return cfg
}

func to(url string) relay.Config {
	return relay.Config{
		Destinations: []relay.Destination{{Name: "default", URL: url}}, PollInterval: time.Second, Name: "test", History: relay.NewHistory(), AllowSuperuser: true,
	}
}

// All outboxes are served, whatever ails one of them; that one is served when it is well. A reload
// reaches all.
func TestGroupServesAll(t *testing.T) {
	t.Parallel()
	a, b := relaytest.New(t), relaytest.New(t)
	empty := pgtest.New(t) // no schema: a relay cannot wait for that
	first, second := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	log := &relaytest.Buffer{}
	cfg := to(first.URL)
	cfg.Log = zerolog.New(log)
	var mu sync.Mutex
	followed, failed := map[string]int{}, 0
	ended := map[string]int{}
	observe := func(name string) (Observer, error) {
		return Observer{
			Hooks:  relay.Hooks{DatabaseError: func(string, error) { mu.Lock(); failed++; mu.Unlock() }},
			Follow: func(func() relay.State, Count) { mu.Lock(); followed[name]++; mu.Unlock() },
			Ended:  func() { mu.Lock(); ended[name]++; mu.Unlock() },
		}, nil
	}
	outbox := func(name, dsn string) Outbox { return Outbox{Name: name, Pool: pool(t, dsn)} }
	all := []Outbox{outbox("a", a.DSN), outbox("b", b.DSN), outbox("empty", empty)}
	g, err := New(cfg, all, observe)
	relaytest.Must(t, err)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = g.Run(ctx) })
	t.Cleanup(func() {
		g.Abort()
		stop()
		running.Wait()
	})
	a.Insert(1, "of-a")
	b.Insert(1, "of-b")
	relaytest.Eventually(t, "the events of both", func() bool { return first.Total() == 2 })
	relaytest.Eventually(t, "a word about the third", func() bool {
		return strings.Contains(log.String(), `"database":"empty"`) && strings.Contains(log.String(), "this outbox is not served; the others are")
	})
	pgtest.Migrate(t, empty, migrations.Outbox)
	third := &relaytest.Database{TB: t, DSN: empty, Pool: pgtest.Pool(t, empty)}
	third.Insert(1, "of-the-third")
	relaytest.Eventually(t, "the event of the third", func() bool { return first.Total() == 3 })
	mu.Lock()
	if followed["a"] != 1 || followed["empty"] < 2 || failed == 0 {
		t.Errorf("relays made: %v, failures: %d", followed, failed)
	}
	mu.Unlock()

	changed := to(second.URL)
	changed.Log = cfg.Log
	changes, err := g.Reload(changed, all)
	if err != nil || len(changes) != 1 || !strings.Contains(changes[0], "default") {
		t.Errorf("changed: %v, %v", changes, err)
	}
	a.Insert(1, "later-of-a")
	b.Insert(1, "later-of-b")
	relaytest.Eventually(t, "the events of both, at the other place", func() bool { return second.Total() == 2 })
	mistaken := to("ftp://nowhere.test/")
	if _, err := g.Reload(mistaken, all); err == nil || !strings.Contains(err.Error(), "database a: ") || !strings.Contains(err.Error(), "database b: ") {
		t.Errorf("a mistake: %v", err)
	}
	g.RefuseReload(errors.New("line 3 is no YAML"))
	relaytest.Becomes(a, "line 3 is no YAML", `SELECT max(coalesce(reload_error, '')) FROM outbox_relay`)

	// One is left, one comes, and one is reached by another URL.
	c := relaytest.New(t)
	again := pool(t, b.DSN+"&application_name=again")
	changes, err = g.Reload(changed, []Outbox{{Name: "b", Pool: again}, outbox("c", c.DSN), outbox("empty", empty)})
	if want := []string{"database a is left", "database b is left", "database b is served", "database c is served"}; err != nil || !slices.Equal(changes, want) {
		t.Errorf("changed: %v, %v", changes, err)
	}
	const relays = `SELECT count(*) FROM outbox_relay`
	relaytest.Becomes(a, 0, relays)
	relaytest.Becomes(b, 1, relays)
	b.Insert(1, "last-of-b")
	c.Insert(1, "of-c")
	relaytest.Eventually(t, "the events of the two", func() bool { return second.Total() == 4 })
	a.Insert(1, "last-of-a")
	relaytest.Eventually(t, "the end of two", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return ended["a"] == 1 && ended["b"] == 1 && ended["c"] == 0 && ended["empty"] == 0 && followed["b"] == 2
	})
	if n := relaytest.Row[int](a, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`); n != 2 {
		t.Errorf("of the outbox that was left, %d events are delivered", n)
	}
}

// A configuration with mistakes makes no group.
func TestGroupOfAMistake(t *testing.T) {
	t.Parallel()
	if _, err := New(to("ftp://nowhere.test/"), []Outbox{{Name: "a", Pool: pool(t, "postgres://nowhere.test/")}}, func(string) (Observer, error) { return Observer{}, nil }); err == nil {
		t.Error("no error")
	}
}
