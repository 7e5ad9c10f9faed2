package settle

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// The relay's statements do not wait for the disk, so a crash of the server undoes the last of
// them: by default those of 3 × wal_writer_delay, 0.6 s. A delivery whose settle is lost stays
// claimed, and holds up its ordering key, until the lease ends. So the settlements of the last
// seconds are kept, and written again when the session comes back.
const (
	// recentFor is how long before a sign of life of the session a settle must have been written to
	// be on the disk by then.
	recentFor = 3 * time.Second
	// recentMost bounds how many settlements are kept: about 5 MiB. The oldest go first.
	recentMost = 10_000
)

// recent are those that the server has acknowledged and may still lose. They are safe for
// concurrent use.
type recent struct {
	mu      sync.Mutex
	batches []recentBatch
	size    int
}

type recentBatch struct {
	written     time.Time
	settlements []Settlement
	rows        []*InHand // that were written with them
}

// add remembers what the server has just acknowledged.
func (r *recent) add(now time.Time, settlements []Settlement, rows []*InHand) {
	if len(settlements)+len(rows) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, recentBatch{now, settlements, rows})
	r.size += len(settlements) + len(rows)
	for r.size > recentMost && len(r.batches) > 1 {
		r.drop()
	}
}

func (r *recent) drop() {
	r.size -= len(r.batches[0].settlements) + len(r.batches[0].rows)
	r.batches[0] = recentBatch{}
	r.batches = r.batches[1:]
}

func (r *recent) all() []recentBatch {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.batches)
}

// ForgetDurable forgets the settlements that are on the disk because the server has answered a
// request that began at the given time.
func (w *Settler) ForgetDurable(at time.Time) {
	r := &w.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.batches) > 0 && at.Sub(r.batches[0].written) > recentFor {
		r.drop()
	}
}

// WriteAgain writes the settlements of the last seconds once more, over a connection of the
// session, before anything is claimed: the server may have been restarted, or replaced. What it did
// not lose stays as it is, since each settle is fenced and has happened. They stay remembered,
// because the next crash may come at once. What needs a lock that a stranger keeps is left out:
// nothing else of the relay works meanwhile.
func (w *Settler) WriteAgain(ctx context.Context, on pg.Pool, relayID int32) error {
	restored := 0
	for _, recent := range w.recent.all() {
		n, err := w.writeBatchAgain(ctx, store{pool: on, boundsLocks: true}, relayID, batch{settlements: recent.settlements, rows: recent.rows, apart: true})
		if err != nil {
			return fmt.Errorf("write the last outcomes again: %w", err)
		}
		restored += n
	}
	if restored > 0 {
		w.Log.Warn().Int("deliveries", restored).Msg("wrote outcomes again that the database server had lost in a crash")
	}
	return nil
}

// writeBatchAgain writes one batch again, in parts if the database refuses it, or another session
// has locked what it needs. What is left then waits for its lease, or for the end of its range.
func (w *Settler) writeBatchAgain(ctx context.Context, over store, relayID int32, b batch) (restored int, err error) {
	for range 2 { // the first try restores lost claims (see RestoreLostClaims), the second settles them
		missed, stale, err := over.settle(ctx, relayID, &b)
		if pg.ClassifyError(err) != pg.ErrorPassing {
			w.Failed("settle", err)
			for _, part := range b.partsAgain(pg.HasCode(err, pg.LockNotAvailable)) {
				n, err := w.writeBatchAgain(ctx, over, relayID, part)
				if err != nil {
					return restored, err
				}
				restored += n
			}
			return restored, nil
		}
		if err != nil {
			return restored, err
		}
		restored += len(b.settlements) - stale - len(missed)
		if len(missed) == 0 {
			break
		}
		b.settlements = copies(missed)
	}
	return restored, nil
}

// partsAgain returns the smaller batches to write again in place of one that was refused: all that
// has no row, since one row of it is the witness of the others, and each other settlement alone. If
// a lock was in the way, these stay together: they leave locked rows out.
func (b *batch) partsAgain(locked bool) (parts []batch) {
	whole, others := batch{rows: b.rows, apart: true}, batch{apart: true}
	for i := range b.settlements {
		switch one := b.settlements[i : i+1]; {
		case one[0].rowless:
			whole.settlements = append(whole.settlements, one...)
		case locked:
			others.settlements = append(others.settlements, one...)
		default:
			parts = append(parts, batch{settlements: one, apart: true})
		}
	}
	for _, part := range []batch{whole, others} {
		if len(part.settlements)+len(part.rows) > 0 {
			parts = append(parts, part)
		}
	}
	if len(parts) == 1 { // this batch
		return nil
	}
	return parts
}
