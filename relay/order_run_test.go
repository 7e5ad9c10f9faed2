package relay

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// numbers returns the numbers from … to as sent does.
func numbers(from, to int) string {
	return strings.Trim(fmt.Sprint(sequence(from, to)), "[]")
}

func sequence(from, to int) (list []int) {
	for n := from; n <= to; n++ {
		list = append(list, n)
	}
	return list
}

func wantSent(t testing.TB, rc *relaytest.Receiver, ordering, want string) {
	t.Helper()
	if got := rc.Numbers(ordering); got != want {
		t.Errorf("of %s were sent %s; want %s", ordering, got, want)
	}
}

// refusing answers the given status to the first n requests of one event.
func refusing(key string, n, code int) func(http.ResponseWriter, relaytest.Request) {
	return func(w http.ResponseWriter, r relaytest.Request) {
		if r.Key == key && r.Number <= n {
			w.WriteHeader(code)
		}
	}
}

// In the middle of a run one is refused for now: what follows waits until it is taken.
func TestRetryInTheMiddleOfARun(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, refusing("k-5", 2, http.StatusInternalServerError))
	db.InsertKeyed("k", 1, 30)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 30)
	wantSent(t, rc, "k", numbers(1, 4)+" 5 5 "+numbers(5, 30))
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 + 2 * (event_id = 5)::int`); n != 30 {
		t.Errorf("%d of 30 have the attempts that were made: what was held back spent some", n)
	}
	if _, followers := r.lane("default").RunBounds(time.Minute); followers != lane.MaxBehind {
		t.Errorf("%d deliveries are thought to be in runs", lane.MaxBehind-followers)
	}
}

// With on_failure: skip a delivery that failed for good is passed over, in the middle of a run, at
// its end and as its head.
func TestSkippedFailuresLetTheirKeyGoOn(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		switch r.Key {
		case "k-1", "k-7", "k-16", "k-40":
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	db.InsertKeyed("k", 1, 40)
	d := to(rc.URL)
	d.OnFailure = policy.SkipFailed
	r := start(t, rarely(config(db, d)))
	r.settles(t, policy.Delivered, 36)
	r.settles(t, policy.Fail, 4)
	wantSent(t, rc, "k", numbers(1, 40))
	testkit.Equal(t, "held behind a failure that is to be skipped", sees(r.observer, func(o *observer) int { return o.outcomes[policy.Hold] }), 0)
}

// What failed in the middle of a run blocks the rest of its key, which spends no attempt, and
// nothing else, until an operator gives it up. Then the key continues at once: the next sweep is an
// hour away.
func TestFailedHeadBlocksItsKeyOnly(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, refusing("k-3", 1, http.StatusUnprocessableEntity))
	db.InsertKeyed("k", 1, 20)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour'`) // no look at what is new finds them
	db.InsertKeyed("other", 1, 5)
	db.Insert(5, "free")
	r := start(t, rarely(config(db, to(rc.URL))))
	r.settles(t, policy.Fail, 1)
	r.settles(t, policy.Delivered, 12)
	relaytest.Becomes(db, 17, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NULL AND attempts = 0`)
	r.looks()
	wantSent(t, rc, "k", "1 2 3")
	done, err := ops.New(db.Pool).Discard(t.Context(), ops.Selection{EventIDs: []int64{3}}, nil)
	relaytest.Must(t, err)
	testkit.Equal(t, "discarded", done.Done, 1)
	r.settles(t, policy.Delivered, 29)
	wantSent(t, rc, "k", numbers(1, 20))
}

// A replay of a failed head brings its followers along; one of an earlier delivered event goes
// before what is still pending. Either way the replayed head and the live followers are of two
// classes, and of one run.
func TestReplaysKeepTheOrderOfTheirKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, refusing("k-3", 1, http.StatusUnprocessableEntity))
	db.InsertKeyed("k", 1, 6)
	r := start(t, rarely(config(db, to(rc.URL))))
	r.settles(t, policy.Fail, 1)
	outbox := ops.New(db.Pool)
	_, err := outbox.Replay(t.Context(), ops.Selection{EventIDs: []int64{3}}, 0, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 6)
	wantSent(t, rc, "k", "1 2 3 "+numbers(3, 6))
	r.stop()

	_, err = outbox.Replay(t.Context(), ops.Selection{EventIDs: []int64{2}, Statuses: []string{"delivered"}}, 0, nil)
	relaytest.Must(t, err)
	db.InsertKeyed("k", 7, 30)
	again := start(t, rarely(config(db, to(rc.URL))))
	again.settles(t, policy.Delivered, 25)
	wantSent(t, rc, "k", "1 2 3 "+numbers(3, 6)+" 2 "+numbers(7, 30))
}

// A failed delivery keeps blocking what follows it also while one before it is sent again.
func TestReplayBeforeAFailedOneFreesNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, refusing("k-2", 1, http.StatusUnprocessableEntity))
	db.InsertKeyed("k", 1, 5)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Fail, 1)
	outbox := ops.New(db.Pool)
	_, err := outbox.Replay(t.Context(), ops.Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 2)
	r.looks()
	wantSent(t, rc, "k", "1 2 1")
	_, err = outbox.Replay(t.Context(), ops.Selection{EventIDs: []int64{2}}, 0, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 6)
	wantSent(t, rc, "k", "1 2 1 "+numbers(2, 5))
}

// A key whose head waits in the backlog while its followers are live is sent in order.
func TestBacklogGoesBeforeLiveWithinAKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	for _, key := range []string{"a", "b", "c"} {
		db.InsertKeyed(key, 1, 40)
	}
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour' * (event_id % 3) WHERE event_id % 40 BETWEEN 1 AND 20`)
	d := to(rc.URL)
	d.MaxInFlight = 2
	r := start(t, config(db, d))
	r.settles(t, policy.Delivered, 120)
	for _, key := range []string{"a", "b", "c"} {
		wantSent(t, rc, key, numbers(1, 40))
	}
}

