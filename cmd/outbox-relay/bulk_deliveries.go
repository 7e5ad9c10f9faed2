package main

import (
	"context"
	"fmt"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// A deliveryBulk changes the deliveries of a selection.
type deliveryBulk struct {
	verb, done string // "replay", "replayed"
	selectionFlags
	statuses []string
	parked   bool
	found    func(*ops.Outbox, context.Context, ops.Selection) (ops.Bulk, error)
	change   func(*ops.Outbox, context.Context, ops.Selection, func(ops.Bulk)) (ops.Bulk, error)
	tooOld   func(n int64) error // refuses deliveries of events that receivers have forgotten

	outbox *ops.Outbox
	s      ops.Selection
}

func (d deliveryBulk) run(inv *invocation, c *config) (err error) {
	if d.s, err = d.selection(inv, d.statuses, d.parked); err != nil {
		return err
	}
	return inv.askWith(c, func(ctx context.Context, outbox *ops.Outbox) error {
		d.outbox = outbox
		if d.s.Since, d.s.Until, err = d.bounds(ctx, outbox); err != nil {
			return err
		}
		return bulk[ops.Bulk]{
			bulkFlags: d.bulkFlags, action: d.verb, verb: d.verb, done: d.done, one: "delivery", many: "deliveries",
			selection: d.describe(d.s), work: d,
		}.run(ctx, inv, c)
	})
}

func (d deliveryBulk) preview(ctx context.Context) (ops.Bulk, error) {
	found, err := d.found(d.outbox, ctx, d.s)
	if err == nil && found.Matched == 0 {
		err = refuseUnknown(ctx, d.outbox, d.Destination, d.Reason, d.Type)
	}
	return found, err
}

func (d deliveryBulk) act(ctx context.Context, _ ops.Bulk, progress func(ops.Bulk)) (ops.Bulk, error) {
	return d.change(d.outbox, ctx, d.s, progress)
}

func (d deliveryBulk) refuse(found ops.Bulk) error {
	if found.TooOld > 0 {
		return d.tooOld(found.TooOld)
	}
	return nil
}

func (deliveryBulk) total(b *ops.Bulk) bulkTotal {
	return bulkTotal{&b.Matched, &b.Done, &b.Missed, &b.More}
}

func (deliveryBulk) merge(found *ops.Bulk, result ops.Bulk) {
	found.InFlight = max(found.InFlight, result.InFlight)
}

// bulkReport is what --json prints.
type bulkReport struct {
	bulkOutcome
	ops.Bulk
}

func (deliveryBulk) report(r bulkOutcome, found ops.Bulk) any {
	return bulkReport{r, found}
}

func (deliveryBulk) sample(found ops.Bulk) (remark string, rows [][]any) {
	for _, s := range found.Sample {
		var created any = ""
		if s.CreatedAt != nil {
			created = *s.CreatedAt
		}
		rows = append(rows, []any{fmt.Sprintf("  %d", s.EventID), s.EventType, s.IdempotencyKey, orParked(s.Destination), s.Status, created})
	}
	return "", rows
}

func (d deliveryBulk) leftOut(found ops.Bulk) (lines []string) {
	add := func(n int64, format string, args ...any) {
		if n > 0 {
			lines = append(lines, fmt.Sprintf("Left alone: %d "+format, append([]any{n}, args...)...))
		}
	}
	add(found.InFlight, "in flight, which a relay is sending now; repeat the command later.")
	add(found.NotWaiting, "due already, or never attempted.")
	add(found.TooOld, "older than receivers remember (--force).")
	add(found.EventMissing, "whose event is gone.")
	for _, status := range []string{"pending", "failed", "delivered", "discarded"} {
		n := found.OtherStatus[status]
		switch {
		case d.verb == "replay" && status == "pending":
			add(n, "pending, which will be sent anyway.")
		case d.verb == "retry" && status == "failed":
			add(n, "failed for good; to send it again: outbox-relay replay.")
		case d.verb == "replay":
			add(n, "%s; to replay these too: --status %[2]s.", status)
		default:
			add(n, "%s.", status)
		}
	}
	if found.Unknown > 0 {
		lines = append(lines, notFound(plain.Plural(found.Unknown, "event has", "events have")+" no delivery here", found.UnknownIDs, found.Unknown))
	}
	for _, obstacle := range found.Obstacles {
		lines = append(lines, capital(obstacle)+".")
	}
	return lines
}

func orParked(destination string) string {
	if destination == "" {
		return "(parked)"
	}
	return destination
}
