package routes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A relay is the part of one that keeps routes: a registration, and a keeper whose calls are
// counted.
type relay struct {
	keeper Keeper
	*relaytest.Database
	relayID int32
	added   int
	log     *bytes.Buffer
}

func registered(db *relaytest.Database, name string) *relay {
	db.Helper()
	r := &relay{Database: db, log: &bytes.Buffer{}}
	r.keeper = Keeper{DB: db.Pool, Name: name, Log: zerolog.New(r.log), Added: func() { r.added++ }, Failed: func(operation string, err error) {
		db.Errorf("%s: %v", operation, err)
	}}
	r.relayID = relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version) VALUES ($1, '') RETURNING id`, name)
	return r
}

// parse returns routes that are written as "pattern destination".
func parse(texts ...string) (all []Route) {
	for _, text := range texts {
		pattern, destination, _ := strings.Cut(text, " ")
		all = append(all, Route{Event: pattern, To: []string{destination}})
	}
	return all
}

// apply records a configuration with these routes, and their destinations.
func (r *relay) apply(routes ...string) Change {
	r.Helper()
	var destinations []string
	for row := range Rows(parse(routes...)) {
		destinations = append(destinations, row.Destination)
	}
	slices.Sort(destinations)
	change, err := r.keeper.Apply(r.Context(), r.relayID, destinations, parse(routes...))
	relaytest.Must(r, err)
	return change
}

func (r *relay) wantLog(text string) {
	r.Helper()
	if !strings.Contains(r.log.String(), text) {
		r.Errorf("the log does not say %s:\n%s", text, r.log)
	}
	r.log.Reset()
}

// stored returns the routes that producers' events take, such as "* default, t other".
func stored(db *relaytest.Database) string {
	db.Helper()
	return relaytest.Row[string](db, `SELECT coalesce(string_agg(pattern || ' ' || destination, ', ' ORDER BY pattern, destination), '') FROM outbox_route`)
}

func wantStored(db *relaytest.Database, want string) {
	db.Helper()
	if got := stored(db); got != want {
		db.Errorf("the routes are %q, want %q", got, want)
	}
}

// A relay with another configuration comes and goes, as one started from the wrong folder does: the
// one that was there keeps its routes, notices, and alerts. A session that is lost and comes back,
// which applies its routes once more, takes none away either.
func TestRelayOfAnotherConfigurationTakesNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "history")
	first, stranger := registered(db, "first"), registered(db, "stranger")
	first.apply("* logistics")
	wantStored(db, "* logistics")
	const alerts = `SELECT coalesce(string_agg(detail, ''), '') FROM outbox_alert WHERE rule = 'routes_changed'`
	testkit.Equal(t, "alerts although all relays have the same routes", relaytest.Row[string](db, alerts), "")

	listener, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	defer func() { _ = listener.Close(context.WithoutCancel(t.Context())) }()
	_, err = listener.Exec(t.Context(), `LISTEN outbox_wake`)
	relaytest.Must(t, err)
	stranger.apply("* default")
	heard, err := listener.WaitForNotification(t.Context())
	if relaytest.Must(t, err); heard.Payload != "routes public" {
		t.Errorf("the others are told %q", heard.Payload)
	}
	wantStored(db, "* default, * logistics")
	if got, want := relaytest.Row[string](db, alerts), fmt.Sprintf(`relay "stranger" (id %d): added * to default`, stranger.relayID); got != want {
		t.Errorf("the alert says %q, want %q", got, want)
	}
	relaytest.Must(t, first.keeper.Follow(t.Context(), first.relayID))
	first.wantLog(`"event":"*","destination":"default","message":"route added by another relay or by hand"`)

	first.apply("* logistics")
	wantStored(db, "* default, * logistics")
	relaytest.Must(t, stranger.keeper.Withdraw(t.Context(), stranger.relayID))
	stranger.wantLog(`"event":"*","destination":"default","message":"route removed"`)
	wantStored(db, "* logistics")
	relaytest.Must(t, first.keeper.Follow(t.Context(), first.relayID))
	first.wantLog(`"event":"*","destination":"default","message":"route removed by another relay or by hand"`)
	relaytest.Must(t, first.keeper.Withdraw(t.Context(), first.relayID))
	wantStored(db, "* logistics") // producers continue while all relays are away
}

// Routes that are removed by hand return by themselves, and what was parked meanwhile is looked
// for. More routes than are logged one by one are summed up.
func TestRemovedRoutesAreRestored(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	var many []string
	for i := range loggedRoutes + 7 {
		many = append(many, fmt.Sprintf("event.%03d default", i))
	}
	r := registered(db, "test")
	r.apply(many...)
	r.wantLog(`"more":7,"change":"route added"`)
	db.Exec(`DELETE FROM outbox_route`)
	asked := r.added
	relaytest.Must(t, r.keeper.Follow(t.Context(), r.relayID))
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_route`); n != len(many) || r.added != asked+1 {
		t.Errorf("%d routes of %d, parked deliveries are looked for %d times", n, len(many), r.added-asked)
	}
	got := relaytest.Row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'routes_changed'`)
	before, after := fmt.Sprintf(`relay "test" (id %d): added event.`, r.relayID), fmt.Sprintf(" to default and %d more", len(many)-1)
	if !strings.HasPrefix(got, before) || !strings.HasSuffix(got, after) {
		t.Errorf("the alert is %q, want %s…%s", got, before, after)
	}
}

// readsOnly refuses transactions, without which a keeper changes nothing.
type readsOnly struct{ pg.Pool }

func (readsOnly) Begin(context.Context) (pgx.Tx, error) { return nil, errors.New("a transaction") }

// While nothing changes, following the routes and applying the same ones again is a read, and no
// relay reads all routes again because of it. What changes by hand or with another relay is noticed
// all the same.
func TestUnchangedRoutesAreNotSynchronised(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r, other := registered(db, "test"), registered(db, "other")
	r.apply("* a", "t b")
	other.apply("* a", "t b")
	const changes = `SELECT routes FROM outbox_intake`
	before := relaytest.Row[int](db, changes)
	third := registered(db, "third") // now the relays are others, but the routes the same
	third.apply("* a")
	relaytest.Must(t, r.keeper.Follow(t.Context(), r.relayID))
	relaytest.Must(t, other.keeper.Follow(t.Context(), other.relayID))
	if after := relaytest.Row[int](db, changes); after != before {
		t.Errorf("%d changes of the routes, want none", after-before)
	}

	pool := r.keeper.DB
	quiet := func() error {
		r.keeper.DB = readsOnly{pool}
		defer func() { r.keeper.DB = pool }()
		if err := r.keeper.Follow(t.Context(), r.relayID); err != nil {
			return err
		}
		_, err := r.keeper.Apply(t.Context(), r.relayID, []string{"a", "b"}, parse("* a", "t b"))
		return err
	}

	relaytest.Must(t, quiet())
	for name, change := range map[string]string{
		"a route removed by hand": `DELETE FROM outbox_route WHERE destination = 'b'`,
		"a route added by hand":   `INSERT INTO outbox_route (pattern, destination) VALUES ('u', 'c')`,
		"a relay removed":         `DELETE FROM outbox_relay WHERE name = 'third'`,
	} {
		db.Exec(change)
		if err := quiet(); err == nil {
			t.Errorf("%s is not noticed", name)
		}
		relaytest.Must(t, r.keeper.Follow(t.Context(), r.relayID))
		wantStored(db, "* a, t b")
		relaytest.Must(t, quiet())
	}
}

// A relay that others have taken for dead changes nothing: it has to register again first.
func TestRelayTakenForDeadAppliesNoRoutes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := registered(db, "test")
	if _, err := r.keeper.Apply(t.Context(), r.relayID+1, []string{"a"}, parse("* a")); !errors.Is(err, pg.ErrTakenForDead) {
		t.Errorf("got %v", err)
	}
	wantStored(db, "* default")
}

// engine returns a pool with the settings of a relay's statements.
func engine(db *relaytest.Database) *pgxpool.Pool {
	db.Helper()
	return pgtest.PoolWith(db, db.DSN, func(cfg *pgxpool.Config) { pg.SetDirect(cfg, "") })
}

// Another session holds the routes for longer than a settle would wait: a relay that has to apply
// its own waits. One that stops does not wait for long.
func TestLockedRoutesAreWaitedFor(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r, stopping := registered(db, "test"), registered(db, "stopping")
	r.keeper.DB, stopping.keeper.DB = engine(db), engine(db)
	operator := db.Begin()
	_, err := operator.Exec(t.Context(), `LOCK TABLE outbox_route IN SHARE ROW EXCLUSIVE MODE`)
	relaytest.Must(t, err)
	applied := make(chan error, 1)
	go func() {
		_, err := r.keeper.Apply(t.Context(), r.relayID, []string{"a"}, parse("* a"))
		applied <- err
	}()
	if err := stopping.keeper.Withdraw(t.Context(), stopping.relayID); !pg.HasCode(err, pg.LockNotAvailable) {
		t.Errorf("a relay that stops: %v", err)
	}
	relaytest.Becomes(db, true, `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()
		AND application_name = 'outbox-relay' AND wait_event_type = 'Lock' AND query_start < clock_timestamp() - interval '1 second'`)
	relaytest.Must(t, operator.Commit(t.Context()))
	relaytest.Must(t, <-applied)
	wantStored(db, "* a")
}

// A relay that removes and adds routes locks a destination before the counters of changes, as a
// pause and a breaker do.
func TestRoutesTakeTheirLocksAsAPauseDoes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := registered(db, "test")
	r.apply("a.* a", "b.* b")
	pause := db.Begin()
	_, err := pause.Exec(t.Context(), `SELECT FROM outbox_destination WHERE destination = 'a' FOR UPDATE`)
	relaytest.Must(t, err)
	applied := make(chan error, 1)
	go func() {
		_, err := r.keeper.Apply(t.Context(), r.relayID, []string{"a"}, parse("a.* a", "a2.* a"))
		applied <- err
	}()
	relaytest.Becomes(db, true, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	_, err = pause.Exec(t.Context(), `UPDATE outbox_destination SET paused = true, paused_at = now() WHERE destination = 'a'`)
	relaytest.Must(t, errors.Join(err, pause.Commit(t.Context()), <-applied))
	wantStored(db, "a.* a, a2.* a")
}

// unservedFails makes the look for unserved deliveries fail, which takes long where a session
// blocks vacuum.
type unservedFails struct{ pg.Pool }

func (p unservedFails) Query(ctx context.Context, statement string, args ...any) (pgx.Rows, error) {
	if statement == pg.Unserved {
		return nil, errors.New("too early")
	}
	return p.Pool.Query(ctx, statement, args...)
}

// A destination that was renamed before it was empty: the log says what waits for it, once, and not
// before the relay is there. It says nothing of what waits for an operator.
func TestUnservedDeliveriesAreLogged(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default", "old", "other")
	db.Insert(3, "k")
	db.Settled("failed", "destination = 'other'")
	r := registered(db, "test")
	var failed []string
	r.keeper.Failed = func(operation string, _ error) { failed = append(failed, operation) }
	r.keeper.DB = unservedFails{db.Pool}
	r.apply("* default")
	if len(failed) != 0 {
		t.Fatal("it looks for unserved deliveries before it is there")
	}
	relaytest.Must(t, r.keeper.Follow(t.Context(), r.relayID))
	if len(failed) != 1 {
		t.Errorf("failures %q", failed)
	}
	r.keeper.DB = db.Pool
	r.apply("* default")
	relaytest.Must(t, r.keeper.Follow(t.Context(), r.relayID))
	r.wantLog(`"destinations":["old (3)"],"message":"deliveries wait for destinations that no running relay serves; ` +
		`configure them, or give up what waits: outbox-relay discard --destination old --status pending"`)
	relaytest.Must(t, r.keeper.Follow(t.Context(), r.relayID))
	if r.log.Len() > 0 {
		t.Errorf("logged again: %s", r.log)
	}
	testkit.Equal(t, "found", (Unserved{Destination: "old", Pending: 10_001}).String(), "old (more than 10000)")
}

