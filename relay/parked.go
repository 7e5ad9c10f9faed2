package relay

import (
	"context"
	"slices"
	"time"

	"github.com/rs/zerolog"
)

// A parkedSearch looks through the parked deliveries for those that have a route by now, after a route was added. It goes in steps
// over the ids of events, so that no statement depends on how many are parked. Transactions that were open when it began may know
// nothing of the route, and park events behind it; when the last of them has ended, it looks through everything once more. It is
// the maintenance goroutine's.
type parkedSearch struct {
	chores *store
	wake   *wakeup
	log    zerolog.Logger

	step    int64         // ids in one step
	reached int64         // up to which event the last round came
	awaited []string      // transactions that were open when the search began; nil: it has not begun
	next    time.Time     // when to begin another round
	wait    time.Duration // for such transactions
}

const (
	parkedStep     = 1000
	parkedStepMost = 100_000
	// parkedQuick and parkedSlow bound how long a step takes.
	parkedQuick = 20 * time.Millisecond
	parkedSlow  = 100 * time.Millisecond
)

// round goes on to the last event there is, and ends the pass if no transaction is open that could still park an event for which
// there is a route.
func (p *parkedSearch) round(ctx context.Context) error {
	if time.Now().Before(p.next) {
		return nil
	}
	_, latest, open, err := p.chores.openWriters(ctx)
	if err != nil {
		return err
	}
	anew, err := p.look(ctx, latest, nil)
	if err != nil {
		return err
	}
	if anew {
		if _, _, open, err = p.chores.openWriters(ctx); err != nil {
			return err
		}
		p.awaited, p.wait = append([]string{}, open...), beatInterval
	}
	if slices.ContainsFunc(p.awaited, func(id string) bool { return slices.Contains(open, id) }) {
		p.next = time.Now().Add(p.wait)
		p.wait = min(2*p.wait, writersMost)
		return nil
	}
	if _, err := p.look(ctx, latest, new(int64)); err != nil {
		return err
	}
	if err := p.chores.endParkedSearch(ctx, latest); err != nil {
		return err
	}
	*p = parkedSearch{chores: p.chores, wake: p.wake, log: p.log}
	return nil
}

// look looks through what is parked up to the latest event: from where relays have come or, once more, from an event. anew
// says that the pass has to begin anew, since another route was added.
func (p *parkedSearch) look(ctx context.Context, latest int64, from *int64) (anew bool, err error) {
	anew = p.awaited == nil
	p.step = max(p.step, parkedStep)
	released := 0
	for {
		begun := time.Now()
		s, err := p.chores.releaseParked(ctx, p.step, latest, from)
		if err != nil {
			return false, err
		}
		if from != nil {
			*from = s.reached
		} else {
			anew = anew || s.after < p.reached
			p.reached = s.reached
		}
		released += s.released
		if s.released > 0 {
			p.wake.notify(true) // they lie behind the lanes' positions
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
		p.log.Info().Int("deliveries", released).Msg("released parked deliveries")
	}
	return anew, nil
}
