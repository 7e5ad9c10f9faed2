package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A walk is how far claims have come through one class of a lane. Claims look for live deliveries behind the newest ones seen,
// again and again. They walk through backlog and replays from the front to the end, and then leave them alone for a while.
// A position is only a shortcut: what lies behind it, such as a late commit, is found by the next walk from the front.
type walk struct {
	position keyset        // where the last claim ended
	more     bool          // the last claim did not come to the end: there may be more behind it
	due      time.Time     // when to go on, or to begin again; not of live
	took     time.Duration // the time spent on claims that found nothing
	barren   bool          // the last claim found nothing to send
	clear    bool          // the last claim took all that it looked at
	again    bool          // once it has ended it begins again, at once
	whole    time.Time     // of live: the database's, when claims had last looked at all that was committed and due
	pause    time.Duration // of a walk that waits for more replays: until the next look
	shared   time.Time     // until when other relays are believed to claim here, too; only while there is more
}

// replayLook is after which time a walk that has found replays looks for more: they come in small numbers.
const replayLook = 20 * time.Millisecond

// restTimes is how many times as long as it spent on finding nothing a walk rests, and the watcher as long as it looked.
const restTimes = 100

// isDue reports whether it is time to claim.
func (w *walk) isDue(now time.Time) bool { return !now.Before(w.due) }

// scan returns the next scan of a walk.
func (w *walk) scan(class class, now time.Time, free int, after, until keyset) scan {
	shared := w.more && now.Before(w.shared)
	return scan{class: class, free: free, after: after, until: until, clear: w.more && w.clear, shared: shared}
}

// advance moves past what a claim has looked at, at the database's time at. found is how many deliveries and ordering keys
// the scan brought, took how long the claim lasted, pause how long the walk rests at its end.
func (w *walk) advance(class class, result scanResult, found int, at time.Time, took time.Duration, pause policy.Rest) {
	if class == live {
		if !w.more {
			w.whole = at
		}
		w.position, w.more = keyset{at: at}, result.more // everything that was due has been looked at
		if result.more {
			w.position = result.last
		}
		return
	}
	w.barren = found == 0
	if w.barren || !result.more {
		w.took += took
	}
	switch {
	case result.more:
		w.position, w.more, w.due = result.last, true, time.Time{}
		if w.barren { // the other lanes get half of the time
			w.due = time.Now().Add(took)
		}
	case w.again:
		w.rest(time.Time{})
	case class == replays && (found > 0 || w.pause > 0 && w.pause < pause.Least):
		// An operator's replay goes on for a while. Looked for after a rest, what it adds would come at once, and before live events.
		w.pause = max(2*w.pause, replayLook)
		if found > 0 {
			w.pause = replayLook
		}
		w.position, w.more, w.took = keyset{at: at.Add(-policy.Overlap)}, true, 0
		w.due = time.Now().Add(max(w.pause, took))
	default:
		w.rest(time.Now().Add(pause.After(w.took)))
	}
}

// rest ends a walk until the next one is due.
func (w *walk) rest(until time.Time) {
	*w = walk{due: until}
}

// failed puts a walk off whose claim failed, perhaps because it took too long, so that the next claim can do without it.
func (w *walk) failed(now time.Time, poll time.Duration) {
	w.barren = true
	w.due = now.Add(poll)
}
