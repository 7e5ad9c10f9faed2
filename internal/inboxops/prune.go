package inboxops

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
)

// prunePages is how many pages of processed_events one transaction reads: the default of
// consumer.PruneConfig.
const prunePages = 16

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
	page := int64(0)
	ready := func() error { return cmp.Or(context.Cause(ctx), o.checkClock(context.WithoutCancel(ctx))) }
	err = batch.Paced(ctx, ready, func() (more bool, err error) {
		b, err := o.pruneBatch(context.WithoutCancel(ctx), p, page, dryRun)
		if err != nil {
			return false, err
		}
		page = b.next
		done.Removed += b.removed
		done.Announced += b.announced
		if progress != nil {
			progress(done)
		}
		return !b.finished, nil
	})
	if err != nil {
		return done, fmt.Errorf("prune: %w", err)
	}
	return done, nil
}
