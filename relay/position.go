package relay

import (
	"slices"
	"time"
)

// A walk is how far claims have come through one class of a lane. Live deliveries are looked for behind the newest ones
// seen, again and again; backlog and replays are walked through from the front, then left alone for a while. What no
// position finds, such as a late commit, the next walk does: a position is only a shortcut.
type walk struct {
	position keyset        // where the last claim ended
	more     bool          // the last claim did not come to the end: there may be more behind it
	due      time.Time     // when to go on, or to begin again; not of live
	took     time.Duration // how long was spent on finding nothing
	barren   bool          // the last claim found nothing to send
	again    bool          // once it has ended it begins again, at once
	from     keyset        // where it then begins
	resting  time.Time     // until when it rests once it has ended, since it only looks back
}

const (
	walkShare = 100             // a walk rests this many times as long as it spent on finding nothing
	overlap   = 2 * time.Second // how far behind the newest delivery seen to look again: transactions commit out of order
)

// wanted reports whether it is time to claim.
func (w *walk) wanted(now time.Time) bool { return !now.Before(w.due) }

// advance moves past what a claim has looked at, at the database's time at. found is how many deliveries and ordering keys
// the scan brought, took how long the claim lasted, poll the poll interval.
func (w *walk) advance(class class, result scanResult, found int, at time.Time, took, poll time.Duration) {
	if class == live {
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
		if w.barren { // half of the time is left to the other lanes
			w.due = time.Now().Add(took)
		}
	case w.again:
		*w = walk{position: w.from, resting: w.resting}
	default:
		// A little less than the poll interval, so that a walk that comes with each safety tick does not miss every
		// other one.
		until := time.Now().Add(max(poll*9/10, walkShare*w.took))
		if w.resting.After(until) {
			until = w.resting
		}
		w.rest(until)
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

// walkNow makes the next claim begin at the front of what is not live. A walk through what cannot be claimed goes on first: if
// it began anew whenever something asks for that, it would never come to its end.
func (l *lane) walkNow() {
	for _, c := range []class{backlog, replays} {
		if w := &l.walks[c]; w.barren && w.more {
			w.again, w.from, w.resting = true, keyset{}, time.Time{}
		} else {
			w.rest(time.Time{})
		}
	}
}

// lookBack makes the next claim look at everything that became due since the given time of the database.
func (l *lane) lookBack(since time.Time) {
	if w := &l.walks[live]; w.position.at.After(since) {
		w.position = keyset{at: since}
		w.more = true // or the overlap would be taken from it again
	}
	w, from := &l.walks[backlog], keyset{at: since}
	switch begins := from.compare(w.position) < 0; {
	case !w.more && w.due.IsZero(): // it has yet to begin
		if begins {
			w.position = from
		}
	case !w.more: // a long rest from what is blocked goes on when this has been looked at
		*w = walk{position: from, resting: w.due}
	case begins && (!w.again || from.compare(w.from) < 0): // it has passed the place
		w.again, w.from = true, from
	}
}

// walked reports whether all that is due has been looked at.
func (l *lane) walked(now time.Time) bool {
	return !slices.ContainsFunc(l.walks[:], func(w walk) bool { return w.more }) &&
		!l.walks[backlog].wanted(now) && !l.walks[replays].wanted(now) && !l.hasReady()
}
