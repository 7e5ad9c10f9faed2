package relay

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/routes"
)

// A settle whose commit was not acknowledged is sent again. By then an operator may have replayed what it settled.
func TestLateSettleMissesTheReplay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(1, "k")
	db.plain().Settled("delivered", "true")
	b, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	must(t, err)
	if b.Done != 1 {
		t.Fatalf("%+v", b)
	}
	if n := db.exec(settleDelivered, []int64{1}, []string{"default"}, []int64{9}, []float64{0}, []int16{200}); n != 0 {
		t.Error("a settle of the claim before the replay settles the replay, which is then never sent")
	}
}

// The whole history of a destination is replayed while a relay sends it: every delivery goes out exactly once more, for
// what a relay has delivered again is not found again behind the walk.
func TestReplayOfManyWhileARelayRuns(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const events = 20_000
	db := newDatabase(t)
	db.insert(events, "k")
	db.plain().Settled("delivered", "true")
	db.exec(`VACUUM ANALYZE outbox, outbox_delivery`)
	sent := make([]atomic.Int32, events+1)
	rc := newCounter(t, sent)
	r := start(t, db.config(to(rc)))
	r.instance()

	b, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{Statuses: []string{"delivered"}, Type: "t"}, ops.DefaultReceiverMemory, nil)
	must(t, err)
	if b.Matched != events || b.Done != events || b.Missed != 0 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, events)
	becomes(db, events, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered' AND replay AND attempts = 1`)
	for id := 1; id <= events; id++ {
		if n := sent[id].Load(); n != 1 {
			t.Fatalf("event %d was sent %d times", id, n)
		}
	}
}

// newCounter returns the URL of a receiver that counts the requests for each event and remembers nothing else.
func newCounter(t testing.TB, sent []atomic.Int32) string {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var id int
		if _, err := fmt.Sscan(r.Header.Get("X-Outbox-Event-Id"), &id); err != nil || id < 1 || id >= len(sent) {
			t.Errorf("event id %q", r.Header.Get("X-Outbox-Event-Id"))
			return
		}
		sent[id].Add(1)
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.instance()
	outbox := ops.New(db.pool)

	for _, test := range []struct {
		reason string
		want   ops.Pause
	}{
		{"maintenance", ops.Pause{Destination: "default", Paused: true, Changed: true, Reason: "maintenance", Breaker: "closed"}},
		{"", ops.Pause{Destination: "default", Paused: true, Reason: "maintenance", Breaker: "closed"}},
		{"longer maintenance", ops.Pause{Destination: "default", Paused: true, Reason: "longer maintenance", Breaker: "closed"}},
	} {
		if got, err := outbox.Pause(t.Context(), "default", test.reason); err != nil || got != test.want {
			t.Errorf("got %+v, %v, want %+v", got, err, test.want)
		}
	}
	idle := sees(r.observer, func(o *observer) int { return o.idle })
	db.insert(3, "k")
	r.await(t, "a look at what waits", func(o *observer) bool { return o.idle > idle })
	if n := rc.total(); n != 0 {
		t.Errorf("%d were sent to a paused destination", n)
	}
	got, err := outbox.Resume(t.Context(), "default", false)
	if want := (ops.Pause{Destination: "default", Changed: true, Reason: "maintenance", Breaker: "closed"}); err != nil || got.Changed != want.Changed || got.Paused {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	r.settles(t, policy.Delivered, 3)
	if got, err := outbox.Resume(t.Context(), "default", true); err != nil || got.Changed || got.BreakerReset {
		t.Errorf("a second time: %+v, %v", got, err)
	}
	for _, change := range []func() (ops.Pause, error){
		func() (ops.Pause, error) { return outbox.Pause(t.Context(), "defualt", "") },
		func() (ops.Pause, error) { return outbox.Resume(t.Context(), "", true) },
	} {
		if _, err := change(); !errors.Is(err, ops.ErrUnknownDestination) {
			t.Error(err)
		}
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_destination`); n != 1 {
		t.Errorf("%d destinations have state", n)
	}
}

// The head of a blocked key is given up, and those behind it go at once, though they lie behind the relay's position.
func TestDiscardTheHeadOfAKey(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.key == "head" {
			w.WriteHeader(422)
		}
	})
	r := start(t, db.config(to(rc.URL)))
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		VALUES ('t', '{}', 'head', 'o'), ('t', '{}', 'second', 'o'), ('t', '{}', 'third', 'o'), ('t', '{}', 'free', 'p')`)
	r.settles(t, policy.Fail, 1)
	r.settles(t, policy.Delivered, 1)
	outbox := ops.New(db.pool)
	head, err := outbox.HeadOfKey(t.Context(), "default", "o")
	must(t, err)
	if head == nil || head.EventID != 1 || head.IdempotencyKey != "head" || head.Status != "failed" || head.Behind != 2 {
		t.Fatalf("the head is %+v", head)
	}
	waits, err := outbox.Waits(t.Context(), 3)
	must(t, err)
	if len(waits) != 1 || waits[0].Why != "behind" {
		t.Errorf("the third waits for %+v", waits)
	}
	b, err := outbox.Discard(t.Context(), ops.Selection{EventIDs: []int64{1}, Destination: "default"}, nil)
	must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, 3)
	if head, err := outbox.HeadOfKey(t.Context(), "default", "o"); head != nil || err != nil {
		t.Errorf("%+v, %v", head, err)
	}
}

