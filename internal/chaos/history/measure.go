package history

import (
	"slices"
	"time"
)

// Figures say how much happened in a run.
type Figures struct {
	Requests int
	More     int           // requests that were not the first of their event
	Repeats  int           // of these, those that followed an accepted one, and were accepted
	Refused  int           // requests without success that the wire did not tamper with
	Accepted int           // requests with success
	Excused  int           // of these, those that a fault would excuse, had they not delivered their event
	Crashes  int           // faults that may undo what relays wrote; not those of receivers
	Recovery time.Duration // from the last fault, and the last commit, to the last request
	Overload time.Duration // for how long the machine had too much to do
	// How long the first request of an event took from its commit, of events that were due at once:
	// for 99 of 100, and at most.
	P99, Longest time.Duration
}

// Measure returns the figures of a history.
func Measure(calls []Call, t Tables) Figures { return newChecker(calls, t).figures() }

func (c *checker) figures() (f Figures) {
	for _, fault := range c.faults {
		if fault.Harm == Undoes && slices.ContainsFunc(c.senders, func(relay string) bool { return hits(fault, relay) }) {
			f.Crashes++
		}
	}
	for _, posts := range c.posts {
		f.Requests += len(posts)
		f.More += len(posts) - 1
		f.Repeats += repeats(posts)
		for _, p := range posts {
			switch {
			case p.Outcome != OK && p.Note == "":
				f.Refused++
			case p.Outcome == OK:
				f.Accepted++
				if c.undone(p) {
					f.Excused++
				}
			}
		}
	}
	calm, last := c.recovery()
	f.Recovery, f.Overload = last-calm, c.overload(0, last)
	var took []time.Duration
	for _, commit := range c.commits {
		if posts := c.posts[commit.Key]; len(posts) > 0 && commit.Note != Later {
			took = append(took, posts[0].At-commit.To)
		}
	}
	if n := len(took); n > 0 {
		slices.Sort(took)
		f.P99, f.Longest = took[(n-1)*99/100], took[n-1]
	}
	return f
}
