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
	Excused  int           // requests that a fault would excuse, had they not delivered their event
	Recovery time.Duration // from the last fault, and the last commit, to the last request
	// How long the first request of an event took from its commit, of events that were due at once:
	// for 99 of 100, and at most.
	P99, Longest time.Duration
}

// Later is the note of the commit of an event that is not due at once.
const Later = "later"

// Measure returns the figures of a history.
func Measure(calls []Call, t Tables) (f Figures) {
	c := newChecker(calls, t)
	for _, posts := range c.posts {
		f.Requests += len(posts)
		f.More += len(posts) - 1
		f.Repeats += repeats(posts)
		for _, p := range posts {
			if c.excused(p) {
				f.Excused++
			}
		}
	}
	f.Recovery = c.recovery()
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
