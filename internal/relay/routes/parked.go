package routes

import (
	"context"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// A ParkedSearch releases the parked deliveries that have a route by now, after a route was added.
// It works in steps over the ids of events, so that no statement depends on how many are parked. It
// is not safe for concurrent use.
type ParkedSearch struct {
	DB       pg.Pool
	Log      zerolog.Logger
	Released func() // is called when deliveries were released: they lie behind the positions of claims

	step int64 // ids in one step
}

const (
	parkedStep     = 1000
	parkedStepMost = 100_000
	// parkedQuick and parkedSlow bound how long a step takes.
	parkedQuick = 20 * time.Millisecond
	parkedSlow  = 100 * time.Millisecond
)

// Run searches up to the last event that there is. A relay that took events before it knew of the
// route may park some of them later: it asks for another search. A route that is added meanwhile
// begins another one too.
func (p *ParkedSearch) Run(ctx context.Context) error {
	latest, err := latestEvent(ctx, p.DB)
	if err != nil {
		return err
	}
	p.step = max(p.step, parkedStep)
	released := 0
	for {
		begun := time.Now()
		s, err := ReleaseParked(ctx, p.DB, p.step, latest)
		if err != nil {
			return err
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
	return endParkedSearch(ctx, p.DB, latest)
}
