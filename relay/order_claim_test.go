package relay

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// claims makes single claims.
type claims struct{ db pg.Pool }

func (c claims) claim(ctx context.Context, instance int32, lease time.Duration, requests []claimRequest) (claimResult, error) {
	return (&rows{db: c.db, lease: lease}).readClaim(ctx, instance, requests)
}

// registered returns a relay that claims nothing by itself.
func registered(db *relaytest.Database) (claims, int32) {
	db.Helper()
	return claims{db.Pool}, relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version, session_pid) VALUES ('test', '', 0) RETURNING instance`)
}

// claimAll claims for one lane what a scan over all of its live deliveries finds, and then the ordering keys that it found.
func claimAll(db *relaytest.Database, s claims, instance int32, free, run int) []delivery {
	db.Helper()
	request := claimRequest{destination: "default", run: run, promise: policy.DefaultNotAfter, scans: []scan{{free: free}}}
	first, err := s.claim(db.Context(), instance, time.Minute, []claimRequest{request})
	relaytest.Must(db, err)
	request.scans = nil
	for _, found := range first.scans[0].keys {
		request.keys = append(request.keys, readyKey{key: found.key, floor: math.MinInt64})
	}
	then, err := s.claim(db.Context(), instance, time.Minute, []claimRequest{request})
	relaytest.Must(db, err)
	return append(first.deliveries, then.deliveries...)
}

// claimRuns claims for one lane and returns the events of each run, by ordering key.
func claimRuns(db *relaytest.Database, free, run int) map[string][]int64 {
	db.Helper()
	s, instance := registered(db)
	all, broken := runs(claimAll(db, s, instance, free, run))
	if len(broken) > 0 {
		db.Errorf("broken: %v", broken)
	}
	of := map[string][]int64{}
	for _, run := range all {
		for _, d := range run {
			key := "none"
			if d.event.OrderingKey != nil {
				key = *d.event.OrderingKey
			}
			of[key] = append(of[key], d.eventID)
		}
	}
	return of
}

// What a claim brings behind the heads of ordering keys is bounded for each key, and for all of them.
func TestClaimBoundsRuns(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ run, want int }{
		"by the run":                   {16, 16},
		"one at a time":                {1, 1},
		"more than there are in a key": {60, 50},
		"a run is never less than one": {0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			for key := range 10 {
				keyed(db, string(rune('a'+key)), 1, 50)
			}
			db.Insert(5, "free")
			of := claimRuns(db, 600, c.run)
			if len(of) != 11 || len(of["none"]) != 5 {
				t.Errorf("%d keys, and %d without one; want all", len(of)-1, len(of["none"]))
			}
			delete(of, "none")
			for key, run := range of {
				if len(run) != c.want || run[len(run)-1]-run[0] != int64(c.want-1) {
					t.Errorf("%s: %v, want the first %d", key, run, c.want)
				}
			}
		})
	}
}

// A head that may have killed relays comes alone, or its followers would be suspected with it and fail for it.
func TestSuspectedHeadComesAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	keyed(db, "suspect", 1, 10)
	keyed(db, "unlucky", 1, 10)
	db.Exec(`UPDATE outbox_delivery SET rescues = CASE ordering_key WHEN 'suspect' THEN 3 ELSE 2 END WHERE event_id IN (1, 11)`)
	of := claimRuns(db, 10, 16)
	if len(of["suspect"]) != 1 || len(of["unlucky"]) != 10 {
		t.Errorf("claimed %v", of)
	}
}

// When a head fails as a crash loop, what follows it has not become suspect with it.
func TestFollowersOfACrashLoopAreSpared(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	keyed(db, "k", 1, 10)
	for range capacity.AloneFrom {
		s, instance := registered(db)
		claimAll(db, s, instance, 10, 16)
		db.Exec(session.RescueRelay, instance)
	}
	db.Exec(`UPDATE outbox_delivery SET rescues = $1 WHERE event_id = 1`, capacity.CrashLoop)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Fail, 1)
	_, err := ops.New(db.Pool).Discard(t.Context(), ops.Selection{EventIDs: []int64{1}}, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 9)
	wantSent(t, rc, "k", numbers(2, 10))
}

// A key whose deliveries take long takes no room from others: what stands in its run waits for the one before it, and
// for no sender.
func TestRunsTakeNoRoomFromOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g := relaytest.NewGate(t)
	rc := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) {
		if strings.HasSuffix(r.Key, "slow-1") {
			g.Pass(r)
		}
	})
	for _, key := range []string{"a-slow", "b-slow", "c-slow"} {
		keyed(db, key, 1, 40)
	}
	d := to(rc.URL)
	d.MaxInFlight = 4
	r := start(t, config(db, d))
	for range 3 {
		<-g.Arrived
	}
	db.Insert(200, "free")
	keyed(db, "quick", 1, 40)
	r.settles(t, policy.Delivered, 240)
	wantSent(t, rc, "quick", numbers(1, 40))
	g.Open()
	r.settles(t, policy.Delivered, 360)
	for _, key := range []string{"a-slow", "b-slow", "c-slow"} {
		wantSent(t, rc, key, numbers(1, 40))
	}
	l := r.lane("default")
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, q := range l.queues {
		if q.behind != 0 {
			t.Errorf("%d of class %d are thought to be in runs", q.behind, c)
		}
	}
}

// How long a run may be follows from what its deliveries take and what a lease leaves.
func TestRunBounds(t *testing.T) {
	t.Parallel()
	l := laneOf(4) // a timeout of 10 s
	lease := post.DefaultTimeout + sendMargin + 40*time.Second
	if longest, followers := l.runBounds(lease); longest != maxRun || followers != maxBehind {
		t.Errorf("before anything was sent: %d, %d", longest, followers)
	}
	for _, c := range []struct {
		perPost time.Duration
		want    int
	}{{time.Millisecond, maxRun}, {time.Second, maxRun}, {2 * time.Second, 10}, {7 * time.Second, 2}, {time.Hour, 1}} {
		l.perPost = 0
		for range 3 {
			l.measurePost(c.perPost)
		}
		if longest, _ := l.runBounds(lease); longest != c.want {
			t.Errorf("%d at %s each, want %d", longest, c.perPost, c.want)
		}
	}
	l.push(time.Now(), backlog, [][]delivery{make([]delivery, 16), make([]delivery, 1), make([]delivery, 2)})
	if _, followers := l.runBounds(lease); followers != maxBehind-16 {
		t.Errorf("%d may follow beside 16 that do", followers)
	}
	if free, _ := l.room(time.Now(), lease); free[backlog] != free[live]-3 {
		t.Errorf("three runs leave room for %d of %d", free[backlog], free[live])
	}
	l.takeUnsent()
	if _, followers := l.runBounds(lease); followers != maxBehind {
		t.Errorf("%d may follow beside none", followers)
	}
}

// Of a run only what is being sent is kept in memory.
func TestSentPayloadsOfARunAreReleased(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number == 3 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	r := prepared(t, Config{Pool: settings(t, "postgres://localhost/none"), Destinations: []post.Destination{to(rc.URL)}})
	r.Relay.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	l := r.lane("default")
	ordering := "k"
	var run []delivery
	for i := range 4 {
		d := order()
		d.eventID, d.event.OrderingKey, d.leaseEnds = int64(i+1), &ordering, time.Now().Add(time.Hour)
		d.promiseEnds = d.leaseEnds
		run = append(run, d)
	}
	var outcomes []policy.Outcome
	r.senders.settle = func(s settle.Settlement) { outcomes = append(outcomes, s.Outcome) }
	r.senders.sendRun(l, run, false)
	if want := []policy.Outcome{policy.Delivered, policy.Delivered, policy.Retry, policy.Hold}; !slices.Equal(outcomes, want) {
		t.Errorf("%v, want %v", outcomes, want)
	}
	for i := range run[:3] {
		if run[i].event.Payload != nil {
			t.Errorf("the payload of event %d is still there", i+1)
		}
	}
}

// What was parked before a route was added goes before what the route sends on at once.
func TestParkedGoBeforeLaterOnesOfTheirKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`DELETE FROM outbox_route; UPDATE outbox_destination SET parked_after = NULL`)
	keyed(db, "k", 1, 3)     // parked
	keyed(db, "other", 1, 1) // parked too
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('unrouted', '{}', 'never', 'k')`)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'default')`)
	keyed(db, "k", 4, 20)
	keyed(db, "free", 1, 20)
	of := claimRuns(db, 10, 16)
	if len(of["k"]) != 0 || len(of["free"]) != 16 {
		t.Errorf("claimed %v while earlier ones are parked", of)
	}
	latest := relaytest.Row[int64](db, `SELECT max(id) FROM outbox`)
	passed, err := routes.ReleaseParked(t.Context(), db.Pool, 2, latest)
	relaytest.Must(t, err)
	if passed != (routes.ParkedRange{After: 0, Reached: 2, Released: 2}) {
		t.Errorf("the first step: %+v", passed)
	}
	if of = claimRuns(db, 10, 16); len(of["k"]) != 2 {
		t.Errorf("claimed %v while the third is parked", of)
	}
	for passed.Reached < latest {
		passed, err = routes.ReleaseParked(t.Context(), db.Pool, 2, latest)
		relaytest.Must(t, err)
	}
	// One that has no route is parked still, and holds up no other.
	if of = claimRuns(db, 10, 16); len(of["other"]) != 1 {
		t.Errorf("claimed %v after the release", of)
	}
	relaytest.Becomes(db, "4 unrouted", `SELECT count(*) FILTER (WHERE reordered > 0) * 4 || ' ' || (SELECT event_type FROM outbox_delivery JOIN outbox ON id = event_id WHERE destination = '') FROM outbox_destination`)
}
