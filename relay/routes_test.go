package relay

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
	"github.com/outbox-relay/outbox-relay/relay/routes"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// storedRoutes returns the routes that producers' events take, sorted, such as "* default, t other".
func (db *database) storedRoutes() string {
	db.Helper()
	return row[string](db, "SELECT coalesce(string_agg(pattern || ' ' || destination, ', ' ORDER BY pattern, destination), '') FROM outbox_route")
}

// routesOfConfig returns a configuration's routes as storedRoutes does.
func routesOfConfig(cfg Config) string {
	var texts []string
	for route := range routes.Rows(cfg.withDefaults().Routes) {
		texts = append(texts, route.Pattern+" "+route.Destination)
	}
	slices.Sort(texts)
	return strings.Join(texts, ", ")
}

// TestReconnectKeepsLaterRoutes cuts the session of an old relay while one with a newer configuration runs beside it, as
// in a deploy: events for the new destination must not be lost to the old one's routes.
func TestReconnectKeepsLaterRoutes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec("DELETE FROM outbox_route")
	rc := newReceiver(t, nil)
	logistics, analytics := named("logistics", to(rc.URL)), named("analytics", to(rc.URL))
	older := start(t, db.config(logistics))
	older.instance()
	start(t, db.config(logistics, analytics)).instance()
	const both = "* analytics, * logistics"
	if got := db.storedRoutes(); got != both {
		t.Errorf("the routes are %s", got)
	}

	instance := older.instance()
	before := row[int](db, "SELECT session_pid FROM outbox_relay WHERE instance = $1", instance)
	db.terminate(instance)
	becomes(db, 2, "SELECT count(*)::int FROM outbox_relay r WHERE session_pid <> $1 AND "+pg.HasSession, before)
	db.insert(1, "k")
	becomes(db, 2, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'")
	if got := db.storedRoutes(); got != both {
		t.Errorf("the old relay left these routes: %s", got)
	}
}

// A relay with another configuration comes and goes, as one started from the wrong folder does: the one that was
// there keeps its routes, notices, and alerts.
func TestRelayOfAnotherConfigurationTakesNothing(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for _, mode := range []PoolerMode{PoolerAuto, PoolerTransaction} { // which no notification reaches
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			testRelayOfAnotherConfiguration(t, mode)
		})
	}
}

func testRelayOfAnotherConfiguration(t *testing.T, mode PoolerMode) {
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	ops := &pager{name: "ops"}
	logged := &safeBuffer{}
	cfg := db.config(named("logistics", to(rc.URL)))
	cfg.Log = zerolog.New(logged)
	cfg.Alerts.Channels = []alert.Channel{ops}
	cfg.Watching.Interval = 100 * time.Millisecond
	cfg.Pooler.Mode = mode
	r := start(t, cfg)
	r.instance()
	if got := db.storedRoutes(); got != "* logistics" {
		t.Fatalf("the routes are %s", got)
	}

	other := db.config(to("http://receiver.invalid"))
	other.Name, other.Pooler.Mode = "stranger", mode
	stranger := start(t, other)
	instance := stranger.instance()
	if got := db.storedRoutes(); got != "* default, * logistics" {
		t.Errorf("beside the stranger the routes are %s", got)
	}
	ops.await(t, alert.RuleRoutesChanged, "firing")
	want := fmt.Sprintf(`not every running relay is configured with them: relay "stranger" (instance %d): added * to default. Give all relays the same`, instance)
	if got := ops.of(alert.RuleRoutesChanged)[0].Text(); !strings.Contains(got, want) {
		t.Errorf("the alert is %q", got)
	}
	stranger.stop()
	if got := db.storedRoutes(); got != "* logistics" {
		t.Errorf("the stranger left these routes: %s", got)
	}
	for _, text := range []string{"route added by another relay or by hand", "route removed by another relay or by hand"} {
		eventually(t, text, func() bool {
			return strings.Contains(logged.String(), `"event":"*","destination":"default","message":"`+text+`"`)
		})
	}
	db.insert(1, "k")
	r.settles(t, policy.Delivered, 1)
	if n := row[int](db, "SELECT count(*)::int FROM outbox_delivery"); n != 1 {
		t.Errorf("%d deliveries of 1 event", n)
	}
	// Old enough to be over.
	db.exec("UPDATE outbox_alert SET last_at = last_at - interval '1 min' WHERE rule = 'routes_changed'")
	becomes(db, true, "SELECT resolved_at IS NOT NULL FROM outbox_alert WHERE rule = 'routes_changed'")
}

// Routes that are removed by hand return by themselves.
func TestRemovedRoutesAreRestored(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to(newReceiver(t, nil).URL))
	cfg.Watching.Interval = 100 * time.Millisecond
	start(t, cfg).instance()
	db.exec("DELETE FROM outbox_route")
	becomes(db, "* default", "SELECT coalesce(string_agg(pattern || ' ' || destination, ', '), '') FROM outbox_route")
	if got := row[string](db, "SELECT detail FROM outbox_alert WHERE rule = 'routes_changed'"); !strings.HasSuffix(got, ": added * to default") {
		t.Errorf("the alert is %q", got)
	}
}

// A recordedRelay is a relay as the others see it: its row, its session, what it recorded.
type recordedRelay struct {
	conn     *pgx.Conn
	instance int32
	routes   map[routes.Row]bool
	dead     bool
}