// A delivered event that is replayed holds up the later ones of its key that are still pending.
func TestReplayKeepsTheOrder(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', '1', 'o'), ('t', '{}', '2', 'o'), ('t', '{}', '3', 'o')`)
	db.plain().Settled("delivered", "event_id = 1")
	b, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 3)
	if got := rc.keys(); !slices.Equal(got, []string{"1", "2", "3"}) {
		t.Errorf("sent in the order %q", got)
	}
}

// The configuration is compared with what the database does, so both must understand a pattern alike.
func TestRouteMatchesAsTheDatabaseDoes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	patterns := []string{"*", "a", "a*", "*a", "*a*", "a*a", "a*b*c", "**", "a**b", "*.b.*", "a_c", "a%c", `a\c`, "a*bc*c", "abc*abc", "A*"}
	types := []string{"a", "aa", "ab", "abc", "a.b.c", "axbyc", "abcabc", "a_c", "axc", "a%c", `a\c`, "abcc", "abcbc", "b", "ba", "A"}
	db.exec(`DELETE FROM outbox_route`)
	db.exec(`INSERT INTO outbox_route SELECT unnest($1::text[]), 'default'`, patterns)
	for _, eventType := range types {
		stored, err := ops.New(db.pool).Routes(t.Context(), eventType)
		must(t, err)
		for _, pattern := range patterns {
			database := slices.ContainsFunc(stored, func(r ops.RouteStatus) bool { return r.Event == pattern })
			if got := (Route{Event: pattern}).Matches(eventType); got != database {
				t.Errorf("%s matches %s: %v, in the database %v", pattern, eventType, got, database)
			}
		}
	}
	all, err := ops.New(db.pool).Routes(t.Context(), "")
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
	db.plain().Settled("failed", "destination = 'other'") // waits for an operator, not for a relay
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE destination = 'old'`)
	rc := newReceiver(t, nil)
	channel := &pager{name: "ops"}
	cfg := db.config(to(rc.URL))
	cfg.Alerts.Channels = []alert.Channel{channel}
	cfg.Watching.Interval = 100 * time.Millisecond
	logged := &safeBuffer{}
	cfg.Log = zerolog.New(logged)
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 3)
	eventually(t, "the warning in the log", func() bool {
		return strings.Contains(logged.String(), `"destinations":["old (3)"],"message":"deliveries wait for destinations that no running relay serves; `+
			`configure them, or give up what waits: outbox-relay discard --destination old"`)
	})
	channel.await(t, alert.RuleUnserved, "firing")
	if got := channel.of(alert.RuleUnserved)[0]; got.Subject != "old" || !strings.Contains(got.Text(), `Deliveries to "old" are unserved: 3 pending`) {
		t.Errorf("the alert is %q", got.Text())
	}
	served := func() string {
		status, err := ops.New(db.pool).Status(t.Context(), "")
		must(t, err)
		waits, err := ops.New(db.pool).Waits(t.Context(), 1)
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
	if got := (routes.Unserved{Destination: "old", Pending: 10_001}).String(); got != "old (more than 10000)" {
		t.Error(got)
	}
}

