package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
)

// unparkInterval is how often a relay asks whether there are parked deliveries, which may have a route by now.
const unparkInterval = 30 * time.Second

// maintain runs the safety tick and what has to be done now and then, until ctx is done.
func (r *Relay) maintain(ctx context.Context) {
	jobs := r.newJobs()
	jobs.Schedule(cron.Every(r.cfg.PollInterval), cron.FuncJob(func() { signal(r.wake.tick) }))
	if schedule, problem := r.cfg.Retention.schedule(); problem == "" && r.cfg.Retention.removes() {
		jobs.Schedule(schedule, cron.FuncJob(func() { r.archive(ctx) }))
	}
	jobs.Start()
	for ctx.Err() == nil {
		select {
		case <-r.parked:
			if err := r.unpark(ctx); err != nil && ctx.Err() == nil {
				r.databaseError("unpark", err)
			}
		case <-r.doubt:
			if _, err := checkSchema(ctx, r.store.pool); errors.Is(err, ErrSchema) {
				r.cfg.Log.Error().Err(err).Msg("the schema changed under this relay")
				r.fail(err)
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
