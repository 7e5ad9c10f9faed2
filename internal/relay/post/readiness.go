package post

import (
	"context"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

const (
	// readinessEvery is how soon destinations of a reload are asked, and those again that were not
	// ready. That doubles each time.
	readinessEvery = 5 * time.Second
	readinessMax   = time.Minute
)

// A Readiness asks destinations of logs whether they can store events, so that an operator learns
// of a missing stream or topic when the relay starts, and not when the first event waits. It holds
// nothing up: attempts find out for themselves. Its methods are for one goroutine.
type Readiness struct {
	Endpoints func() []*Endpoint // those in effect
	Log       zerolog.Logger

	states map[*Endpoint]*readinessState
}

type readinessState struct {
	ready bool
	cause string // why it is not, as it was last logged
	next  time.Time
	wait  time.Duration // before next
}

// Run asks until ctx is done. A destination that was ready once is not asked again: from then on
// its deliveries report.
func (r *Readiness) Run(ctx context.Context) {
	tick := time.NewTicker(readinessEvery)
	defer tick.Stop()
	for {
		r.ask(ctx, time.Now())
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// ask asks each destination of a log that was not ready so far.
func (r *Readiness) ask(ctx context.Context, now time.Time) {
	states := map[*Endpoint]*readinessState{} // without what a reload has replaced
	var asking sync.WaitGroup
	for _, e := range r.Endpoints() {
		if !e.Destination.IsLog() {
			continue
		}
		s := r.states[e]
		if s == nil {
			s = &readinessState{}
		}
		states[e] = s
		if !s.ready && !now.Before(s.next) {
			s.wait = min(max(readinessEvery, 2*s.wait), readinessMax)
			s.next = now.Add(s.wait)
			asking.Go(func() { r.askOne(ctx, e, s) }) // none waits for another one's timeout
		}
	}
	asking.Wait()
	r.states = states
}

// askOne asks one destination, and logs what has changed.
func (r *Readiness) askOne(ctx context.Context, e *Endpoint, s *readinessState) {
	asking, cancel := context.WithTimeout(ctx, e.Destination.Timeout)
	defer cancel()
	warnings, err := e.Reach(asking)
	log := r.Log.With().Str("destination", e.Destination.Name).Logger()
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		if cause := plain.Clip(err.Error()); cause != s.cause {
			s.cause = cause
			log.Warn().Str("error", cause).Msg("destination is not ready: its events wait, and nothing is lost; other destinations continue")
		}
		return
	case s.cause != "":
		log.Info().Msg("destination is ready")
	}
	s.ready = true
	for _, warning := range warnings {
		log.Warn().Str("warning", plain.Clip(warning)).Msg("destination is ready, but it will not store all events as they should be")
	}
}
