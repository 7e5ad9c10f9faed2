package ops

import (
	"math"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// DefaultReplayRate is how many deliveries a second a replay makes due unless its selection says
// otherwise: a small part of what a relay sends, so that live events do not wait behind replays for
// processors, connections and the database.
const DefaultReplayRate = 500

const (
	// paceStep is for how long a batch of a paced replay lasts. The deliveries of a batch become
	// due one by one within it. Batches of 100 ms took 2 ms of a processor each, and the p99 of
	// live events doubled.
	paceStep = 20 * time.Millisecond
	// paceChunk is how many batches are looked for at once, for the same reason.
	paceChunk = 5
	// paceRest is how many times as long as its last batch took a paced replay rests: on a database
	// that is slow already it slows down.
	paceRest = 2
)

// A pace spreads a replay over time. Zero: it does not.
type pace float64 // deliveries a second

// pace returns that of the action on the selection.
func (a action) pace(s Selection) pace {
	switch {
	case !a.paced:
		return 0
	case s.Rate == nil:
		return DefaultReplayRate
	}
	return pace(max(*s.Rate, 0))
}

// chunk returns how many deliveries one statement looks at while there are some to change.
func (p pace) chunk() int { return min(p.batch()*paceChunk, batch.Size) }

// Spread says over how long a replay that was previewed is spread, and at which rate. Empty: it is
// done within a second.
func (b Bulk) Spread() string {
	if b.Seconds < 1 {
		return ""
	}
	return "spread over about " + spanText(b.Seconds) + ", " + plain.Plural(b.Rate, "delivery", "deliveries") + " a second"
}

// TimeLeft says how long a replay still takes at its rate. Empty: it does not run, or is done
// within a second.
func (e AuditEntry) TimeLeft() string {
	if e.Action != "replay" || e.State != "running" || e.Selection == nil {
		return ""
	}
	left := replayAction(0).pace(*e.Selection).spread(e.Matched - e.Done)
	if left < time.Second {
		return ""
	}
	return "about " + spanText(left.Seconds())
}

// spanText writes seconds as "45s", "3m20s" or "2h5m".
func spanText(s float64) string {
	if d := time.Duration(s * float64(time.Second)); d >= time.Hour {
		return plain.Span(d)
	}
	return seconds(s)
}

// batch returns how many deliveries one transaction changes.
func (p pace) batch() int {
	if p == 0 {
		return batch.Size
	}
	return min(max(int(float64(p)*paceStep.Seconds()), 1), batch.Size)
}

// spread returns over how long so many deliveries become due.
func (p pace) spread(n int64) time.Duration {
	if p == 0 {
		return 0
	}
	return time.Duration(math.Round(float64(n) / float64(p) * float64(time.Second)))
}

// rest returns how long to wait after a batch of n deliveries that took so long.
func (p pace) rest(n int, took time.Duration) time.Duration {
	if p == 0 {
		return 0
	}
	return max(p.spread(int64(n))-took, paceRest*took)
}
