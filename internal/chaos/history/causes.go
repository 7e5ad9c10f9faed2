package history

import (
	"net/http"
	"slices"
	"strings"
	"time"
)

// explained reports whether a recorded cause explains that a request did not deliver its event: it
// was tampered with, or answered too late. One that was accepted, or had no answer: what the relay
// wrote of it was undone. One without success: a fault of its receiver, or, if that said that the
// event was in hand, of the one that had it.
func (c *checker) explained(p Call) bool {
	switch {
	case p.Note != "", p.To-p.At > c.Timeout-timeoutGrace:
		return true
	case p.Outcome == Fail && len(c.Schedule) == 0: // by a clock that was moved, its promise had ended
		return true
	case p.Outcome == OK:
		return c.undone(p)
	case p.Outcome == Unknown && c.undone(p), c.hit(p.Receiver, p.At, p.To, None):
		return true
	}
	return p.Status == http.StatusConflict && slices.ContainsFunc(c.posts[p.Key], func(q Call) bool {
		return q.Call < p.Call && q.Outcome == Unknown && (p.At <= q.To+settleGrace || c.hit(q.Receiver, p.At-settleGrace, p.To, None))
	})
}

// undone reports whether a fault may have undone, or prevented, that the relay that sent a request
// wrote its outcome: it hit the relay when that had the claim, and before the outcome was written
// for good.
func (c *checker) undone(p Call) bool {
	written := p.To + settleGrace // for good, unless a fault delayed it
	for _, f := range c.faults {
		if f.At > written {
			break
		}
		if f.Harm >= Delays && f.To >= p.At && hits(f, p.Who) {
			written = max(written, f.To+settleGrace)
		}
	}
	claimed := p.At
	if p.Kind == Post && len(c.Schedule) > 0 {
		claimed = min(claimed, p.Claimed)
	}
	return c.hit(p.Who, claimed, written, Undoes)
}

// hit reports whether a fault that did harm hit a receiver, or a life of a relay, in some time, or
// not long before it.
func (c *checker) hit(who string, from, to time.Duration, harm Harm) bool {
	for _, f := range c.faults {
		if f.At > to+clockGrace {
			break
		}
		if f.Harm >= harm && f.To >= from-timeoutGrace && hits(f, who) {
			return true
		}
	}
	return false
}

// crashed reports whether the database may have lost, between two moments, what was written in the
// first.
func (c *checker) crashed(from, to time.Duration) bool {
	return slices.ContainsFunc(c.faults, func(f Call) bool {
		return f.Harm == Undoes && f.Who == "" && f.At <= to+clockGrace && f.To >= from-timeoutGrace
	})
}

// stoodStill reports whether a fault froze, or cut off, one relay for the whole of some time. What
// hits all relays, such as a lock, leaves none of them behind the others.
func (c *checker) stoodStill(who string, from, to time.Duration) bool {
	role, _, _ := strings.Cut(who, ".")
	return slices.ContainsFunc(c.faults, func(f Call) bool {
		return f.Harm == Undoes && f.Who == role && f.At <= from && f.To >= to-timeoutGrace
	})
}

func hits(f Call, who string) bool {
	role, _, isRelay := strings.Cut(who, ".")
	return f.Who == "" || f.Who == role || f.Who == Relays && isRelay
}

// overload returns for how long, in some time, the machine had too much to do: of the requests that
// receivers accepted in a second, half took longer than they do then.
func (c *checker) overload(from, to time.Duration) (all time.Duration) {
	if c.took == nil {
		c.took = map[time.Duration][]time.Duration{}
		for _, posts := range c.posts {
			for _, p := range posts {
				if second := p.To.Truncate(time.Second); p.Outcome == OK {
					c.took[second] = append(c.took[second], p.To-p.At)
				}
			}
		}
		for _, took := range c.took {
			slices.Sort(took)
		}
	}
	for second := from.Truncate(time.Second); second < to; second += time.Second {
		if took := c.took[second]; len(took) > 0 && took[len(took)/2] > overloaded {
			all += time.Second
		}
	}
	return all
}
