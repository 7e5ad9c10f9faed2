package lane

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// While the pause is on its way into the database, nothing is claimed; what an earlier claim brings
// late is not sent.
func TestLaneStaysPausedUntilALaterClaim(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	if !l.Pause() || l.Pause() {
		t.Error("the first 410 is not the only first")
	}
	now := time.Now()
	l.claimed = now
	if free, _ := l.Room(now, lease); free != [Classes]int{} {
		t.Errorf("room for %d while the pause is not written", free)
	}
	l.Push(now, Live, nil)
	l.PauseWritten()
	l.Push(now, Live, nil) // of the claim that was under way
	testkit.Equal(t, "an earlier claim resumed the lane", l.StopReason(time.Now()), policy.ReasonPaused)
	if free, _ := l.Room(now, lease); free[Live] == 0 {
		t.Error("no room to find out that the destination was resumed")
	}
	l.claimed = time.Now().Add(time.Second)
	l.Push(now, Live, nil)
	testkit.Equal(t, "a later claim did not resume the lane", l.StopReason(time.Now()), "")
}

// How long a run may be follows from what its deliveries take and what a lease leaves.
func TestRunBounds(t *testing.T) {
	t.Parallel()
	l := laneOf(4) // a timeout of 10 s
	lease := post.DefaultTimeout + SendMargin + 40*time.Second
	if longest, followers := l.RunBounds(lease); longest != MaxRun || followers != MaxBehind {
		t.Errorf("before anything was sent: %d, %d", longest, followers)
	}
	for _, c := range []struct {
		perPost time.Duration
		want    int
	}{{time.Millisecond, MaxRun}, {time.Second, MaxRun}, {2 * time.Second, 10}, {7 * time.Second, 2}, {time.Hour, 1}} {
		l.perPost = 0
		for range 3 {
			l.measurePost(c.perPost)
		}
		if longest, _ := l.RunBounds(lease); longest != c.want {
			t.Errorf("%d at %s each, want %d", longest, c.perPost, c.want)
		}
	}
	l.Push(time.Now(), Backlog, [][]Delivery{make([]Delivery, 16), make([]Delivery, 1), make([]Delivery, 2)})
	if _, followers := l.RunBounds(lease); followers != MaxBehind-16 {
		t.Errorf("%d may follow beside 16 that do", followers)
	}
	if free, _ := l.Room(time.Now(), lease); free[Backlog] != free[Live]-3 {
		t.Errorf("three runs leave room for %d of %d", free[Backlog], free[Live])
	}
	l.TakeUnsent()
	if _, followers := l.RunBounds(lease); followers != MaxBehind {
		t.Errorf("%d may follow beside none", followers)
	}
}

// What is queued when the rate drops waits for turns that come after its lease; giving it back must
// cost none of them.
func TestOutlivedLeaseTakesNoTurn(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	d := post.Destination{Name: "d", Timeout: post.DefaultTimeout, MaxInFlight: 1, RateLimit: 0.1}
	l := newLane(&post.Endpoint{Destination: d})
	queued := make([]Delivery, 4)
	for i := range queued {
		queued[i].LeaseEnds = now.Add(time.Minute)
	}
	queued[1].LeaseEnds, queued[2].LeaseEnds = now, now
	l.Push(now, Live, singly(queued))
	for i, waits := range []bool{false, false, false, true} {
		if run, wait := l.NextRun(now); waits == (run != nil) || waits != (wait > 0) {
			t.Errorf("delivery %d: has to wait for %s", i, wait)
		}
	}
}

// However often something restarts the scans, a cursor through what cannot be claimed comes to its
// end.
func TestCursorThatFindsNothingComesToItsEnd(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	position := Keyset{time.Unix(1_000_000, 0), 1}
	l.Cursors[Backlog] = Cursor{Position: position, More: true, FoundNothing: true}
	l.Cursors[Replays] = Cursor{Position: position, More: true}
	l.RestartScans()
	if l.Cursors[Backlog].Position != position || l.Cursors[Replays].Position == position {
		t.Errorf("cursors %+v", l.Cursors)
	}
	l.Cursors[Backlog].Advance(Backlog, ScanResult{}, 0, position.At, 0, agenda.Rest{Least: time.Hour})
	if w := l.Cursors[Backlog]; w.Position == position || !w.IsDue(time.Now()) {
		t.Errorf("what was asked for meanwhile is forgotten: %+v", w)
	}
	l.Cursors[Backlog].Advance(Backlog, ScanResult{}, 0, position.At, 0, agenda.Rest{Least: time.Hour})
	if w := l.Cursors[Backlog]; w.IsDue(time.Now()) {
		t.Errorf("the scan never ends: %+v", w)
	}
}

