package compare

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
)

// Options say what to compare.
type Options struct {
	// Destinations of the sender that lead to the receiver. Required.
	Destinations []string
	// Ask puts a question to the receiver. Required. It is called from one goroutine at a time.
	Ask func(ctx context.Context, q reconcile.Request) (reconcile.Answer, error)
	// Settle is how long ago an event was delivered, or received, before it is compared. 0: at
	// once.
	Settle time.Duration
	// Since is from when on deliveries are compared, by the sender's clock. Zero: from when on both
	// sides keep everything.
	Since time.Time
	// Keeps is after which time the sender may drop events. 0: never.
	Keeps time.Duration
	// Limit bounds each list of findings: 1 to [reconcile.MaxKeys].
	Limit int
	// Progress is called, from one goroutine, with how many deliveries were read. nil: nothing is.
	Progress func(sent int64)
}

// maxSkew is by how much the clocks of both databases may differ. What is beyond it is no drift,
// and the times of the events cannot be trusted either.
const maxSkew = time.Hour

// A comparison is one run.
type comparison struct {
	Options
	window
	db     pg.Pool
	report Report

	receiverSince, receiverUntil time.Time // the window, by the receiver's clock
	remembersSince               time.Time // by the sender's clock; zero: nothing was forgotten
	skew                         time.Duration
	oldestID                     int64 // of what the sender keeps; 0: it has nothing

	salt           []byte
	bounds         []string
	sent, received *reconcile.Digest
	fresh          [][]uint64 // by range, hashes of fresh keys
	freshKeys      int
	doubtful       []reconcile.Held
}

// Run compares the outbox that db leads to with a receiver. It changes nothing, and holds no
// snapshot for longer than a page of events takes. Its memory does not grow with the number of
// events.
func Run(ctx context.Context, db pg.Pool, o Options) (Report, error) {
	c := &comparison{Options: o, db: db}
	c.report = Report{Destinations: o.Destinations, Complete: true, NeverArrived: []Finding{}, NoEffect: []Finding{}, Strangers: []Finding{}, Doubled: []Finding{}, Missing: []Finding{}}
	for _, step := range []func(context.Context) error{c.open, c.digest, c.name, c.nameUnfinished, c.nameDoubled, c.nameMissing} {
		if err := step(ctx); err != nil {
			return Report{}, fmt.Errorf("reconcile: %w", err)
		}
	}
	return c.report, nil
}

// open sets the window and the ranges.
func (c *comparison) open(ctx context.Context) error {
	now, id, oldest, err := start(ctx, c.db)
	if err != nil {
		return err
	}
	there, err := c.ask(ctx, reconcile.Request{Ask: reconcile.AskDescribe})
	if err != nil {
		return err
	}
	later, _, _, err := start(ctx, c.db)
	if err != nil {
		return err
	}
	doubt := later.Sub(now) / 2
	if c.skew = there.Now.Sub(now.Add(doubt)); c.skew.Abs() > maxSkew+doubt {
		return fmt.Errorf("the clock of the receiver's database says %s, and that of the outbox %s: correct the wrong one; they may differ by %v",
			there.Now.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339), maxSkew)
	}
	c.destinations, c.until, c.receiverUntil = c.Destinations, now.Add(-c.Settle), there.Now.Add(-c.Settle)
	c.window.fresh = freshTime + later.Sub(now)
	r := &c.report
	r.Receiver, r.Source, r.CountsEffects, r.Until = there.Receiver, there.Source, there.CountsEffects, c.until

	bound := func(at time.Time, reason string) {
		if at.After(c.since) {
			c.since, r.Since, r.SinceReason = at, &at, reason
		}
	}
	if c.oldestID = id; oldest != nil {
		keeps := *oldest
		if floor := now.Add(-c.Keeps); c.Keeps > 0 && floor.After(keeps) {
			keeps = floor
		}
		r.SenderKeepsSince = &keeps
		bound(keeps, "sender")
	}
	if !there.RemembersSince.IsZero() {
		c.remembersSince = there.RemembersSince.Add(-c.skew)
		r.ReceiverKeepsSince = &c.remembersSince
		bound(c.remembersSince, "receiver")
	}
	bound(c.Since, "since")
	if !c.since.IsZero() {
		c.receiverSince = c.since.Add(c.skew - doubt) // rather too early: nothing of the sender's window may be missing
	}

	keys, err := sample(ctx, c.db, reconcile.MaxBounds)
	if err != nil {
		return err
	}
	c.bounds, c.salt = sortBounds(keys), reconcile.NewSalt()
	r.Ranges = len(c.bounds) + 1
	c.sent, c.received, c.fresh = reconcile.NewDigest(c.salt, c.bounds), reconcile.NewDigest(c.salt, c.bounds), make([][]uint64, r.Ranges)
	return nil
}

// ask puts a question to the receiver.
func (c *comparison) ask(ctx context.Context, q reconcile.Request) (reconcile.Answer, error) {
	a, err := c.Ask(ctx, q)
	if err != nil {
		return a, fmt.Errorf("ask the receiver to %s: %w", q.Ask, err)
	}
	return a, nil
}
