package waiting

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A Keeper marks what waits behind heads, and releases what waits behind a head no longer. Found,
// Tick and Sweep are safe for concurrent use.
type Keeper struct {
	// DB is where its statements run.
	DB pg.DB
	// Lenient returns the destinations where a failed delivery blocks nothing.
	Lenient func() []string
	// Released is called when deliveries stand among what is due again, in front of what claims
	// have read.
	Released func()
	// Failed is called with an error of the database.
	Failed func(operation string, err error)

	wake  chan struct{} // of one
	mu    sync.Mutex
	found map[key]Behind
	sweep bool
	ticks int       // since the last sweep
	any   bool      // the last sweep found heads, or did not come to its end
	swept time.Time // when the last sweep ended
	took  time.Duration
}

// Behind says where the deliveries of an ordering key begin that wait behind a head.
type Behind struct {
	Destination, Key string
	Head             int64          // the event of the head
	First            ordering.Place // the first that was found waiting
}

type key struct{ destination, key string }

const (
	markChunk  = 2000 // deliveries that one statement marks at most behind each head
	headsChunk = 500  // heads that one statement asks about
	idleTicks  = 12   // ticks between two sweeps while nothing waits

	maxFound   = 10_000 // ordering keys that are remembered; claims find the others again
	sweepTimes = 100    // how many times as long as it took a keeper rests after a sweep, before the next one by itself
	askedTimes = 10     // and before one that somebody asks for
)

// NewKeeper returns a keeper without settings.
func NewKeeper() *Keeper {
	return &Keeper{wake: make(chan struct{}, 1), found: map[key]Behind{}}
}

// Found reports deliveries that wait behind a head.
func (k *Keeper) Found(b Behind) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := key{b.Destination, b.Key}
	known, is := k.found[of]
	if is && known.Head == b.Head {
		if known.First.Compare(b.First) < 0 {
			b.First = known.First
		}
	}
	if is || len(k.found) < maxFound {
		k.found[of] = b
	}
	k.signal()
}

// Sweep asks for a look through all heads.
func (k *Keeper) Sweep() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.sweep = true
	k.signal()
}

// Tick asks for a sweep if something waits, or if none was made for a while.
func (k *Keeper) Tick() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ticks++; (k.any || k.ticks >= idleTicks) && k.rest(sweepTimes) <= 0 {
		k.sweep = true
		k.signal()
	}
}

// rest returns how long it is until the last sweep ended so many times as long ago as it took.
func (k *Keeper) rest(times int) time.Duration {
	return time.Until(k.swept.Add(time.Duration(times) * k.took))
}

func (k *Keeper) signal() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// take returns what was found, whether to sweep and, if that has to wait, for how long.
func (k *Keeper) take() (found []Behind, sweep bool, wait time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for of, b := range k.found {
		if len(found) == headsChunk {
			k.signal()
			break
		}
		found = append(found, b)
		delete(k.found, of)
	}
	if !k.sweep {
		return found, false, 0
	}
	if wait = k.rest(askedTimes); wait > 0 {
		return found, false, wait
	}
	k.sweep = false
	return found, true, 0
}

// Run works until ctx is done.
func (k *Keeper) Run(ctx context.Context) {
	var rested <-chan time.Time // of a sweep that has to wait
	for {
		select {
		case <-k.wake:
		case <-rested:
		case <-ctx.Done():
			return
		}
		begun := time.Now()
		found, sweep, wait := k.take()
		if rested = nil; wait > 0 {
			rested = time.After(wait)
		}
		if len(found) > 0 {
			left, err := k.mark(ctx, found)
			if err != nil && ctx.Err() == nil {
				k.Failed("mark waiting deliveries", err) // claims find them again
			}
			for _, b := range left {
				k.Found(b)
			}
		}
		if sweep {
			if err := k.release(ctx); err != nil && ctx.Err() == nil {
				k.Failed("release waiting deliveries", err)
			}
		}
		if sleep.For(ctx, time.Since(begun)/4) != nil { // claims have the database for a part of the time
			return
		}
	}
}

// mark marks a chunk behind each head, and returns what is left to mark.
func (k *Keeper) mark(ctx context.Context, found []Behind) (left []Behind, err error) {
	limit := max(markChunk/len(found), 1)
	left, marked, err := store{k.DB}.mark(ctx, found, limit)
	if marked > 0 {
		k.mu.Lock()
		k.any = true
		k.mu.Unlock()
	}
	return left, err
}

// release looks through all heads, and releases what waits behind those that hold no longer.
func (k *Keeper) release(ctx context.Context) error {
	begun := time.Now()
	found, released, err := k.releaseEnded(ctx)
	k.mu.Lock()
	k.any, k.ticks = found || err != nil, 0
	k.swept, k.took = time.Now(), time.Since(begun)
	k.mu.Unlock()
	if released > 0 {
		k.Released()
		// Relays that serve other destinations have read past what they have to claim now.
		err = errors.Join(err, pg.Exec(ctx, k.DB, "request sweep", pg.RequestSweep))
	}
	return err
}

// releaseEnded goes through the heads, and reports whether there are any, and how many deliveries
// it has released.
func (k *Keeper) releaseEnded(ctx context.Context) (found bool, released int64, err error) {
	s, after := store{k.DB}, waitingKey{}
	for {
		list, err := s.heads(ctx, after, headsChunk, k.Lenient())
		if err != nil || len(list) == 0 {
			return found, released, err
		}
		found, after = true, list[len(list)-1]
		var ended []waitingKey
		for _, h := range list {
			if h.ended {
				ended = append(ended, h)
			}
		}
		if len(ended) > 0 {
			n, err := s.release(ctx, ended)
			if released += n; err != nil {
				return found, released, err
			}
		}
		if len(list) < headsChunk {
			return found, released, nil
		}
	}
}
