package settle

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A batch is written when it reaches its age or its size, whichever comes first.
const (
	ageAwaited = 5 * time.Millisecond  // the age with a settlement that something waits for; see isAwaited
	ageOther   = 20 * time.Millisecond // the age without one, while settlements come at least as often
	batchSize  = 1000
)

// A Settler writes what became of the deliveries of one relay. Settle, Track, WriteAgain and
// ForgetDurable are safe for concurrent use while Run runs. Run calls the functions, which must
// return at once.
type Settler struct {
	// DB is where statements run.
	DB pg.Pool
	// Log says what could not be written.
	Log zerolog.Logger
	// RelayID returns the number under which this relay is registered.
	RelayID func() int32
	// NeedsRoom reports whether the lane of a destination holds so much that claims wait until
	// something of it is settled.
	NeedsRoom func(destination string) bool
	// ForOthers reports whether other relays deliver to a destination what this one gives back, and
	// are to be told. It is asked for each settlement that is given back, and may remember that.
	ForOthers func(destination string) bool
	// Written is called with the outcomes of each batch that the database has taken, also with
	// those that came too late. The settler keeps the slice: it must not be changed.
	Written func([]Settlement)
	// Dropped is called with an outcome that the database refused until its lease ended. The
	// delivery has a row, and is claimed again.
	Dropped func(*Settlement)
	// RangeEnded is called when each delivery of a range has a row, or the range is another
	// relay's.
	RangeEnded func(intake.RangeRef)
	// Failed is called with an error of the database.
	Failed func(operation string, err error)
	// Ran is called after each batch that the database has taken, with its size and how long that
	// took; nil: nothing is called.
	Ran func(settlements int, took time.Duration)
	// Stale is called with the number of settlements that came too late; nil: nothing is called.
	Stale func(settlements int)

	settlements chan Settlement
	taken       chan *TakenRange
	recent      recent

	// Run owns these.
	ranges      []*TakenRange // that are open, in the order of their takes
	aside       []Settlement  // could not be written, and are tried again
	collected   int           // size of the last batch, and so about that of the next
	collectedAt time.Time     // when the last batch was complete
}

// New returns a settler without settings.
func New() *Settler {
	return &Settler{settlements: make(chan Settlement, batchSize), taken: make(chan *TakenRange, 64)}
}

// Settle passes a settlement on to Run, and waits while Run has many of them.
func (w *Settler) Settle(s Settlement) { w.settlements <- s }

// Close ends Run once it has written what was passed on. Nothing may be passed on afterwards.
func (w *Settler) Close() { close(w.settlements) }

// Run writes settlements until Close is called and all are written. It also tries those set aside
// until they are written: after Close it waits for locked rows, but not for rows that the database
// refuses. When ctx is done Run gives up: what it has not written by then it drops, and the
// deliveries are claimed again when their leases end.
func (w *Settler) Run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for source := w.settlements; source != nil || w.waitsForLocks() && ctx.Err() == nil; {
		var due, old <-chan time.Time
		var end <-chan struct{}
		if len(w.ranges) > 0 && source != nil {
			old = time.After(time.Until(w.nextRows()))
		}
		if len(w.aside) > 0 {
			due = time.After(time.Until(w.nextTry()))
			if source == nil {
				end = ctx.Done()
			}
		}
		select {
		case first, open := <-source:
			if !open {
				source = nil
				continue
			}
			w.setAside(w.write(ctx, batch{settlements: w.collect(first, timer)}))
		case r := <-w.taken:
			w.addRange(r)
		case <-old:
			w.endOldRanges(ctx, time.Now())
		case <-due:
			w.tryAside(ctx, time.Now())
		case <-end:
		}
	}
	w.logAbandoned(len(w.aside))
}

// collect returns a batch of first and the settlements after it, once the batch is old or large
// enough.
func (w *Settler) collect(first Settlement, timer *time.Timer) []Settlement {
	collected := append(make([]Settlement, 0, min(max(w.collected, len(w.settlements))*5/4+1, batchSize)), first)
	defer func() { w.collected, w.collectedAt = len(collected), time.Now() }()
	begun := time.Now()
	soon := w.isAwaited(&first) || begun.Sub(w.collectedAt) > ageOther // settlements are rare: waiting would bring no other
	timer.Reset(ageOther)
	if soon {
		timer.Reset(ageAwaited)
	}
	for len(collected) < batchSize {
		select {
		case s, open := <-w.settlements:
			if !open {
				return collected
			}
			collected = append(collected, s)
			if !soon && w.isAwaited(&s) {
				soon = true
				timer.Reset(min(ageAwaited, ageOther-time.Since(begun)))
			}
		case r := <-w.taken: // here too, or the claimer would wait for the end of a batch
			w.addRange(r)
		case <-timer.C:
			return collected
		}
	}
	return collected
}

