package inboxops

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

const (
	// prunePages is how many pages of processed_events one transaction reads: the default of
	// consumer.PruneConfig.
	prunePages = 16
	// pruneRest is how many times as long as a batch took the pause behind it lasts.
	pruneRest = 4
	// prunePause is the shortest pause.
	prunePause = 10 * time.Millisecond
	// prunePatience is how often in a row a batch may meet the lock of another session.
	prunePatience = 5
)

// A Prune says what to forget.
type Prune struct {
	// Receiver by name. Empty: all.
	Receiver string
	// OlderThan is how long an event is remembered after it was received and processed, whichever
	// was later. The database refuses less than 24 hours.
	OlderThan time.Duration
}

// Pruned is what a prune did, or in a dry run what it would do.
type Pruned struct {
	// Removed events are forgotten.
	Removed int64 `json:"removed"`
	// Announced ones are old enough, but were announced only now: the next prune removes them, from
	// a minute later on.
	Announced int64 `json:"announced"`
}

// PreviewPrune counts what Prune would remove now, and changes nothing.
func (o *Ops) PreviewPrune(ctx context.Context, p Prune) (Pruned, error) {
	return o.prune(ctx, p, true, nil)
}

// Prune forgets events as consumer.Prune does, of all receivers that p names in one pass. progress,
// which may be nil, follows each batch. It can be ended at any moment, and be called again.
func (o *Ops) Prune(ctx context.Context, p Prune, progress func(Pruned)) (Pruned, error) {
	return o.prune(ctx, p, false, progress)
}

func (o *Ops) prune(ctx context.Context, p Prune, dryRun bool, progress func(Pruned)) (done Pruned, err error) {
	failed := 0
	for page, finished := int64(0), false; !finished; {
		if err := cmp.Or(context.Cause(ctx), o.checkClock(context.WithoutCancel(ctx))); err != nil {
			return done, fmt.Errorf("prune: %w", err)
		}
		began := time.Now()
		batch, err := o.pruneBatch(context.WithoutCancel(ctx), p, page, dryRun)
		switch {
		case err == nil:
			failed, page, finished = 0, batch.next, batch.finished
			done.Removed += batch.removed
			done.Announced += batch.announced
			if progress != nil {
				progress(done)
			}
		case failed < prunePatience && pg.IsConflict(err):
			failed++
		default:
			return done, fmt.Errorf("prune: %w", err)
		}
		if !finished {
			_ = sleep.For(ctx, max(prunePause, pruneRest*time.Since(began)))
		}
	}
	return done, nil
}
