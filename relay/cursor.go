package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
)

// A cursor is how far claims have read one class of a lane. Claims read live deliveries behind the newest ones seen, again and again.
// They read backlog and replays from the front to the end, and then leave them alone for a while. A position is only a shortcut:
// what lies behind it, such as what another relay has given back, is found when the cursor begins at the front again.
type cursor struct {
	position     keyset        // where the last claim ended
	more         bool          // the last claim did not come to the end: there may be more behind it
	due          time.Time     // when to continue, or to begin again; not of live
	took         time.Duration // the time spent on claims that found nothing
	foundNothing bool          // the last claim found nothing to send
	clear        bool          // the last claim took all that it read
	restarts     bool          // once it has come to the end it begins again, at once
	pause        time.Duration // of a cursor that waits for more replays: until the next scan
	shared       time.Time     // until when other relays are believed to claim here, too; only while there is more
}

// overlap is how far behind the newest delivery seen claims read again: relays and operators make deliveries pending in transactions
// that take a moment to commit.
const overlap = 2 * time.Second

// replayRescan is after which time a cursor that has found replays reads on: they come in small numbers.
const replayRescan = 20 * time.Millisecond

// isDue reports whether it is time to claim.
func (w *cursor) isDue(now time.Time) bool { return !now.Before(w.due) }

// scan returns the next scan.
func (w *cursor) scan(class class, now time.Time, free int, after, until keyset) scan {
	shared := w.more && now.Before(w.shared)
	return scan{class: class, free: free, after: after, until: until, clear: w.more && w.clear, shared: shared}
}

// advance moves past what a claim has read, at the database's time at. found is how many deliveries and ordering keys the scan
// brought, took how long the claim lasted, pause how long the cursor rests at its end.
func (w *cursor) advance(class class, result scanResult, found int, at time.Time, took time.Duration, pause agenda.Rest) {
	if class == live {
		w.position, w.more = keyset{at: at}, result.more // everything that was due has been read
		if result.more {
			w.position = result.last
		}
		return
	}
	w.foundNothing = found == 0
	if w.foundNothing || !result.more {
		w.took += took
	}
	switch {
	case result.more:
		w.position, w.more, w.due = result.last, true, time.Time{}
		if w.foundNothing { // the other lanes get half of the time
			w.due = time.Now().Add(took)
		}
	case w.restarts:
		w.rest(time.Time{})
	case class == replays && (found > 0 || w.pause > 0 && w.pause < pause.Least):
		// An operator's replay lasts for a while. Read after a rest, what it adds would come at once, and before live events.
		w.pause = max(2*w.pause, replayRescan)
		if found > 0 {
			w.pause = replayRescan
		}
		w.position, w.more, w.took = keyset{at: at.Add(-overlap)}, true, 0
		w.due = time.Now().Add(max(w.pause, took))
	default:
		w.rest(time.Now().Add(pause.After(w.took)))
	}
}

// rest makes the cursor begin at the front at the given time.
func (w *cursor) rest(until time.Time) {
	*w = cursor{due: until}
}

// failed puts a cursor off whose claim failed, perhaps because it took too long, so that the next claim can do without it.
func (w *cursor) failed(now time.Time, poll time.Duration) {
	w.foundNothing = true
	w.due = now.Add(poll)
}