// An event that becomes available later holds back what was committed after it.
func TestLaterAvailableEventHoldsItsKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.InsertKeyed("k", 1, 10)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE event_id = 4`)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 3)
	r.looks()
	wantSent(t, rc, "k", "1 2 3")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() WHERE event_id = 4`)
	r.settles(t, policy.Delivered, 10)
	wantSent(t, rc, "k", numbers(1, 10))
}

// Another session has locked a delivery in the middle of a run. It, and what follows it, waits for
// the lock; what comes before does not.
func TestLockedDeliveryBreaksItsRun(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.InsertKeyed("k", 1, 10)
	operator := db.Locker(`SELECT FROM outbox_delivery WHERE event_id = 4 FOR UPDATE`)
	a, b := start(t, config(db, to(rc.URL))), start(t, config(db, to(rc.URL)))
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	for _, r := range []*running{a, b} {
		r.looks()
	}
	wantSent(t, rc, "k", "1 2 3")
	_, err := operator.Exec(t.Context(), `ROLLBACK`)
	relaytest.Must(t, err)
	relaytest.Becomes(db, 10, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`)
	wantSent(t, rc, "k", numbers(1, 10))
}

// The lease of a run ends while it is sent. What is left of it is not sent under that lease, and
// continues in order.
func TestRunDoesNotOutliveItsLease(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t, "k-2")
	db.InsertKeyed("k", 1, 10)
	r := start(t, rarely(config(db, to(rc.URL))))
	<-g.Arrived
	relaytest.Becomes(db, 10, `SELECT count(*) FROM outbox_delivery WHERE claim > 0 AND event_id <= 10`)
	// The sender's view of the lease is of this process alone; shorten what every later attempt
	// wants to be left.
	before := r.config().Destinations
	r.patient(2 * DefaultLease)
	g.Open()
	r.await(t, "the end of the lease", func(o *observer) bool {
		return o.reasons[policy.ReasonLease] >= 1 && o.reasons[policy.ReasonOrder] >= 1
	})
	wantSent(t, rc, "k", "1 2")
	relaytest.Must(t, r.lanes.Set(time.Now(), before, nil))
	r.settles(t, policy.Delivered, 10)
	wantSent(t, rc, "k", numbers(1, 10))
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 AND rescues = 0`); n != 10 {
		t.Errorf("%d of 10 spent one attempt", n)
	}
}

