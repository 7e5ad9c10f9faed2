package inbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// bulkFlags choose the events to change.
type bulkFlags struct {
	IDs []string `arg:"" optional:"" name:"inbox-id" help:"Inbox ids; - reads them from standard input, one a line."`
	filterFlags
	Limit *int64 `placeholder:"N" help:"At most so many events, those with the lowest ids: 1 to 100000."`
	bulk.Flags
}

type replayCommand struct {
	bulkFlags
	Status []string `enum:"pending,failed,ignored,succeeded" placeholder:"STATUS" help:"failed, ignored, pending or succeeded; several with commas. Default: failed and ignored."`
}

func (replayCommand) Help() string {
	return `Makes events pending and due at once, as if they had never been tried. An event of an ordering key takes its place in its
order: before younger ones, unless one of them is being worked. One whose payload was removed is left alone.

--status succeeded runs handlers once more, on top of the effect that is there already: only for handlers that you know to be
harmless when repeated.

  outbox-relay inbox replay 17 18                              # these, if they failed or were ignored
  outbox-relay inbox replay --receiver shipping --status failed
  outbox-relay inbox replay --type 'invoice.*' --since 2h --dry-run
  outbox-relay inbox replay --key invoice-4711 --status succeeded

It works in batches of 1000, each a transaction; Ctrl-C ends it between two. The same command again continues.`
}

func (cmd replayCommand) Run(inv *cli.Invocation) error {
	return operation{
		verb: "replay", done: "replayed", bulkFlags: cmd.bulkFlags, states: cmd.Status,
		found: (*inboxops.Ops).PreviewReplay, change: (*inboxops.Ops).Replay,
	}.run(inv)
}

type ignoreCommand struct {
	bulkFlags
	Status []string `enum:"pending,failed" placeholder:"STATUS" help:"pending or failed. Default: both."`
}

func (ignoreCommand) Help() string {
	return `Marks events as of no concern to the receiver: failed or pending ones, never those that are being worked. What waits behind
them in their ordering keys continues. replay --status ignored brings them back, until they are pruned.

  outbox-relay inbox ignore 17
  outbox-relay inbox ignore --ordering-key invoice-4711 --status failed     # what blocks this key
  outbox-relay inbox ignore --type 'test.*' --dry-run

It works in batches of 1000, each a transaction; Ctrl-C ends it between two. The same command again continues.`
}

func (cmd ignoreCommand) Run(inv *cli.Invocation) error {
	return operation{
		verb: "ignore", done: "ignored", bulkFlags: cmd.bulkFlags, states: cmd.Status,
		found: (*inboxops.Ops).PreviewIgnore, change: (*inboxops.Ops).Ignore,
	}.run(inv)
}

// An operation changes the events of an inbox.
type operation struct {
	verb, done string // "replay", "replayed"
	bulkFlags
	states []string
	found  func(*inboxops.Ops, context.Context, inboxops.Selection) (inboxops.Bulk, error)
	change func(*inboxops.Ops, context.Context, inboxops.Selection, func(inboxops.Bulk)) (inboxops.Bulk, error)

	ops *inboxops.Ops
	s   inboxops.Selection
}

func (b operation) selected(inv *cli.Invocation) (inboxops.Selection, error) {
	s, err := b.selection(slices.Compact(slices.Sorted(slices.Values(b.states))))
	if err != nil {
		return s, err
	}
	if b.Limit != nil {
		if s.Limit = *b.Limit; s.Limit < 1 || s.Limit > inboxops.MaxLimit {
			return s, cli.Usagef("--limit: %d is out of range; write 1 to %d", s.Limit, inboxops.MaxLimit)
		}
	}
	s.IDs, err = b.ReadIDs(b.IDs, inv.Stdin, s.Empty() && b.Since == "" && b.Until == "",
		"nothing says which events are meant; name inbox ids, or narrow it with --status, --type, --key, --ordering-key, --reference, --from, --to, --since or --until")
	return s, err
}

func (b operation) run(inv *cli.Invocation) (err error) {
	if b.s, err = b.selected(inv); err != nil {
		return err
	}
	return ask(inv, supportRole, func(ctx context.Context, c *config.Config, ops *inboxops.Ops) error {
		b.ops = ops
		if b.s.Since, b.s.Until, err = b.times().Bounds(ctx, ops); err != nil {
			return err
		}
		return bulk.Operation[inboxops.Bulk]{
			Flags: b.Flags, Action: "inbox " + b.verb, Verb: b.verb, Done: b.done, One: "event", Many: "events",
			Selection: b.describe(b.s), Work: b,
		}.Run(ctx, inv, c)
	})
}

func (b operation) Preview(ctx context.Context) (inboxops.Bulk, error) {
	return b.found(b.ops, ctx, b.s)
}

func (b operation) Act(ctx context.Context, found inboxops.Bulk, progress func(inboxops.Bulk)) (inboxops.Bulk, error) {
	b.s.ToID = found.LatestID // the operator confirmed no event that was recorded since
	return b.change(b.ops, ctx, b.s, progress)
}

func (operation) Refuse(inboxops.Bulk) error { return nil }

func (operation) Counts(b *inboxops.Bulk) *batch.Counts { return &b.Counts }

func (operation) Merge(found *inboxops.Bulk, result inboxops.Bulk) { found.KeysLeft = result.KeysLeft }

// BulkReport is what --json prints.
type BulkReport struct {
	bulk.Outcome
	inboxops.Bulk
}

func (operation) Report(r bulk.Outcome, found inboxops.Bulk) any {
	return BulkReport{r, found}
}

func (operation) Sample(found inboxops.Bulk) (remark string, rows [][]any) {
	var states []string
	for _, state := range slices.Sorted(maps.Keys(found.States)) {
		states = append(states, fmt.Sprintf("%d %s", found.States[state], state))
	}
	for _, s := range found.Sample {
		rows = append(rows, []any{fmt.Sprintf("  %d", s.InboxID), s.Receiver, s.Source, s.EventType, s.IdempotencyKey, s.State})
	}
	return " (" + strings.Join(states, ", ") + ")", rows
}

func (b operation) LeftOut(found inboxops.Bulk) (lines []string) {
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if found.KeysLeft > 0 {
		add("%s busy: workers continue with them within half a minute.", plain.Plural(found.KeysLeft, "ordering key was", "ordering keys were"))
	}
	if found.NoPayload > 0 {
		add("Left alone: %d whose payload was removed.", found.NoPayload)
	}
	for _, state := range slices.Sorted(maps.Keys(found.OtherState)) {
		n := found.OtherState[state]
		switch {
		case state == inboxops.Processing:
			add("Left alone: %d processing, which a worker has now.", n)
		case b.verb == "replay":
			add("Left alone: %d %s; to replay these too: --status %[2]s.", n, state)
		default:
			add("Left alone: %d %s.", n, state)
		}
	}
	if found.Unknown > 0 {
		lines = append(lines, bulk.NotFound(plain.Plural(found.Unknown, "inbox id", "inbox ids"), found.UnknownIDs, found.Unknown))
	}
	return lines
}