// A trial that has nothing more to send ends, but not before all that waits has been read: what a
// scan for new events does not find may be a backlog for which slow start is meant.
func TestTrialEndsWhenNothingWaits(t *testing.T) {
	t.Parallel()
	now := time.Now()
	l := laneOf(64)
	l.breaker.Try(now, time.Minute)
	l.breaker.Accepted = true
	l.Cursors[Backlog].Due, l.Cursors[Replays].Due = now.Add(time.Minute), now
	if l.EndTrial(now) {
		t.Error("ended before the replays were looked for")
	}
	l.Cursors[Replays].Rest(now.Add(time.Minute))
	l.Cursors[Backlog].More = true
	if l.EndTrial(now) {
		t.Error("ended in the middle of the backlog")
	}
	l.Cursors[Backlog].Rest(now.Add(time.Minute))
	if !l.EndTrial(now) || l.breaker.Write != policy.WriteClosed {
		t.Error("never ends")
	}
}

// A lane of one sender whose receiver is slow still has a live delivery at hand when it has sent
// one.
func TestNarrowLaneHasOneAhead(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	for name, c := range map[string]struct {
		limit float64
		takes time.Duration
		want  int
	}{
		"a second each":                {takes: time.Second, want: 1},
		"longer than a lease can wait": {takes: 40 * time.Second},
		"ten a second":                 {limit: 10, takes: time.Second, want: 1},
		"one in a minute":              {limit: 1. / 60, takes: time.Second},
	} {
		l := newLane(&post.Endpoint{Destination: post.Destination{Name: "d", Timeout: post.DefaultTimeout, MaxInFlight: 1, RateLimit: c.limit}})
		l.rate, l.perPost = capacity.Throughput{PerSecond: 1, Since: now}, c.takes
		l.Push(now, Live, singly(make([]Delivery, 1)))
		if free, _ := l.Room(now, lease); free[Live] != c.want {
			t.Errorf("%s: room for %d beside what is being sent", name, free[Live])
		}
	}
}

// A rescan moves no cursor, and is done when it has come to its end.
func TestRescanLeavesTheCursorsAlone(t *testing.T) {
	t.Parallel()
	at := func(second int64) Keyset { return Keyset{At: time.Unix(1_000_000+second, 0)} }
	l := laneOf(1)
	before := Cursor{Position: at(7), More: true, restarts: true}
	l.Cursors[Backlog] = before
	l.RescanSince(at(5).At)
	l.RescanSince(at(6).At)
	if l.Cursors[Backlog] != before || l.RescanFrom != at(5) || l.hasScannedAll(time.Now()) {
		t.Errorf("cursor %+v, rescan from %v", l.Cursors[Backlog], l.RescanFrom)
	}
	l.AdvanceRescan(ScanResult{Last: at(6), More: true})
	testkit.Equal(t, "continues at", l.RescanFrom, at(6))
	l.AdvanceRescan(ScanResult{Last: at(8)})
	testkit.Equal(t, "then at", l.RescanFrom, (Keyset{}))
}

// The head of a run is locked by another session while what follows it is written: the key
// continues when the head is written, too.
func TestKeyIsFreedByTheLastToBeWritten(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	key := "k"
	l.CountClaimed(key, 3, ordering.Place{Event: 1})
	for i, frees := range []bool{false, true, false} { // the second is the last of the run
		if l.HasReady() {
			t.Fatalf("free with %d in flight", 3-i)
		}
		l.keySettled(key, Live, frees, false)
	}
	if !l.HasReady() {
		t.Error("it is not free")
	}
}

// A refusal among answers asks for one event's sake, and keeps no other.
func TestRetryAfterOfOneEventClosesNoLane(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	unavailable := policy.Result{Reason: policy.ReasonUnavailable, StatusCode: 503, Posted: true, RetryAfter: time.Minute}
	limited := policy.Result{Reason: policy.ReasonRateLimited, StatusCode: 429, Posted: true, RetryAfter: time.Minute}
	for name, c := range map[string]struct {
		policy.Result
		refusals int // one every half second
		closes   bool
	}{
		"503 among answers":   {unavailable, 1, false},
		"429 among answers":   {limited, 1, false},
		"503 for two seconds": {unavailable, 4, true},
		"429 for two seconds": {limited, 4, true},
	} {
		l := laneOf(8)
		l.Destination.Retry.RetryAfterMax = time.Hour
		v := policy.Result{Reason: policy.ReasonOK, StatusCode: 204, Posted: true}
		l.RecordResult(now, 1, &v, time.Millisecond, time.Millisecond)
		for i := range c.refusals {
			v := c.Result
			l.RecordResult(now.Add(time.Duration(i+1)*time.Second/2), int64(i+2), &v, time.Millisecond, time.Millisecond)
		}
		if closed := !l.EarliestClaim(now.Add(10*time.Second), time.Hour).IsZero(); closed != c.closes {
			t.Errorf("%s closes the lane: %t", name, closed)
		}
	}
}

