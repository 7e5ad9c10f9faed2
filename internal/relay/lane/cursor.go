package lane

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
)

// A Cursor is how far claims have read one class of a lane. Claims read live deliveries behind the
// newest ones seen, again and again. They read backlog and replays from the front to the end, and
// then leave them alone for a while. A position is only a shortcut: what lies behind it, such as
// what another relay has given back, is found when the cursor begins at the front again.
type Cursor struct {
	Position     Keyset        // where the last claim ended
	More         bool          // the last claim did not come to the end: there may be more behind it
	Due          time.Time     // when to continue, or to begin again; not of live
	took         time.Duration // the time spent on claims that found nothing
	FoundNothing bool          // the last claim found nothing to send
	Clear        bool          // the last claim took all that it read
	restarts     bool          // once it has come to the end it begins again, at once
	Pause        time.Duration // of a cursor that waits for more replays: until the next scan
	Shared       time.Time     // until when other relays are believed to claim here, too; only while there is more
}

// Overlap is how far behind the newest delivery seen claims read again: relays and operators make
// deliveries pending in transactions that take a moment to commit.
const Overlap = 2 * time.Second

// replayRescan is after which time a cursor that has found replays reads on: they come in small
// numbers.
const replayRescan = 20 * time.Millisecond

// IsDue reports whether it is time to claim.
func (w *Cursor) IsDue(now time.Time) bool { return !now.Before(w.Due) }

// Scan returns the next scan.
func (w *Cursor) Scan(class Class, now time.Time, free int, after, until Keyset) Scan {
	shared := w.More && now.Before(w.Shared)
	return Scan{Class: class, Free: free, After: after, Until: until, Clear: w.More && w.Clear, Shared: shared}
}

// Advance moves past what a claim has read, at the database's time at. found is how many deliveries
// and ordering keys the scan brought, took how long the claim lasted, pause how long the cursor
// rests at its end.
func (w *Cursor) Advance(class Class, result ScanResult, found int, at time.Time, took time.Duration, pause agenda.Rest) {
	if class == Live {
		w.Position, w.More = Keyset{At: at}, result.More // everything that was due has been read
		if result.More {
			w.Position = result.Last
		}
		return
	}
	w.FoundNothing = found == 0
	if w.FoundNothing || !result.More {
		w.took += took
	}
	switch {
	case result.More:
		w.Position, w.More, w.Due = result.Last, true, time.Time{}
		if w.FoundNothing { // the other lanes get half of the time
			w.Due = time.Now().Add(took)
		}
	case w.restarts:
		w.Rest(time.Time{})
	case class == Replays && (found > 0 || w.Pause > 0 && w.Pause < pause.Least):
		// An operator's replay lasts for a while. Read after a rest, what it adds would come at
		// once, and before live events.
		w.Pause = max(2*w.Pause, replayRescan)
		if found > 0 {
			w.Pause = replayRescan
		}
		w.Position, w.More, w.took = Keyset{At: at.Add(-Overlap)}, true, 0
		w.Due = time.Now().Add(max(w.Pause, took))
	default:
		w.Rest(time.Now().Add(pause.After(w.took)))
	}
}

// Rest makes the cursor begin at the front at the given time.
func (w *Cursor) Rest(until time.Time) {
	*w = Cursor{Due: until}
}

// Failed puts a cursor off whose claim failed, perhaps because it took too long, so that the next
// claim can do without it.
func (w *Cursor) Failed(now time.Time, poll time.Duration) {
	w.FoundNothing = true
	w.Due = now.Add(poll)
}
