package events

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// A operation changes the deliveries of a selection.
type operation struct {
	verb, done string // "replay", "replayed"
	selectionFlags
	headOfKey bool // the id is that of the head, and not an argument
	statuses  []string
	parked    bool
	rate      *int64              // of a replay
	memory    time.Duration       // of a replay, see [ops.Outbox.Replay]
	tooOld    func(n int64) error // refuses deliveries of events that receivers have forgotten

	outbox *ops.Outbox
	s      ops.Selection
	order  ops.Order // as it was previewed
}

func (d operation) run(inv *cli.Invocation, c *config.Config) (err error) {
	if d.s, err = d.selection(inv, d.statuses, d.parked); err != nil {
		return err
	}
	d.s.Rate = d.rate
	return c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		d.outbox = outbox
		named, err := d.named(ctx, outbox)
		if err != nil {
			return err
		}
		if !d.headOfKey {
			if err := noteOtherKeys(ctx, inv, outbox, d.IDs); err != nil {
				return err
			}
		}
		if d.s.EventIDs = append(d.s.EventIDs, named...); len(named) > 0 {
			slices.Sort(d.s.EventIDs) // an event may be named twice
			d.s.EventIDs = slices.Compact(d.s.EventIDs)
		}
		if d.s.Since, d.s.Until, err = d.Bounds(ctx, outbox); err != nil {
			return err
		}
		return bulk.Operation[ops.Bulk]{
			Flags: d.Flags, Action: d.verb, Verb: d.verb, Done: d.done, One: "delivery", Many: "deliveries",
			Selection: d.describe(d.s), Work: &d,
		}.Run(ctx, inv, c)
	})
}

func (d *operation) Preview(ctx context.Context) (found ops.Bulk, err error) {
	d.order, found, err = d.outbox.Preview(ctx, ops.Order{Action: d.verb, Selection: d.s, Memory: d.memory})
	if err == nil && found.Matched == 0 {
		err = refuseUnknown(ctx, d.outbox, d.Destination, d.Reason, d.Type)
	}
	return found, err
}

func (d *operation) Act(ctx context.Context, _ ops.Bulk, progress func(ops.Bulk)) (ops.Bulk, error) {
	return d.outbox.Do(ctx, d.order, progress)
}

func (d *operation) Refuse(found ops.Bulk) error {
	if found.TooOld > 0 {
		return d.tooOld(found.TooOld)
	}
	return nil
}

func (*operation) Counts(b *ops.Bulk) *batch.Counts { return &b.Counts }

func (*operation) Merge(found *ops.Bulk, result ops.Bulk) {
	found.InFlight = max(found.InFlight, result.InFlight)
}

// BulkReport is what --json prints.
type BulkReport struct {
	bulk.Outcome
	ops.Bulk
}

func (*operation) Report(r bulk.Outcome, found ops.Bulk) any {
	return BulkReport{r, found}
}

func (*operation) Sample(found ops.Bulk) (remark string, rows [][]any) {
	for _, s := range found.Sample {
		var created any = ""
		if s.CreatedAt != nil {
			created = *s.CreatedAt
		}
		rows = append(rows, []any{fmt.Sprintf("  %d", s.EventID), s.EventType, s.IdempotencyKey, orParked(s.Destination), s.Status, created})
	}
	if spread := found.Spread(); spread != "" {
		remark = ", " + spread
	}
	return remark, rows
}

func (d *operation) LeftOut(found ops.Bulk) (lines []string) {
	add := func(n int64, format string, args ...any) {
		if n > 0 {
			lines = append(lines, fmt.Sprintf("Left alone: %d "+format, append([]any{n}, args...)...))
		}
	}
	add(found.InFlight, "in flight, which a relay is sending now; repeat the command later.")
	add(found.NotWaiting, "due already, or not to be sent before the time that their producer set.")
	add(found.TooOld, "older than receivers remember (--force).")
	add(found.EventMissing, "whose event is gone.")
	add(found.BreaksRule, "whose event breaks a rule (explain names it): insert a corrected event under a new key.")
	for _, status := range []string{"pending", "failed", "delivered", "discarded"} {
		n := found.OtherStatus[status]
		switch {
		case d.verb == "replay" && status == "pending":
			add(n, "pending already.")
		case d.verb == "retry" && status == "failed":
			add(n, "failed for good; to send it again: outbox-relay replay.")
		case d.verb == "replay":
			add(n, "%s; to replay these too: --status %[2]s.", status)
		default:
			add(n, "%s.", status)
		}
	}
	if n := found.NotRouted; n > 0 {
		lines = append(lines, fmt.Sprintf("Left alone: %s not routed yet: no relay has taken them, or one is sending them now; repeat the command later.",
			plain.Plural(n, "event", "events")))
	}
	if found.Unknown > 0 {
		lines = append(lines, bulk.NotFound(plain.Plural(found.Unknown, "event has", "events have")+" no delivery here", found.UnknownIDs, found.Unknown))
	}
	for _, obstacle := range found.Obstacles {
		lines = append(lines, obstacle+".")
	}
	return lines
}

func orParked(destination string) string {
	if destination == "" {
		return "(parked)"
	}
	return destination
}
