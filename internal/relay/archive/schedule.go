package archive

import (
	"context"
	"time"

	"github.com/robfig/cron/v3"
)

// A Schedule is when the archive runs, as the configuration in effect has it. It is not safe for
// concurrent use.
type Schedule struct {
	Jobs *cron.Cron
	Run  func(ctx context.Context) // must end when ctx is done

	keep   Retention
	entry  cron.EntryID
	cancel context.CancelFunc // ends the run that is under way; nil: nothing is planned
}

// Follow plans again if the configuration has changed. A run that is under way ends, because it may
// remove what the new configuration keeps. Later runs end with ctx.
func (p *Schedule) Follow(ctx context.Context, keep Retention) {
	if keep == p.keep {
		return
	}
	if p.cancel != nil {
		p.cancel()
		p.Jobs.Remove(p.entry)
		p.cancel = nil
	}
	p.keep = keep
	if schedule, problem := keep.Plan(); problem == "" && keep.Removes() {
		ctx, p.cancel = context.WithCancel(ctx)
		p.entry = p.Jobs.Schedule(schedule, cron.FuncJob(func() { p.Run(ctx) }))
	}
}

// Next returns when the next run after now begins. Zero: none is planned.
func (k Retention) Next(now time.Time) time.Time {
	schedule, problem := k.Plan()
	if problem != "" || !k.Removes() {
		return time.Time{}
	}
	return schedule.Next(now.UTC())
}

// Overdue returns from when on a run that is the last one should have been followed by another: the
// schedule has passed twice. Zero: it is the last that was planned.
func (k Retention) Overdue(last time.Time) time.Time {
	next := k.Next(last)
	if next.IsZero() {
		return next
	}
	return k.Next(next)
}
