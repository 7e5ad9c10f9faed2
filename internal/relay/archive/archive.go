package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// Defaults of outbox-relay's retention settings.
const (
	DefaultArchiveAfter    = 720 * time.Hour
	DefaultDeleteAfter     = 8760 * time.Hour
	DefaultKeepAttempts    = 2160 * time.Hour
	DefaultKeepProcessed   = 2160 * time.Hour
	DefaultArchiveSchedule = "17 3 * * *"
	DefaultArchiveBatch    = 500
)

// The functions of the schema refuse shorter ages, so that the role of a relay cannot destroy
// events.
const (
	leastKept     = 24 * time.Hour      // before anything is archived or pruned
	leastArchived = 30 * 24 * time.Hour // in the archive
)

// Retention says for how long what is done with is kept. Its zero value keeps everything, for ever.
// What is pending, parked, held or failed is never removed by time alone.
type Retention struct {
	// ArchiveAfter is how old an event, and the last that happened to any of its deliveries, must
	// be for it to move into the archive, once all its deliveries are delivered or discarded. With
	// it the outbox forgets its idempotency key. 0: never. At least 24 hours.
	ArchiveAfter time.Duration
	// DeleteAfter is how old the events of a month of the archive must be, by when they were
	// created, for it to be dropped as a whole; what was archived less than 30 days ago keeps it,
	// too. 0: never. At least 30 days, and not less than ArchiveAfter.
	DeleteAfter time.Duration
	// Attempts is how long the log of attempts is kept. 0: for ever. At least 24 hours.
	Attempts time.Duration
	// ProcessedEvents is how long a receiver in the same schema remembers what it has finished, if
	// there is one: the table processed_events. It is announced before it is forgotten, so that the
	// receiver refuses an unknown event from before then, and goes with the next run. It may not be
	// less than the longest time over which a destination here is retried. 0: for ever.
	ProcessedEvents time.Duration
	// Schedule by which a relay does all that, as cron has it, in UTC. Empty: "17 3 * * *", every
	// night.
	Schedule string
	// Batch is how many events one transaction looks at. 0: 500. At most 10000.
	Batch int
}

// Result counts what was moved and removed.
type Result struct {
	// Events that moved into the archive, with their deliveries.
	Events int64 `json:"events"`
	// Months of the archive that were dropped, by their tables' names.
	Months []string `json:"months"`
	// Attempts that were removed from the log.
	Attempts int64 `json:"attempts"`
	// ProcessedEvents that a receiver in the same schema forgot.
	ProcessedEvents int64 `json:"processed_events"`
}

// Progress is called after every batch.
type Progress struct {
	// Total of this run so far.
	Total Result
	// Batch is what the last one added to it.
	Batch Result
	// Waiting says why the run stands down for now, with the same totals; empty: it does not.
	Waiting string
}

// ErrArchiving says that another session archives at the moment; what it does need not be done
// twice.
var ErrArchiving = errors.New("another relay or command is archiving at the moment")

const (
	// archiveStandDown is how long a run waits before it asks again whether the database is still
	// under pressure.
	archiveStandDown = 5 * time.Second

	attemptBatch = 1000
	// A page holds at most some sixty rows of processed_events, each of which takes a lock for a
	// moment.
	pageBatch = 16
)

// A Job is one run of the archive.
type Job struct {
	// DB is where the tables are. Statements run one after the other.
	DB pg.DB
	// Keep says what to move and to remove.
	Keep Retention
	// Progress follows every batch, and must return at once. nil: nothing does.
	Progress func(Progress)
	// Pressed says why the database needs to be left alone for now. nil: never.
	Pressed func() (reason string, pressed bool)

	dryRun bool // change nothing
	total  Result
}

// Run moves settled events into the archive, drops the archive's old months, and prunes the log of
// attempts and a receiver's memory, as Keep says, in short transactions with pauses in between. It
// may be repeated after whatever ended it: each batch happens as a whole or not at all. It returns
// what it did, together with the errors of what it could not do; when ctx ends, after the batch at
// hand, with the cause; when another session archives, with [ErrArchiving].
func (a Job) Run(ctx context.Context) (Result, error) { return a.run(ctx) }

// Rehearse counts what [Job.Run] would do now, and changes nothing. It goes through the same rows,
// at the same pace.
func (a Job) Rehearse(ctx context.Context) (Result, error) {
	a.dryRun = true
	return a.run(ctx)
}

// run does what is due. What fails does not keep the rest from being done.
func (a *Job) run(ctx context.Context) (Result, error) {
	a.total.Months = []string{}
	a.Keep.Batch = cmp.Or(a.Keep.Batch, DefaultArchiveBatch)
	if err := checkClock(ctx, a.DB); err != nil {
		a.note(ctx, err)
		return a.total, err
	}
	var failures []error
	for _, part := range []struct {
		olderThan time.Duration
		do        func(context.Context, time.Duration) error
	}{
		{a.Keep.ArchiveAfter, a.walk(archiveWalk{"archive events", archiveEvents, math.MinInt64, a.Keep.Batch}, func(n int64) Result { return Result{Events: n} })},
		{a.Keep.DeleteAfter, a.dropMonths},
		{a.Keep.Attempts, a.walk(archiveWalk{"prune attempts", pruneAttempts, math.MinInt64, attemptBatch}, func(n int64) Result { return Result{Attempts: n} })},
		{a.Keep.ProcessedEvents, a.walk(archiveWalk{"prune processed_events", pruneProcessedEvents, 0, pageBatch}, func(n int64) Result { return Result{ProcessedEvents: n} })},
	} {
		if part.olderThan <= 0 {
			continue
		}
		err := part.do(ctx, part.olderThan)
		if ctx.Err() != nil {
			return a.total, ctx.Err()
		}
		if errors.Is(err, ErrArchiving) {
			return a.total, err
		}
		failures = append(failures, err)
	}
	err := errors.Join(failures...)
	a.note(ctx, err)
	return a.total, err
}

