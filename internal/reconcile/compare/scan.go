package compare

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/reconcile"
)

// A class says how an event counts. Of several deliveries the lowest one counts.
type class int8

const (
	compared class = iota // delivered within the window: the receiver must have it
	fresh                 // delivered shortly after: the receiver may have had it before the window's end
	earlier               // delivered before the window
	young                 // delivered after
	pending
	failed
	discarded
)

// A window is what a run compares: what was delivered to the destinations from since to before
// until. Keys delivered in the time fresh after it may be in the receiver's digests.
type window struct {
	destinations []string
	since, until time.Time
	fresh        time.Duration
}

const (
	// pageEvents is how many events one statement of the sender reads.
	pageEvents = 50_000
	// freshTime covers handlers and answers that were under way when the window ended.
	freshTime = 10 * time.Second
	// maxFresh bounds the memory of fresh keys; beyond it ranges are compared key by key.
	maxFresh = 1 << 17
	// maxAnswers bounds the answers of a digest; those of a receiver with two billion rows are a
	// fifth of it.
	maxAnswers = 1 << 16
	// maxTries is for how many sets of fresh keys a range is tried.
	maxTries = 1 << 16
)

// sortBounds makes bounds of a sample of keys: ascending, each once, and as many as a question may
// have.
func sortBounds(keys []string) []string {
	slices.Sort(keys)
	keys = slices.Compact(keys)
	size := 0
	for _, key := range keys {
		size += len(key)
	}
	for size > reconcile.MaxBoundBytes || len(keys) > reconcile.MaxBounds {
		kept := keys[:0]
		size = 0
		for i := 1; i < len(keys); i += 2 {
			kept, size = append(kept, keys[i]), size+len(keys[i])
		}
		keys = kept
	}
	return keys
}

// digest lets both sides digest at once. What counts on the sender's side was delivered before the
// receiver begins to read.
func (c *comparison) digest(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var sides sync.WaitGroup
	for _, side := range []func(context.Context) error{c.digestSender, c.digestReceiver} {
		sides.Go(func() {
			if err := side(ctx); err != nil {
				cancel(err)
			}
		})
	}
	sides.Wait()
	return context.Cause(ctx)
}

func (c *comparison) digestReceiver(ctx context.Context) error {
	q := reconcile.Request{Ask: reconcile.AskDigest, Salt: c.salt, Bounds: c.bounds, Since: c.receiverSince, Until: c.receiverUntil}
	for asked := 1; ; asked++ {
		a, err := c.ask(ctx, q)
		switch {
		case err != nil:
			return err
		case !c.received.Merge(a.Ranges) || a.Next <= q.Page || asked > maxAnswers:
			return fmt.Errorf("the receiver's answer is malformed: it names a range that was not asked for, or does not continue")
		}
		c.doubtful = append(c.doubtful, a.Held...)
		if q.Page = a.Next; a.Next >= a.Pages {
			return nil
		}
	}
}

func (c *comparison) digestSender(ctx context.Context) error {
	for _, from := range tables() {
		for after, n := int64(0), int64(pageEvents); n == pageEvents; {
			end, read, err := c.addPage(ctx, from, after)
			if err != nil {
				return err
			}
			if after, n = end, read; c.Progress != nil {
				c.Progress(c.report.Sent)
			}
		}
	}
	return nil
}

// addPage adds the events of a page, each once.
func (c *comparison) addPage(ctx context.Context, from table, after int64) (end, n int64, err error) {
	var key []byte
	var last int64
	best := class(-1)
	flush := func() {
		if best >= 0 {
			c.add(key, best)
		}
	}
	end, n, err = page(ctx, c.db, from, after, pageEvents, c.window, func(id int64, k []byte, found class) {
		if id == last && best >= 0 {
			best = min(best, found)
			return
		}
		flush()
		last, key, best = id, append(key[:0], k...), found
	})
	if err == nil {
		flush()
	}
	return end, n, err
}

func (c *comparison) add(key []byte, found class) {
	switch found {
	case compared:
		c.sent.Add(key)
		c.report.Sent++
	case fresh:
		if c.report.Young++; c.freshKeys < maxFresh {
			r := c.sent.Range(key)
			c.fresh[r] = append(c.fresh[r], c.sent.Hash(key))
			c.freshKeys++
		}
	case young:
		c.report.Young++
	case earlier:
		c.report.Earlier++
	case pending:
		c.report.Pending++
	case failed:
		c.report.Failed++
	case discarded:
		c.report.Discarded++
	}
}

// A span is a run of ranges: the keys above one, up to another. Empty: no bound.
type span struct{ above, upTo string }

// differing returns the ranges whose digests differ by more than fresh keys, neighbours together.
func (c *comparison) differing() (all []span) {
	joined := false
	for i := range c.sent.Counts {
		if explained(c.received.Counts[i]-c.sent.Counts[i], c.received.Sums[i]-c.sent.Sums[i], c.fresh[i]) {
			joined = false
			continue
		}
		c.report.Differing++
		s := span{}
		if i > 0 {
			s.above = c.bounds[i-1]
		}
		if i < len(c.bounds) {
			s.upTo = c.bounds[i]
		}
		if joined {
			all[len(all)-1].upTo = s.upTo
		} else {
			all = append(all, s)
		}
		joined = true
	}
	return all
}

// explained reports whether n of the hashes have the sum: these keys arrived, and the others did
// not yet. It gives up where that takes too many tries.
func explained(n int64, sum uint64, hashes []uint64) bool {
	all := int64(len(hashes))
	if n < 0 || n > all {
		return false
	}
	if n > all-n { // fewer are missing than there are
		whole := uint64(0)
		for _, h := range hashes {
			whole += h
		}
		n, sum = all-n, whole-sum
	}
	tries := maxTries
	return chosen(int(n), sum, hashes, &tries)
}

func chosen(n int, sum uint64, hashes []uint64, tries *int) bool {
	if *tries--; *tries < 0 {
		return false
	}
	if n == 0 {
		return sum == 0
	}
	for i := 0; i+n <= len(hashes); i++ {
		if chosen(n-1, sum-hashes[i], hashes[i+1:], tries) {
			return true
		}
	}
	return false
}

// has reports whether a key that is above the lower bound is in the span.
func (s span) has(key string) bool { return s.upTo == "" || key <= s.upTo }