// What a lane holds stays when its receiver asks for a moment. For longer, it is given back, and
// takes no turn.
func TestLongWaitGivesBack(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]policy.Reason{sitsOut: "", sitsOut + 1: policy.ReasonRetryAfter} {
		now := time.Unix(1_000_000, 0)
		l := laneOf(8)
		l.Push(now, Live, singly([]Delivery{{LeaseEnds: now.Add(time.Minute)}}))
		if want != "" {
			l.NextRun(now) // which hangs
			l.Push(now, Live, singly([]Delivery{{LeaseEnds: now.Add(time.Minute)}}))
		}
		l.flow.Close(now, wait)
		testkit.Equal(t, "reason", l.StopReason(now), want)
		run, left := l.NextRun(now)
		testkit.Equal(t, "is given back", run != nil, want != "")
		testkit.Equal(t, "stays", left == wait, want == "")
		testkit.Equal(t, "room", l.RoomForRange(now, lease) > 0, want == "")
		testkit.Equal(t, "is for others", l.TellsOthers(now), want != "")
		testkit.Equal(t, "they are told again at once", l.TellsOthers(now.Add(tellOthers-1)), false)
		l.flow.Close(now.Add(tellOthers), wait)
		testkit.Equal(t, "they are told again", l.TellsOthers(now.Add(tellOthers)), want != "")
		l.EndWait(now)
		testkit.Equal(t, "after the wait has ended", l.StopReason(now), "")
	}
}

// A relay that was asked to wait takes no turn with a held destination: it could send nothing, and
// would take that for nothing to send.
func TestTrialWaitsAsAsked(t *testing.T) {
	t.Parallel()
	l := laneOf(1)
	now := time.Now()
	l.flow.Close(now, 30*time.Second)
	l.breaker.Enter(now, policy.BreakerOpen)
	if next, _, err := (&breaker.Keeper{}).Tend(t.Context(), l, now, 1); err != nil || !next.Equal(l.flow.Reopens) {
		t.Errorf("tries again in %s, %v", next.Sub(now), err)
	}
}

// What the receiver asks for is news once: when it asks, when it no longer does, and to a relay
// that was registered again.
func TestSlowdownNews(t *testing.T) {
	t.Parallel()
	l := laneOf(4)
	now := time.Now()
	step := func(what string, relayID int32, want bool) {
		t.Helper()
		now = now.Add(2 * time.Second)
		s, news, _ := l.SlowdownNews(now, relayID)
		if news != want {
			t.Errorf("%s: %+v is news: %v", what, s, news)
		}
		if news {
			l.SlowdownTold(s, relayID)
		}
	}
	step("nothing is asked", 1, false)
	l.flow.Close(now, time.Minute)
	step("it asks to wait", 1, true)
	step("it asks no more than before", 1, false)
	step("the relay has another number", 2, true)
	l.flow.Close(now, 2*time.Minute)
	step("it asks to wait longer", 2, true)
	l.flow = capacity.New(4, 0) // the destination has another URL
	step("another one asks for nothing", 2, true)
	l.flow.Close(now, time.Second)
	now = now.Add(time.Hour)
	step("the time is over, which its readers know", 2, false)
	l.flow.Close(now, time.Minute)
	step("it asks to wait again", 2, true)
	l.EndWait(now)
	now = now.Add(-2 * time.Second) // at once
	step("an operator has ended the wait", 2, true)
	step("which the database knows", 2, false)
	l.flow.Close(now, time.Minute)
	step("it asks to wait once more", 2, true)
	l.EndWait(now)
	l.flow.Close(now, 10*time.Second)
	now = now.Add(-2 * time.Second) // at once, and for less than was told before
	step("an operator has ended the wait, and it asks to wait", 2, true)
	l.flow.Close(now, time.Minute)
	if _, news, first := l.SlowdownNews(now.Add(2*time.Second), 2); !news || first {
		t.Error("a longer wait is not news, or the first")
	}
	step("it could not be written", 2, false)
	step("it is tried again", 2, true)
}