// The destination goes down in the middle of runs, and comes back: the breaker holds what is left
// of them.
func TestBreakerOpensInTheMiddleOfARun(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	var down atomic.Bool
	var taken atomic.Int64
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		if down.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		} else if taken.Add(1) == 20 {
			down.Store(true)
		}
	})
	for _, key := range []string{"a", "b", "c"} {
		db.InsertKeyed(key, 1, 40)
	}
	d := to(rc.URL)
	d.Breaker = policy.BreakerPolicy{Failures: 2, ProbeAfter: 20 * time.Millisecond, ProbeMax: 50 * time.Millisecond}
	r, other := start(t, config(db, d)), start(t, config(db, d))
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_destination WHERE breaker = 'open'`)
	down.Store(false)
	relaytest.Becomes(db, 120, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	for _, key := range []string{"a", "b", "c"} {
		wantFirstInOrder(t, rc, key, 40)
	}
	if sees(r.observer, func(o *observer) int { return o.outcomes[policy.Fail] })+sees(other.observer, func(o *observer) int { return o.outcomes[policy.Fail] }) != 0 {
		t.Error("the outage failed deliveries")
	}
}

// wantFirstInOrder checks that no event of a key was sent before all earlier ones had been, and
// that all were.
func wantFirstInOrder(t testing.TB, rc *relaytest.Receiver, ordering string, n int) {
	t.Helper()
	seen := map[string]bool{}
	var first []string
	for number := range strings.FieldsSeq(rc.Numbers(ordering)) {
		if !seen[number] {
			seen[number] = true
			first = append(first, number)
		}
	}
	if got := strings.Join(first, " "); got != numbers(1, n) {
		t.Errorf("the events of %s came first in the order %s", ordering, got)
	}
}

// A pause lets what was claimed finish, in order; the rest waits for the end of the pause.
func TestPauseInTheMiddleOfARun(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t, "k-3")
	db.InsertKeyed("k", 1, 40)
	r := start(t, rarely(config(db, to(rc.URL))))
	<-g.Arrived
	outbox := ops.New(db.Pool)
	_, err := outbox.Pause(t.Context(), "default", "maintenance")
	relaytest.Must(t, err)
	g.Open()
	r.settles(t, policy.Delivered, lane.MaxRun)
	r.looks()
	wantSent(t, rc, "k", numbers(1, lane.MaxRun))
	_, err = outbox.Resume(t.Context(), "default", false)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 40)
	wantSent(t, rc, "k", numbers(1, 40))
}

// A stop in the middle of a run ends with the POST in flight. What follows is given back, unspent,
// and is the next relay's.
func TestStopInTheMiddleOfARun(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t, "k-3")
	db.InsertKeyed("k", 1, 40)
	r := start(t, config(db, to(rc.URL)))
	<-g.Arrived
	r.cancel()
	g.Open()
	r.stop()
	wantSent(t, rc, "k", "1 2 3")
	if got := relaytest.Row[string](db, `SELECT concat_ws(' ', count(*) FILTER (WHERE status = 'delivered' AND event_id <= 3),
		count(*) FILTER (WHERE status = 'pending' AND attempts = 0 AND rescues = 0 AND claimed_by IS NULL)) FROM outbox_delivery`); got != "3 37" {
		t.Errorf("delivered, given back: %s", got)
	}
	start(t, config(db, to(rc.URL))).settles(t, policy.Delivered, 37)
	wantSent(t, rc, "k", numbers(1, 40))
}

// A relay stands still for longer than its lease, in the middle of a run, while another sends all
// of it. When it continues it still believes in its lease. It may send again what was sent, and
// changes nothing by that.
func TestFrozenRelayChangesNoOrder(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t, "k-5")
	frozen, said := startProcess(t, db.DSN, rc.URL)
	relaytest.Becomes(db, true, armed) // it holds no lock that others need to start
	db.InsertKeyed("k", 1, 40)
	said("claimed")
	<-g.Arrived
	relaytest.Becomes(db, 4, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	relaytest.Must(t, frozen.Process.Signal(syscall.SIGSTOP))
	r := prepared(t, config(db, to(rc.URL)))
	r.session.WatchFor = time.Hour // it must not take the frozen one for dead, however long all this takes
	r.begin()
	// The server may have been at a claim of the frozen one, which renews what it holds.
	relaytest.Eventually(t, "the run, by the other relay", func() bool {
		db.Exec(`UPDATE outbox_delivery SET lease_expires_at = now() WHERE claimed_by <> $1 AND lease_expires_at > now()`, r.relayID())
		return sees(r.observer, func(o *observer) bool { return o.outcomes[policy.Delivered] == 36 })
	})
	before := relaytest.Rows[string](db, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`)
	db.Insert(1, "after") // that the frozen one has settled shows in what it does next
	r.settles(t, policy.Delivered, 37)
	r.stop()
	g.Open()
	relaytest.Must(t, frozen.Process.Signal(syscall.SIGCONT))
	relaytest.Eventually(t, "the rest of the run, again", func() bool { return counted(rc.Keys())["k-16"] >= 2 })
	db.Insert(1, "then")
	relaytest.Becomes(db, 42, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`)
	wantFirstInOrder(t, rc, "k", 40)
	after := relaytest.Rows[string](db, `SELECT d::text FROM outbox_delivery d WHERE event_id <= 40 ORDER BY event_id`)
	if strings.Join(before, "\n") != strings.Join(after, "\n") {
		t.Errorf("the frozen relay turned\n%s into\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
}