// A relay's start may not take longer the more waits.
func TestPlanOfUnserved(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	db.fill(100_000, 10)
	db.exec(`VACUUM ANALYZE`)
	result, err := engineConn(t, db).Query(t.Context(), `EXPLAIN (COSTS OFF) `+pg.Unserved, pgx.QueryExecModeExec)
	must(t, err)
	lines, err := pgx.CollectRows(result, pgx.RowTo[string])
	must(t, err)
	if plan := strings.Join(lines, "\n"); strings.Contains(plan, "Seq Scan on outbox_delivery") || !strings.Contains(plan, "using outbox_delivery_due") {
		t.Error(plan)
	}
}

// What waits for its next attempt is sent at once when an operator says so, an ordering key in its order, and keeps its attempts.
func TestRetryNow(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	var mended atomic.Bool
	rc := newReceiver(t, func(w http.ResponseWriter, _ request) {
		if !mended.Load() {
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	cfg := db.config(to(rc.URL))
	cfg.Destinations[0].Retry.Schedule = []time.Duration{time.Hour}
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'k' || i, 'a' FROM generate_series(1, 3) i`)
	db.insert(2, "free")
	r := start(t, cfg)
	r.settles(t, policy.Retry, 3) // the head of the key, and those without one
	mended.Store(true)
	sent := rc.total()
	b, err := ops.New(db.pool).Retry(t.Context(), ops.Selection{Destination: "default"}, nil)
	must(t, err)
	if b.Matched != 3 || b.Done != 3 || len(b.Obstacles) != 0 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, 5)
	if again := slices.DeleteFunc(rc.keys()[sent:], func(key string) bool { return !strings.HasPrefix(key, "k") }); !slices.Equal(again, []string{"k1", "k2", "k3"}) {
		t.Errorf("sent in the order %q", again)
	}
	becomes(db, "1:2 2:1 3:1 4:2 5:2", `SELECT string_agg(event_id || ':' || attempts, ' ' ORDER BY event_id) FROM outbox_delivery WHERE NOT replay`)
}

// A delivery that fails again after a replay is one that failed, as before: the open alert counts it once.
func TestReplaysDoNotRaiseTheAlert(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, status(http.StatusUnprocessableEntity))
	r := start(t, db.config(to(rc.URL)))
	db.insert(3, "k")
	r.settles(t, policy.Fail, 3)
	const count = `SELECT count - counted_before FROM outbox_alert WHERE rule = 'failed' AND resolved_at IS NULL`
	becomes(db, 3, count)
	for range 2 {
		_, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{Destination: "default"}, 0, nil)
		must(t, err)
		becomes(db, 3, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'failed' AND replay AND attempts = 1`)
	}
	db.insert(1, "new")
	becomes(db, 4, count)
}

// A relay is there before it has looked for unserved deliveries, which takes long where a session blocks vacuum.
func TestUnservedDeliveriesDelayNoStart(t *testing.T) {
	t.Parallel()
	looked := make(chan struct{})
	r := sessionThrough(t, newDatabase(t).config(to("http://receiver.test/")), func(pool pg.Pool) pg.Pool {
		return slowLook{pool, looked, t.Context().Done()}
	})
	following := make(chan error, 1)
	go func() { following <- r.followRoutes(t.Context()) }()
	looked <- struct{}{}
	must(t, <-following)
}

// slowLook makes the look for unserved deliveries wait until it is done, or the test ends.
type slowLook struct {
	pg.Pool
	done, end <-chan struct{}
}

func (p slowLook) Query(ctx context.Context, statement string, args ...any) (pgx.Rows, error) {
	if strings.Contains(statement, "RECURSIVE pending") {
		select {
		case <-p.done:
		case <-p.end:
		}
	}
	return p.Pool.Query(ctx, statement, args...)
}
