package routes

import (
	"context"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// A ParkedSearch looks through the parked deliveries for those that have a route by now, after a route was added. It goes in steps
// over the ids of events, so that no statement depends on how many are parked. Transactions that were open when it began may know
// nothing of the route, and park events behind it; when the last of them has ended, it looks through everything once more. It
// is not safe for concurrent use.
type ParkedSearch struct {
	DB       pg.Pool
	Log      zerolog.Logger
	Released func() // is called when deliveries were released: they lie behind the positions of claims

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
	// parkedWait and parkedWaitMost bound how long the next round waits for transactions that were open.
	parkedWait     = time.Second
	parkedWaitMost = 5 * time.Second
)

// Round goes on to the last event there is, and ends the pass if no transaction is open that could still park an event for which
// there is a route. Until then every beat asks for another round; rounds that come too soon do nothing.
func (p *ParkedSearch) Round(ctx context.Context) error {
	if time.Now().Before(p.next) {
		return nil
	}
	_, latest, open, err := pg.OpenWriters(ctx, p.DB)
	if err != nil {
		return err
	}
	anew, err := p.look(ctx, latest, nil)
	if err != nil {
		return err
	}
	if anew {
		if _, _, open, err = pg.OpenWriters(ctx, p.DB); err != nil {
			return err
		}
		p.awaited, p.wait = append([]string{}, open...), parkedWait
	}
	if slices.ContainsFunc(p.awaited, func(id string) bool { return slices.Contains(open, id) }) {
		p.next = time.Now().Add(p.wait)
		p.wait = min(2*p.wait, parkedWaitMost)
		return nil
	}
	if _, err := p.look(ctx, latest, new(int64)); err != nil {
		return err
	}
	if err := endParkedSearch(ctx, p.DB, latest); err != nil {
		return err
	}
	*p = ParkedSearch{DB: p.DB, Log: p.Log, Released: p.Released}
	return nil
}

// look looks through what is parked up to the latest event: from where relays have come or, once more, from an event. anew
// says that the pass has to begin anew, since another route was added.
func (p *ParkedSearch) look(ctx context.Context, latest int64, from *int64) (anew bool, err error) {
	anew = p.awaited == nil
	p.step = max(p.step, parkedStep)
	released := 0
	for {
		begun := time.Now()
		s, err := ReleaseParked(ctx, p.DB, p.step, latest, from)
		if err != nil {
			return false, err
		}
		if from != nil {
			*from = s.Reached
		} else {
			anew = anew || s.After < p.reached
			p.reached = s.Reached
		}
		released += s.Released
		if s.Released > 0 {
			p.Released()
		}
		switch took := time.Since(begun); {
		case took < parkedQuick:
			p.step = min(2*p.step, parkedStepMost)
		case took > parkedSlow:
			p.step = max(p.step/2, 1)
		}
		if s.Reached >= latest {
			break
		}
	}
	if released > 0 {
		p.Log.Info().Int("deliveries", released).Msg("released parked deliveries")
	}
	return anew, nil
}