// A relay's start may not take longer the more waits.
func TestPlanOfUnserved(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	db.Fill(100_000, 10)
	db.Exec(`VACUUM ANALYZE`)
	result, err := engine(db).Query(t.Context(), `EXPLAIN (COSTS OFF) `+pg.Unserved, pgx.QueryExecModeExec)
	relaytest.Must(t, err)
	lines, err := pgx.CollectRows(result, pgx.RowTo[string])
	relaytest.Must(t, err)
	if plan := strings.Join(lines, "\n"); strings.Contains(plan, "Seq Scan on outbox_delivery") || !strings.Contains(plan, "using outbox_delivery_due") {
		t.Error(plan)
	}
}

// A fleet plays relays that come, stop and crash, and checks the stored routes after each step.
type fleet struct {
	*relaytest.Database
	relays []*member
	last   string // the stored routes
	steps  []string
}

// A member is a relay of the fleet, with what it has recorded.
type member struct {
	*relay
	routes map[Row]bool
	dead   bool
}

func (f *fleet) note(format string, args ...any) {
	f.Helper()
	f.steps = append(f.steps, fmt.Sprintf(format, args...))
	union := map[Row]bool{}
	for _, r := range f.relays {
		maps.Copy(union, r.routes)
	}
	want := f.last
	if len(union) > 0 {
		want = texts(union)
	}
	if f.last = stored(f.Database); f.last != want {
		f.Fatalf("after %s the routes are %q, want %q", strings.Join(f.steps, ", "), f.last, want)
	}
}

