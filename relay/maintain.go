package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
)

// unparkInterval is how often a relay looks for parked deliveries that have a route by now.
const unparkInterval = 30 * time.Second

// maintain runs the safety tick and what has to be done now and then, until ctx is done.
func (r *Relay) maintain(ctx context.Context) {
	jobs := r.newJobs()
	jobs.Schedule(cron.Every(r.cfg.PollInterval), cron.FuncJob(func() {
		signal(r.wake.tick)
		signal(r.alerts)
	}))
	jobs.Schedule(cron.Every(unparkInterval), cron.FuncJob(func() { signal(r.parked) }))
	jobs.Start()
	for ctx.Err() == nil {
		select {
		case <-r.parked:
			if err := r.unpark(ctx); err != nil && ctx.Err() == nil {
				r.databaseError("unpark", err)
			}
		case <-ctx.Done():
		}
	}
	<-jobs.Stop().Done()
}

// newJobs returns a scheduler in UTC, where no hour is skipped or repeated, in which a job that panics or outlasts its
// interval hurts nobody else.
func (r *Relay) newJobs() *cron.Cron {
	log := cronLog{r}
	// Recover within: SkipIfStillRunning would take a job that panicked through it for one that still runs, for ever.
	return cron.New(cron.WithLocation(time.UTC), cron.WithLogger(log),
		cron.WithChain(cron.SkipIfStillRunning(log), cron.Recover(log)))
}

// cronLog tells of jobs that panicked; that one ran is no news.
type cronLog struct{ relay *Relay }

func (cronLog) Info(string, ...any) {}

func (l cronLog) Error(err error, msg string, details ...any) {
	l.relay.cfg.Log.Error().Err(err).Str("details", fmt.Sprint(details...)).Msg("maintenance: " + msg)
}