// A fleet plays relays that come, stop and crash, and checks the stored routes after each step.
type fleet struct {
	*database
	keeper *routes.Keeper
	relays []*recordedRelay
	last   string // the stored routes
	steps  []string
}

func (f *fleet) note(format string, args ...any) {
	f.Helper()
	f.steps = append(f.steps, fmt.Sprintf(format, args...))
	stored := f.storedRoutes()
	union, living := map[string]bool{}, false
	for _, r := range f.relays {
		for route := range r.routes {
			union[route.Pattern+" "+route.Destination] = true
			living = true
		}
	}
	want := f.last
	if living {
		var texts []string
		for text := range union {
			texts = append(texts, text)
		}
		slices.Sort(texts)
		want = strings.Join(texts, ", ")
	}
	if stored != want {
		f.Fatalf("after %s the routes are %q, want %q", strings.Join(f.steps, ", "), stored, want)
	}
	f.last = stored
}

func (f *fleet) start(cfg Config) {
	f.Helper()
	conn := engineConn(f, f.database)
	instance, err := session.Register(f.Context(), conn, true, "r", "", time.Minute)
	must(f, err)
	r := &recordedRelay{conn: conn, instance: instance, routes: routes.Rows(cfg.Routes)}
	_, err = f.keeper.Apply(f.Context(), instance, []string{cfg.Destinations[0].Name}, cfg.Routes)
	must(f, err)
	f.relays = append(f.relays, r)
	f.note("start of %d with %s", instance, routesOfConfig(cfg))
}

func (f *fleet) stop(r *recordedRelay) {
	f.Helper()
	must(f, f.keeper.Withdraw(f.Context(), r.instance))
	r.routes = nil
	f.note("withdrawal of %d", r.instance)
	must(f, session.Deregister(f.Context(), r.conn, r.instance))
	f.remove(r)
	f.note("stop of %d", r.instance)
}

// crash leaves everything in place, until another relay finds out.
func (f *fleet) crash(r *recordedRelay) {
	f.Helper()
	must(f, r.conn.Close(f.Context()))
	r.dead = true
	f.note("crash of %d", r.instance)
}

// rescueAll is what a living relay does about the dead.
func (f *fleet) rescueAll() {
	f.Helper()
	by := slices.IndexFunc(f.relays, func(r *recordedRelay) bool { return !r.dead })
	if by < 0 {
		return
	}
	rescuer := f.relays[by]
	for _, r := range slices.Clone(f.relays) {
		if !r.dead {
			continue
		}
		// The server may not have noticed the end of the connection yet.
		eventually(f, "the death of a relay", func() bool {
			dead, _, err := session.Rescue(f.Context(), rescuer.conn, r.instance)
			must(f, err)
			return dead
		})
		f.remove(r)
		must(f, f.keeper.Follow(f.Context(), rescuer.instance))
		f.note("rescue of %d by %d", r.instance, rescuer.instance)
	}
}

func (f *fleet) remove(r *recordedRelay) {
	f.relays = slices.DeleteFunc(f.relays, func(other *recordedRelay) bool { return other == r })
}

// Replicas are replaced one by one, the new one first or the old one first, and crash in between: a live relay always has
// its routes, events are routed while no relay lives, and in the end the routes are those of the new configuration.
func TestRollingDeploysConverge(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	config := func(routes ...string) Config {
		cfg := Config{Destinations: []post.Destination{{Name: "a"}, {Name: "b"}}}
		for _, route := range routes {
			pattern, destination, _ := strings.Cut(route, " ")
			cfg.Routes = append(cfg.Routes, Route{Event: pattern, To: []string{destination}})
		}
		return cfg
	}
	for name, configs := range map[string][2]Config{
		"added":   {config("* a"), config("* a", "* b")},
		"removed": {config("* a", "* b"), config("* a")},
		"moved":   {config("t a", "u a"), config("t a", "u b")},
		"same":    {config("* a"), config("* a")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t, "history")
			f := &fleet{database: db, keeper: &routes.Keeper{DB: db.pool, Added: func() {}}, last: "* history"}
			random := rand.New(rand.NewPCG(1, uint64(len(name))))
			for range testsize.Of(10, 3) {
				f.roll(random, configs[0], configs[1], 1+random.IntN(3))
				f.roll(random, configs[1], configs[0], 0) // back again
			}
		})
	}
}

// roll replaces all relays by ones of the next configuration; with replicas, it first starts so many of the present one.
func (f *fleet) roll(random *rand.Rand, present, next Config, replicas int) {
	f.Helper()
	f.steps = nil
	for range replicas {
		f.start(present)
	}
	for _, old := range slices.Clone(f.relays) {
		surge, crashes := random.IntN(2) == 0, random.IntN(3)
		if surge {
			f.start(next)
		}
		if crashes == 0 {
			f.crash(old)
		} else {
			f.stop(old)
		}
		if !surge {
			f.start(next)
		}
		if crashes == 1 { // a new one, which is started again
			f.crash(f.relays[len(f.relays)-1])
			f.start(next)
		}
		if random.IntN(2) == 0 {
			f.rescueAll()
		}
	}
	f.rescueAll()
	if got := f.storedRoutes(); got != routesOfConfig(next) {
		f.Fatalf("after %s the routes are %q", strings.Join(f.steps, ", "), got)
	}
	if replicas == 0 {
		for len(f.relays) > 0 {
			f.stop(f.relays[0])
		}
	}
}