// texts returns routes as stored does.
func texts(routes map[Row]bool) string {
	var all []string
	for row := range routes {
		all = append(all, row.Pattern+" "+row.Destination)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

func (f *fleet) start(routes []string) {
	f.Helper()
	r := &member{relay: registered(f.Database, "r"), routes: Rows(parse(routes...))}
	r.apply(routes...)
	f.relays = append(f.relays, r)
	f.note("start of %d with %s", r.relayID, routes)
}

// stop is the end of a relay in order, and remove what is left for others to do about a dead one.
func (f *fleet) stop(r *member) {
	f.Helper()
	relaytest.Must(f, r.keeper.Withdraw(f.Context(), r.relayID))
	r.routes = nil
	f.note("withdrawal of %d", r.relayID)
	f.remove(r)
	f.note("stop of %d", r.relayID)
}

func (f *fleet) remove(r *member) {
	f.Helper()
	f.Exec(`DELETE FROM outbox_relay WHERE id = $1`, r.relayID)
	f.relays = slices.DeleteFunc(f.relays, func(other *member) bool { return other == r })
}

// rescueAll is what a living relay does about the dead.
func (f *fleet) rescueAll() {
	f.Helper()
	by := slices.IndexFunc(f.relays, func(r *member) bool { return !r.dead })
	if by < 0 {
		return
	}
	rescuer := f.relays[by]
	for _, r := range slices.Clone(f.relays) {
		if r.dead {
			f.remove(r)
			relaytest.Must(f, rescuer.keeper.Follow(f.Context(), rescuer.relayID))
			f.note("rescue of %d by %d", r.relayID, rescuer.relayID)
		}
	}
}

// roll replaces all relays by ones of the next configuration.
func (f *fleet) roll(random *rand.Rand, next []string) {
	f.Helper()
	for _, old := range slices.Clone(f.relays) {
		surge, crashes := random.IntN(2) == 0, random.IntN(3)
		if surge {
			f.start(next)
		}
		if crashes == 0 {
			old.dead = true // until another relay finds out
			f.note("crash of %d", old.relayID)
		} else {
			f.stop(old)
		}
		if !surge {
			f.start(next)
		}
		if crashes == 1 { // a new one, which is started again
			f.relays[len(f.relays)-1].dead = true
			f.start(next)
		}
		if random.IntN(2) == 0 {
			f.rescueAll()
		}
	}
	f.rescueAll()
	if want := texts(Rows(parse(next...))); f.last != want {
		f.Fatalf("after %s the routes are %q, want %q", strings.Join(f.steps, ", "), f.last, want)
	}
}

// Replicas are replaced one by one, the new one first or the old one first, and crash in between: a
// live relay always has its routes, events are routed while no relay lives, and in the end the
// routes are those of the new configuration.
func TestRollingDeploysConverge(t *testing.T) {
	t.Parallel()
	for name, configs := range map[string][2][]string{
		"added":   {{"* a"}, {"* a", "* b"}},
		"removed": {{"* a", "* b"}, {"* a"}},
		"moved":   {{"t a", "u a"}, {"t a", "u b"}},
		"same":    {{"* a"}, {"* a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fleet{Database: relaytest.Covered(t, "history"), last: "* history"}
			random := rand.New(rand.NewPCG(1, uint64(len(name))))
			for range testsize.Of(10, 3) {
				f.steps = nil
				for range 1 + random.IntN(3) {
					f.start(configs[0])
				}
				f.roll(random, configs[1])
				f.roll(random, configs[0]) // back again
				for len(f.relays) > 0 {
					f.stop(f.relays[0])
				}
			}
		})
	}
}
