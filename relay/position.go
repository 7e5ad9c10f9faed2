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
	more     bool          // the last claim took all it asked for: there may be more behind it
	due      time.Time     // when to go on, or to begin again; not of live
	took     time.Duration // how long was spent on finding little
	chunked  bool          // it is slow, and goes in chunks
	again    bool          // once it has ended it is to begin again, at once
}

// Walking is bounded in two ways: by its share of the time, and in how long each statement of it holds up the other
// lanes. A lane in which many deliveries are due and cannot be claimed, such as those behind a failed head of their
// ordering key, is walked in chunks.
const (
	walkShare = 100                    // a walk rests this many times as long as it spent on finding little
	slowWalk  = 200 * time.Millisecond // a walk that takes longer goes in chunks from then on
	walkChunk = 2000                   // deliveries looked at in one chunk
	overlap   = 2 * time.Second        // how far behind the newest delivery seen to look again: transactions commit out of order
)

// wanted reports whether it is time to claim.
func (w *walk) wanted(now time.Time) bool { return !now.Before(w.due) }

// advance moves past what a claim has looked at, at the database's time at. found is how many deliveries it brought, the
// last of them at last; took how long it lasted, poll the poll interval.
func (w *walk) advance(a ask, found int, last keyset, at time.Time, took, poll time.Duration) {
	full := found >= a.free
	if a.class == live {
		w.position, w.more = keyset{at: at}, full // everything that was due has been looked at
		if full {
			w.position = last
		}
		return
	}
	if !full || took > slowWalk {
		w.took += took
	}
	switch {
	case full:
		w.position, w.more, w.due = last, true, time.Time{}
	case a.chunk:
		w.position, w.more, w.due = a.until, true, time.Now().Add(took)
	default:
		w.chunked = w.took > slowWalk
		// A little less than the poll interval, so that a walk that comes with each safety tick does not miss every
		// other one.
		until := time.Now().Add(max(poll*9/10, walkShare*w.took))
		if w.again {
			until = time.Time{}
		}
		w.rest(until)
	}
}

// rest ends a walk until the next one is due.
func (w *walk) rest(until time.Time) {
	*w = walk{due: until, chunked: w.chunked}
}

// failed takes back a claim that failed, perhaps because it took too long: it goes in chunks, and not at once, so that
// the next claim can do without it.
func (w *walk) failed(now time.Time, poll time.Duration) {
	w.chunked = true
	w.due = now.Add(poll)
}

// walkNow makes the next claim begin at the front of what is not live. A walk in chunks goes on first: if it began anew
// whenever something asks for that, it would never come to its end.
func (l *lane) walkNow() {
	for _, c := range []class{backlog, replays} {
		if w := &l.walks[c]; w.chunked && w.more {
			w.again = true
		} else {
			w.rest(time.Time{})
		}
	}
}

// walked reports whether all that is due has been looked at.
func (l *lane) walked(now time.Time) bool {
	return !slices.ContainsFunc(l.walks[:], func(w walk) bool { return w.more }) &&
		!l.walks[backlog].wanted(now) && !l.walks[replays].wanted(now)
}

// unblock notes ordering keys in which the next delivery can be claimed.
func (l *lane) unblock(keys ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		if l.unblocked == nil {
			l.unblocked = map[string]bool{}
		}
		l.unblocked[key] = true
	}
}

// takeUnblocked returns at most n of those keys, each once.
func (l *lane) takeUnblocked(n int) (keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key := range l.unblocked {
		if len(keys) == n {
			break
		}
		keys = append(keys, key)
		delete(l.unblocked, key)
	}
	return keys
}
