package relay

import (
	"context"
	"slices"
	"time"
)

// A parkedSearch looks through the parked deliveries for those that have a route by now, after a route was added. It goes in steps
// over the ids of events, so that no statement depends on how many are parked. It is the maintenance goroutine's.
type parkedSearch struct {
	step    int64         // ids in one step
	reached int64         // up to which event the last round came
	awaited []string      // transactions that were open when the search began: they may know nothing of the route yet
	next    time.Time     // when to begin another round
	wait    time.Duration // for such transactions
}

const (
	parkedStep     = 1000
	parkedStepMost = 100_000
	// parkedAgain is when to look again for the first time, if a transaction is open that may know nothing of the route.
	parkedAgain = time.Second
	// parkedQuick and parkedSlow bound how long a step takes.
	parkedQuick = 20 * time.Millisecond
	parkedSlow  = 100 * time.Millisecond
)

// round goes on to the last event there is, and ends the search if no transaction is open that could still park an event for which
// there is a route.
func (p *parkedSearch) round(ctx context.Context, r *Relay) error {
	if time.Now().Before(p.next) {
		return nil
	}
	_, latest, open, err := r.chores.openWriters(ctx)
	if err != nil {
		return err
	}
	p.step = max(p.step, parkedStep)
	released := 0
	for {
		begun := time.Now()
		s, err := r.chores.releaseParked(ctx, p.step, latest)
		if err != nil {
			return err
		}
		if s.after < p.reached || p.awaited == nil { // begun anew: another route was added
			p.awaited, p.wait = open, parkedAgain
		}
		p.reached = s.reached
		released += s.released
		if s.released > 0 {
			r.wake.notify(true) // they lie behind the lanes' positions
		}
		switch took := time.Since(begun); {
		case took < parkedQuick:
			p.step = min(2*p.step, parkedStepMost)
		case took > parkedSlow:
			p.step = max(p.step/2, 1)
		}
		if s.reached >= latest {
			break
		}
	}
	if released > 0 {
		r.cfg.Log.Info().Int("deliveries", released).Msg("released parked deliveries")
	}
	if slices.ContainsFunc(p.awaited, func(id string) bool { return slices.Contains(open, id) }) {
		p.next = time.Now().Add(p.wait)
		p.wait = min(2*p.wait, writersMost)
		return nil
	}
	if err := r.chores.endParkedSearch(ctx, latest); err != nil {
		return err
	}
	*p = parkedSearch{}
	return nil
}
