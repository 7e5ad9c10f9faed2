package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
)

// parkedEvery is how often everything parked is looked through for a route, although none was
// added.
const parkedEvery = time.Hour

// routesAgain is how long routes that open ranges keep are left alone. Ranges end within about a
// second.
const routesAgain = time.Second

// maintain runs what has to be done now and then, until ctx is done.
func (r *Relay) maintain(ctx context.Context) {
	jobs := newJobs(r.cfg.Log)
	jobs.Schedule(cron.Every(r.cfg.PollInterval), cron.FuncJob(r.waiting.Tick))
	searchParked := func() {
		if err := routes.BeginParkedSearch(ctx, r.chores); err != nil && ctx.Err() == nil {
			r.databaseError("begin parked search", err)
		}
	}
	jobs.Schedule(cron.Every(parkedEvery), cron.FuncJob(searchParked))
	parked := routes.ParkedSearch{DB: r.chores, Log: r.cfg.Log, Released: func() { r.mailbox.post(agenda.CauseSweep) }}
	if r.cfg.History != nil {
		jobs.Schedule(minutely{}, cron.FuncJob(func() { r.writeHistory(ctx) }))
	}
	archiving := archive.Schedule{Jobs: jobs, Run: r.archive}
	archiving.Follow(ctx, r.config().Retention)
	jobs.Start()
	again := time.NewTimer(routesAgain)
	defer again.Stop()
	for ctx.Err() == nil {
		select {
		case <-again.C:
			signal(r.signals.routes)
		case <-r.signals.parked:
			if err := parked.Run(ctx); err != nil && ctx.Err() == nil {
				r.databaseError("unpark", err)
			}
		case <-r.signals.reparked:
			searchParked()
			signal(r.signals.parked)
		case <-r.signals.routes:
			kept, err := r.followRoutes(ctx)
			if err != nil && ctx.Err() == nil {
				r.databaseError("follow routes", err)
			}
			if kept {
				again.Reset(routesAgain)
			}
		case <-r.signals.schema:
			// A session that cannot register because of the schema leaves the guard shut for good.
			if _, err := pg.CheckSchema(identity.Unguarded(ctx), r.chores); errors.Is(err, pg.ErrSchema) {
				r.cfg.Log.Error().Err(err).Msg("the schema changed under this relay")
				r.fail(err)
			}
		case <-r.signals.reloaded:
			archiving.Follow(ctx, r.config().Retention)
			r.giveBackRemoved()
		case <-ctx.Done():
		}
	}
	<-jobs.Stop().Done()
}

// minutely is a schedule at the beginning of each minute, when all relays write their history.
type minutely struct{}

// Next returns the beginning of the minute after t.
func (minutely) Next(t time.Time) time.Time { return t.Truncate(time.Minute).Add(time.Minute) }

// writeHistory adds what this relay did since the last time to the database.
func (r *Relay) writeHistory(ctx context.Context) {
	if r.cfg.History == nil {
		return
	}
	if err := r.cfg.History.Flush(ctx, r.chores, post.Names(r.config().Destinations)); err != nil && ctx.Err() == nil {
		r.databaseError("write history", err)
	}
}

// archive is the relay's own run. The next one takes up whatever ended this one.
func (r *Relay) archive(ctx context.Context) {
	r.archiving.Store(true)
	defer r.archiving.Store(false)
	log := r.cfg.Log
	a := archive.Job{DB: r.chores, Keep: r.config().Retention, Pressed: r.databaseBusy, Progress: func(p archive.Progress) {
		if p.Waiting != "" {
			log.Info().Str("reason", p.Waiting).Msg("archive: stands down while the database is under pressure")
			return
		}
		if hook := r.cfg.Hooks.Archived; hook != nil {
			hook(p.Batch)
		}
	}}
	began := time.Now()
	done, err := a.Run(ctx)
	if err != nil && ctx.Err() == nil && !errors.Is(err, archive.ErrArchiving) {
		r.databaseError("archive", err)
	}
	log.Info().Int64("events", done.Events).Strs("months_dropped", done.Months).Int64("attempts", done.Attempts).
		Int64("processed_events", done.ProcessedEvents).Dur("took", time.Since(began)).Bool("complete", err == nil).Msg("archive")
}

// newJobs returns a scheduler in UTC, where no hour is skipped or repeated, in which a job that
// panics or outlasts its interval hurts no other.
func newJobs(to zerolog.Logger) *cron.Cron {
	log := cronLog{to}
	// Recover within: SkipIfStillRunning would take a job that panicked through it for one that
	// still runs, for ever.
	return cron.New(cron.WithLocation(time.UTC), cron.WithLogger(log),
		cron.WithChain(cron.SkipIfStillRunning(log), cron.Recover(log)))
}

// cronLog tells of jobs that panicked; that one ran is no news.
type cronLog struct{ log zerolog.Logger }

func (cronLog) Info(string, ...any) {}

func (l cronLog) Error(err error, msg string, details ...any) {
	l.log.Error().Err(err).Str("details", fmt.Sprint(details...)).Msg("maintenance: " + msg)
}