// isAwaited reports whether something waits until a settlement is written: the next delivery of an
// ordering key, a retry, an operator, or a lane that needs the room.
func (w *Settler) isAwaited(s *Settlement) bool {
	return !s.Spilled && (s.Outcome != policy.Delivered || s.OrderingKey != nil || w.NeedsRoom(s.Destination))
}

// write writes a batch, and returns the settlements that it could not write. It tries a failed
// batch in parts, so that one row cannot keep the others from being written.
func (w *Settler) write(ctx context.Context, b batch) (left []Settlement) {
	w.resolveRanges(&b)
	missed, err := w.try(ctx, &b)
	if err == nil {
		return missed
	}
	parts := b.parts(err)
	for i := range parts {
		left = append(left, w.write(ctx, parts[i])...)
	}
	if len(parts) == 0 {
		if len(b.settlements) == 0 {
			w.Failed("make rows of a range", err)
		}
		left = b.settlements
		for i := range left {
			left[i].noteFailure(err)
		}
	}
	return left
}

// damagedTries is how often a batch is tried that meets damaged data, since some such errors pass.
const damagedTries = 3

// try writes a batch, and repeats it while waiting can help: for ever, when the database is away.
// It returns the settlements of rows that are locked or have just been changed.
func (w *Settler) try(ctx context.Context, b *batch) (missed []Settlement, err error) {
	pauses := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMaxInterval(time.Second), // ordering keys must not stand still when the database is back
		backoff.WithMaxElapsedTime(0),
	)
	repeated, damaged := false, 0
	for ; ; repeated = true {
		if ctx.Err() != nil {
			w.logAbandoned(len(b.settlements))
			return nil, nil
		}
		begun := time.Now()
		left, stale, err := store{pool: w.DB}.settle(ctx, w.RelayID(), b)
		if err == nil {
			w.rangesWritten(b)
			if len(b.missing) > 0 { // the server has crashed, and the session does not know it yet
				w.restore(ctx)
			}
			if w.Ran != nil {
				w.Ran(len(b.settlements), time.Since(begun))
			}
			if repeated {
				stale = 0 // unknown: when only the acknowledgement was lost, this very batch was written before
			}
			w.written(ctx, b.without(left), b.rows, stale)
			missed = copies(left)
			for i := range missed {
				missed[i].noteFailure(nil)
			}
			return missed, nil
		}
		// A first try that meets a locked row is no failure: another relay's claim may hold it for
		// a moment longer. What stays locked is reported when it is set aside.
		if b.apart || !pg.HasCode(err, pg.LockNotAvailable) {
			w.Failed("settle", err)
		}
		switch pg.ClassifyError(err) {
		case pg.ErrorRefused:
			return nil, err
		case pg.ErrorDamaged:
			if damaged++; b.apart || damaged == damagedTries {
				return nil, err
			}
		}
		_ = sleep.For(ctx, pauses.NextBackOff())
	}
}

// restore is [Settler.WriteAgain] until it succeeds, or cannot.
func (w *Settler) restore(ctx context.Context) {
	for ctx.Err() == nil {
		err := w.WriteAgain(ctx, w.DB, w.RelayID())
		if err == nil {
			return
		}
		w.Failed("settle", err)
		if pg.ClassifyError(err) != pg.ErrorPassing {
			return // what it has not written gets rows without an outcome, and is sent again
		}
		_ = sleep.For(ctx, time.Second)
	}
}

func (w *Settler) logAbandoned(deliveries int) {
	if deliveries == 0 {
		return
	}
	w.Log.Warn().Int("deliveries", deliveries).Msg("stopping without having settled; the deliveries will be attempted again")
}

// written reports outcomes that were written, and remembers what a crash of the server could undo.
func (w *Settler) written(ctx context.Context, settlements []Settlement, rows []*InHand, stale int) {
	if stale > 0 {
		w.Log.Warn().Int("deliveries", stale).Msg("settled too late: another relay had claimed the deliveries meanwhile")
		if w.Stale != nil {
			w.Stale(stale)
		}
	}
	durable, left := false, false
	for i := range settlements {
		s := &settlements[i]
		durable = durable || s.Outcome == policy.Fail
		left = left || s.Outcome == policy.Hold && s.Destination != "" && w.ForOthers(s.Destination)
	}
	if left {
		store{pool: w.DB}.requestSweep(ctx)
	}
	w.Written(settlements)
	if !durable {
		w.recent.add(time.Now(), settlements, rows)
	}
}
