package lane

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// A Lane is the deliveries of one destination on their way through this relay. The claimer owns its
// fields; what it shares with others is outgoing.
type Lane struct {
	Name string
	outgoing
	atWork     atomic.Bool // see lanes; of few, all are
	restsSince time.Time
	Stopped    bool // its cursors do not begin again before a search finds something

	Cursors     [Classes]Cursor
	RescanFrom  Keyset // from where to read once more; zero: nowhere
	ScanOverdue bool   // a scan was due when this lane could claim nothing
	// Reordered is how often deliveries of earlier events had become pending again, as the last
	// claim found it.
	Reordered          int64
	reported           State     // to the hook
	checkedAt          time.Time // when it was last compared with reported
	BreakerLockedUntil time.Time // when to write the breaker again, after another session had locked its row
	told               struct {  // of what the receiver asks for
		capacity.Slowdown
		at time.Time
		by int32 // the relay's number then
	}
}

func newLane(e *post.Endpoint) *Lane {
	d := e.Destination
	return &Lane{Name: d.Name, outgoing: outgoing{
		Endpoint: e, share: d.MaxInFlight, flow: capacity.New(d.MaxInFlight, d.RateLimit), breaker: policy.Breaker{Policy: d.Breaker},
	}}
}

// InFlight returns how many deliveries the lane holds.
func (l *Lane) InFlight() (n int) {
	for _, count := range l.Counts() {
		n += count
	}
	return n
}

// IsActive reports whether the lane holds something, or its last claim has left something.
func (l *Lane) IsActive() bool { return l.Cursors[Live].More || l.Cursors[Backlog].More || l.busy() }

// ReportState calls the hook if the lane's state has changed, at most once a second.
func (l *Lane) ReportState(now time.Time, hook func(State)) {
	if hook == nil || now.Sub(l.checkedAt) < time.Second {
		return
	}
	l.checkedAt = now
	if s := l.State(); s != l.reported {
		l.reported = s
		hook(s)
	}
}

// SlowdownNews returns what the receiver asks for, and whether that is news to who reads the
// database: what was told before, for the relay of this number, is no longer true; first says that
// nothing was. It is news at most once a second, and a rate that moves only every ten seconds.
func (l *Lane) SlowdownNews(now time.Time, relayID int32) (s capacity.Slowdown, news, first bool) {
	ended := l.endedWait()
	if ended && l.told.by != 0 { // so the database has that, instead of what was told
		l.told.by, l.told.at = 0, time.Time{}
	}
	s = l.Slowdown(now)
	before, since := l.told, now.Sub(l.told.at)
	first = before.by != relayID
	switch {
	case since < time.Second:
	case first:
		news = ended || s != capacity.Slowdown{}
	case (s.PerSecond == 0) != (before.PerSecond == 0), s.Until.Sub(before.Until) > time.Second, s.Until.IsZero() && now.Before(before.Until):
		news = true
	default:
		news = since >= 10*time.Second && math.Abs(s.PerSecond-before.PerSecond) > before.PerSecond/10
	}
	if news {
		l.told.at = now
	}
	return s, news, first
}

// SlowdownTold records that the database has what was returned as news.
func (l *Lane) SlowdownTold(s capacity.Slowdown, relayID int32) {
	l.told.Slowdown, l.told.by = s, relayID
	l.noteSlowdownTold()
}

// isAtRest reports whether a turn of the claimer would find nothing to do for the lane.
func (l *Lane) isAtRest(now time.Time) bool {
	return !l.ScanOverdue && l.hasScannedAll(now) && !slices.ContainsFunc(l.Cursors[:], func(w Cursor) bool { return w.FoundNothing }) && l.holdsNothing()
}

// RestartScans makes the next claim begin at the front of backlog and replays. A cursor that has
// found nothing to send so far continues to its end first, and then begins again: if each call
// began it again, it would never come to its end.
func (l *Lane) RestartScans() {
	l.Stopped = false
	for _, c := range []Class{Backlog, Replays} {
		if w := &l.Cursors[c]; w.FoundNothing && w.More {
			w.restarts = true
		} else {
			w.Rest(time.Time{})
		}
	}
}

// stopScans leaves backlog and replays alone until a search finds something.
func (l *Lane) stopScans(now time.Time) {
	l.Stopped = true
	l.Cursors[Backlog].Rest(now.Add(untilFound))
	l.Cursors[Replays].Rest(now.Add(untilFound))
}

// RescanSince makes the next claim read once more what became due since the given time of the
// database, beside the cursors.
func (l *Lane) RescanSince(since time.Time) {
	if l.RescanFrom == (Keyset{}) || since.Before(l.RescanFrom.At) {
		l.RescanFrom = Keyset{At: since}
	}
}

// AdvanceRescan moves past what a claim has read.
func (l *Lane) AdvanceRescan(result ScanResult) {
	l.RescanFrom = Keyset{}
	if result.More {
		l.RescanFrom = result.Last
	}
}

// hasScannedAll reports whether all that is due has been read.
func (l *Lane) hasScannedAll(now time.Time) bool {
	return !slices.ContainsFunc(l.Cursors[:], func(w Cursor) bool { return w.More }) && l.RescanFrom == (Keyset{}) &&
		!l.Cursors[Backlog].IsDue(now) && !l.Cursors[Replays].IsDue(now) && !l.HasReady()
}

// EndTrial closes a breaker in trial whose lane has nothing more to send and of which something was
// accepted.
func (l *Lane) EndTrial(now time.Time) (ended bool) {
	if l.busy() || !l.hasScannedAll(now) {
		return false
	}
	l.Change(func(b *policy.Breaker) {
		if ended = b.State == policy.BreakerHalfOpen && b.Accepted; ended {
			b.Close(now)
		}
	})
	return ended
}

// View returns what the breaker's keeper needs to know of the lane.
func (l *Lane) View(now time.Time) breaker.View {
	v := breaker.View{Destination: l.Name}
	v.Breaker, v.Hold, v.UntilTurn, v.Asked = l.breakerAt(now)
	if v.Breaker.State == policy.BreakerHalfOpen {
		v.Busy, v.Scanned = l.busy(), l.hasScannedAll(now)
	}
	return v
}

// Rescan makes claims read what was held.
func (l *Lane) Rescan(probe bool) {
	if !probe {
		l.RestartScans()
		return
	}
	for i := range l.Cursors { // each probe continues behind the one before it, then at the front: another delivery may pass
		w := &l.Cursors[i]
		w.Due, w.restarts = time.Time{}, w.Position != (Keyset{})
	}
}

// SettleKey counts a delivery with an ordering key that was settled.
func (l *Lane) SettleKey(s *settle.Settlement, frees, blocks bool) {
	switch key := s.OrderingKey; {
	case key == nil:
	case s.Spilled && !s.InHand.Scheduled.IsZero():
		l.endArrival(*key)
	case s.Spilled:
		l.endSpill(*key)
	default:
		l.keySettled(*key, Class(s.Class), frees, s.InHand != nil && blocks)
	}
}

// State is what one relay lets one destination have.
type State struct {
	Destination string
	// Concurrency is how many requests there may be at once: as many as are configured, less what
	// the receiver was found not to bear, or what slow start allows after an outage. 0 while the
	// breaker is open.
	Concurrency int
	// RateLimit is how many requests there may be in a second, configured or found. 0: any number.
	RateLimit float64
	// Breaker is closed, open or half_open. A relay calls open also what another relay tries. One
	// that is refused alone holds and tries the lane for itself: the others have it closed.
	Breaker string
}