// note records that a run has ended, or why it has not. Who may not write it has done the run all
// the same.
func (a *Job) note(ctx context.Context, problem error) {
	if a.dryRun {
		return
	}
	text := ""
	if problem != nil {
		text = problem.Error()
	}
	_ = recordRun(ctx, a.DB, text)
}

// walk returns a function that goes through the whole table; count turns what a batch did into a
// result.
func (a *Job) walk(w archiveWalk, count func(int64) Result) func(context.Context, time.Duration) error {
	return func(ctx context.Context, olderThan time.Duration) error {
		cursor := w.from
		return a.paced(ctx, func() (bool, error) {
			batch, err := w.step(ctx, a.DB, cursor, olderThan, a.dryRun)
			if err != nil {
				return false, err
			}
			if !batch.Mine {
				return false, ErrArchiving
			}
			cursor = batch.Cursor
			a.tell(count(int64(batch.Done)), "")
			return !batch.Finished, nil
		})
	}
}

// dropMonths drops the months of the archive that are old enough, one in each transaction.
func (a *Job) dropMonths(ctx context.Context, olderThan time.Duration) error {
	after := ""
	return a.paced(ctx, func() (bool, error) {
		name, err := dropOldest(ctx, a.DB, olderThan, a.dryRun, after)
		if err != nil || name == "" {
			return false, err
		}
		after = name
		a.tell(Result{Months: []string{name}}, "")
		return true, nil
	})
}

// paced repeats step while there is more to do, and only while the database is not under pressure.
func (a *Job) paced(ctx context.Context, step func() (more bool, err error)) error {
	ready := func() error {
		if err := a.standDown(ctx); err != nil {
			return err
		}
		return checkClock(ctx, a.DB) // which may jump meanwhile
	}
	return batch.Paced(ctx, ready, step)
}

// standDown waits while the database is under pressure.
func (a *Job) standDown(ctx context.Context) error {
	told := ""
	for a.Pressed != nil {
		reason, pressed := a.Pressed()
		if !pressed {
			break
		}
		if reason != told {
			told = reason
			a.tell(Result{}, reason)
			a.note(ctx, errors.New("it stands down: "+reason))
		}
		if err := sleep.For(ctx, archiveStandDown); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

func (a *Job) tell(batch Result, waiting string) {
	a.total.Events += batch.Events
	a.total.Months = append(a.total.Months, batch.Months...)
	a.total.Attempts += batch.Attempts
	a.total.ProcessedEvents += batch.ProcessedEvents
	if a.Progress != nil {
		a.Progress(Progress{Total: a.total, Batch: batch, Waiting: waiting})
	}
}

// Removes reports whether anything is ever to be done.
func (k Retention) Removes() bool {
	return k.ArchiveAfter > 0 || k.DeleteAfter > 0 || k.Attempts > 0 || k.ProcessedEvents > 0
}

// Plan returns when to archive, or what is wrong with Schedule.
func (k Retention) Plan() (cron.Schedule, string) {
	const example = `write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`
	k.Schedule = cmp.Or(k.Schedule, DefaultArchiveSchedule)
	if strings.Contains(k.Schedule, "TZ=") { // the parser takes it, and panics over one that is cut short
		return nil, "names a time zone, where an hour is skipped or repeated; " + example
	}
	schedule, err := cron.ParseStandard(k.Schedule)
	if err != nil {
		return nil, fmt.Sprintf("%q is not a schedule; %s", k.Schedule, example)
	}
	return schedule, ""
}

// Problems returns every mistake in the settings, which stand under path.
func (k Retention) Problems(path string) []check.Problem {
	var v check.Problems
	for _, kept := range []struct {
		name       string
		age, least time.Duration
	}{
		{"archive_after", k.ArchiveAfter, leastKept},
		{"delete_after", k.DeleteAfter, leastArchived},
		{"attempts", k.Attempts, leastKept},
		{"processed_events", k.ProcessedEvents, leastKept},
	} {
		v.Require(kept.age >= 0, path+"."+kept.name, "%s is negative; write a duration such as 720h, or 0 for ever", kept.age)
		v.Require(kept.age <= 0 || kept.age >= kept.least, path+"."+kept.name,
			"%s is too short: the database refuses less than %.0fh; write %.0[2]fh or more, or 0 for ever", kept.age, kept.least.Hours())
	}
	v.Require(k.Batch >= 0 && k.Batch <= 10_000, path+".batch", "%d is out of range; write 1 to 10000", k.Batch)
	v.Require(k.DeleteAfter == 0 || k.DeleteAfter >= k.ArchiveAfter, path+".delete_after",
		"%s is shorter than %s.archive_after (%s), so that what is archived would be dropped at once; write %s or more, or 0 for ever",
		k.DeleteAfter, path, k.ArchiveAfter, k.ArchiveAfter)
	schedule, problem := k.Plan()
	v.Require(problem == "", path+".schedule", "%s", problem)
	every, constant := schedule.(cron.ConstantDelaySchedule)
	v.Require(!constant || every.Delay >= time.Minute, path+".schedule", "%q is too often; write @every 1m or more", k.Schedule)
	return v
}
