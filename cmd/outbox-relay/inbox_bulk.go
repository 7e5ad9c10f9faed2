package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// inboxBulkFlags choose the events to change.
type inboxBulkFlags struct {
	IDs []string `arg:"" optional:"" name:"inbox-id" help:"Inbox ids; - reads them from standard input, one a line."`
	inboxFilterFlags
	Limit  *int64 `placeholder:"N" help:"At most so many events, those with the lowest ids: 1 to 100000."`
	DryRun bool   `help:"Only show how many there are, and the first of them."`
	Yes    bool   `short:"y" help:"Do not ask."`
	JSON   bool   `help:"Print JSON: what was found and done. Fields are added, never renamed or removed."`
}

type inboxReplayCmd struct {
	inboxBulkFlags
	State []string `enum:"pending,failed,ignored,succeeded" placeholder:"STATE" help:"failed, ignored, pending or succeeded; several with commas. Default: failed and ignored."`
}

func (inboxReplayCmd) Help() string {
	return `Makes events pending and due at once, as if they had never been tried. An event of an ordering key takes its place in its
order: before younger ones, unless one of them is being worked. One whose payload was removed is left alone.

--state succeeded runs handlers once more, on top of the effect that is there already: only for handlers that you know to be
harmless when repeated.

  outbox-relay inbox replay 17 18                              # these, if they failed or were ignored
  outbox-relay inbox replay --receiver shipping --state failed
  outbox-relay inbox replay --type 'invoice.*' --since 2h --dry-run
  outbox-relay inbox replay --key invoice-4711 --state succeeded

It works in batches of 1000, each a transaction; Ctrl-C ends it between two. The same command again goes on.`
}

func (cmd inboxReplayCmd) Run(inv *invocation) error {
	return inboxBulkCommand{
		verb: "replay", done: "replayed", inboxBulkFlags: cmd.inboxBulkFlags, states: cmd.State,
		preview: (*inboxops.Ops).PreviewReplay, act: (*inboxops.Ops).Replay,
	}.run(inv)
}

type inboxIgnoreCmd struct {
	inboxBulkFlags
	State []string `enum:"pending,failed" placeholder:"STATE" help:"pending or failed. Default: both."`
}

func (inboxIgnoreCmd) Help() string {
	return `Marks events as of no concern to the receiver: failed or pending ones, never those that are being worked. What waits behind
them in their ordering keys goes on. replay --state ignored brings them back, until they are pruned.

  outbox-relay inbox ignore 17
  outbox-relay inbox ignore --ordering-key invoice-4711 --state failed     # what blocks this key
  outbox-relay inbox ignore --type 'test.*' --dry-run

It works in batches of 1000, each a transaction; Ctrl-C ends it between two. The same command again goes on.`
}

func (cmd inboxIgnoreCmd) Run(inv *invocation) error {
	return inboxBulkCommand{
		verb: "ignore", done: "ignored", inboxBulkFlags: cmd.inboxBulkFlags, states: cmd.State,
		preview: (*inboxops.Ops).PreviewIgnore, act: (*inboxops.Ops).Ignore,
	}.run(inv)
}

// An inboxBulkCommand changes events of an inbox as a [bulkCommand] changes deliveries.
type inboxBulkCommand struct {
	verb, done string // "replay", "replayed"
	inboxBulkFlags
	states  []string
	preview func(*inboxops.Ops, context.Context, inboxops.Selection) (inboxops.Bulk, error)
	act     func(*inboxops.Ops, context.Context, inboxops.Selection, func(inboxops.Bulk)) (inboxops.Bulk, error)
}

// inboxBulkReport is what --json prints.
type inboxBulkReport struct {
	Action string `json:"action"`
	DryRun bool   `json:"dry_run"`
	// Interrupted by a signal, or ended by an error; Left is how much of what was counted before was not done.
	Interrupted bool  `json:"interrupted"`
	Left        int64 `json:"left"`
	inboxops.Bulk
}

func (b inboxBulkCommand) selected(inv *invocation) (inboxops.Selection, error) {
	s, err := b.selection(slices.Compact(slices.Sorted(slices.Values(b.states))))
	if err != nil {
		return s, err
	}
	if b.Limit != nil {
		if s.Limit = *b.Limit; s.Limit < 1 || s.Limit > inboxops.MaxLimit {
			return s, usagef("--limit: %d is out of range; write 1 to %d", s.Limit, inboxops.MaxLimit)
		}
	}
	if len(b.IDs) == 1 && b.IDs[0] == "-" && !b.Yes && !b.DryRun {
		return s, usagef("standard input cannot both name the events and answer the question; add --yes, or --dry-run to look first")
	}
	// Before the ids are read: an operator at a terminal would wait for a program that waits for input.
	if s.Empty() && len(b.IDs) == 0 && b.Since == "" && b.Until == "" {
		return s, usagef("nothing says which events are meant; name inbox ids, or narrow it with --state, --type, --key, --ordering-key, --reference, --from, --to, --since or --until")
	}
	s.IDs, err = eventIDs(b.IDs, inv.Stdin)
	return s, err
}

func (b inboxBulkCommand) run(inv *invocation) error {
	s, err := b.selected(inv)
	if err != nil {
		return err
	}
	return inv.askInbox(supportRole, func(ctx context.Context, c *config, ops *inboxops.Ops) error {
		if s.Since, s.Until, err = b.times().bounds(ctx, ops); err != nil {
			return err
		}
		found, err := b.preview(ops, ctx, s)
		switch {
		case err != nil:
			return err
		case b.DryRun:
			return b.report(inv, inboxBulkReport{DryRun: true, Bulk: found})
		case found.Matched == 0:
			return b.report(inv, inboxBulkReport{Bulk: found})
		}
		if !b.Yes {
			if isTerminal(inv.Stdin) {
				b.printFound(inv.Stderr, printable(found))
			}
			if err := inv.confirm(fmt.Sprintf("%s %s", b.verb, countEvents(found)), "nothing was "+b.done); err != nil {
				return err
			}
		}
		described := b.describe(s)
		s.ToID = found.LatestID // what was recorded since is not what was confirmed
		result, err := b.act(ops, ctx, s, b.progress(inv, found))
		line := inv.audit(c, "inbox "+b.verb).Str("selection", described).Int64("done", result.Done)
		if err != nil {
			line = line.Str("ended_by", oneLine(err.Error()))
		}
		line.Msg("audit")
		return b.finish(inv, found, result, err)
	})
}

// progress returns what shows a person how far it is.
func (b inboxBulkCommand) progress(inv *invocation, found inboxops.Bulk) func(inboxops.Bulk) {
	if !isTerminal(inv.Stderr) || slices.Contains(inv.Env, "TERM=dumb") || found.Matched <= 1000 {
		return nil
	}
	return func(so inboxops.Bulk) {
		draw(inv.Stderr, fmt.Sprintf("%s %d of %s", b.done, so.Done, countEvents(found)), so.Matched >= found.Matched)
	}
}

// finish reports the end. An interruption is one between two batches: what is done is done.
func (b inboxBulkCommand) finish(inv *invocation, found, result inboxops.Bulk, err error) error {
	found.Done, found.Missed, found.KeysLeft = result.Done, result.Missed, result.KeysLeft
	if found.More {
		found.Matched, found.More = max(found.Matched, result.Matched), err != nil
	} else {
		found.Matched = max(found.Matched, result.Matched)
	}
	left := max(found.Matched-result.Done-result.Missed, 0)
	if err == nil {
		return b.report(inv, inboxBulkReport{Bulk: found, Left: left})
	}
	if b.JSON {
		if err := b.report(inv, inboxBulkReport{Bulk: found, Interrupted: true, Left: left}); err != nil {
			return err
		}
	}
	text := fmt.Sprintf("%d %s, %d left; the same command goes on", result.Done, b.done, left)
	if errors.Is(err, errInterrupted) {
		return exitError{code: exitInterrupted, err: errors.New("interrupted: " + text)}
	}
	return fmt.Errorf("%w (%s)", err, text)
}

func (b inboxBulkCommand) report(inv *invocation, r inboxBulkReport) error {
	r.Action = "inbox " + b.verb
	return show(inv.Stdout, b.JSON, r, b.print)
}

func (b inboxBulkCommand) print(w io.Writer, r inboxBulkReport) error {
	switch {
	case r.DryRun:
		b.printFound(w, r.Bulk)
		if r.Matched > 0 {
			fmt.Fprintf(w, "Nothing was %s: this was a dry run.\n", b.done)
		}
	case r.Matched == 0:
		b.printFound(w, r.Bulk)
	default:
		fmt.Fprintf(w, "%s %s.\n", capital(b.done), plain.Plural(r.Done, "event", "events"))
		if r.Missed > 0 {
			fmt.Fprintf(w, "%d changed in the meantime and were left alone.\n", r.Missed)
		}
		if r.KeysLeft > 0 {
			fmt.Fprintf(w, "%s busy: workers go on with them within half a minute.\n", plain.Plural(r.KeysLeft, "ordering key was", "ordering keys were"))
		}
		b.printLeftOut(w, r.Bulk)
	}
	return nil
}

// printFound says how many events there are, which the first of them are, and what is left out.
func (b inboxBulkCommand) printFound(w io.Writer, found inboxops.Bulk) {
	if found.Matched == 0 {
		fmt.Fprintf(w, "There is nothing to %s.\n", b.verb)
	} else {
		var states []string
		for _, state := range slices.Sorted(maps.Keys(found.States)) {
			states = append(states, fmt.Sprintf("%d %s", found.States[state], state))
		}
		fmt.Fprintf(w, "%s to %s (%s)", capital(countEvents(found)), b.verb, strings.Join(states, ", "))
		if found.Matched > int64(len(found.Sample)) {
			fmt.Fprintf(w, ", such as")
		}
		fmt.Fprintln(w, ":")
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, s := range found.Sample {
			fmt.Fprintf(table, "  %d\t%s\t%s\t%s\t%s\t%s\n", s.InboxID, s.Receiver, s.Source, s.EventType, s.IdempotencyKey, s.State)
		}
		_ = table.Flush()
	}
	b.printLeftOut(w, found)
}

func (b inboxBulkCommand) printLeftOut(w io.Writer, found inboxops.Bulk) {
	if found.NoPayload > 0 {
		fmt.Fprintf(w, "Left alone: %d whose payload was removed.\n", found.NoPayload)
	}
	for _, state := range slices.Sorted(maps.Keys(found.OtherState)) {
		n := found.OtherState[state]
		switch {
		case state == inboxops.Processing:
			fmt.Fprintf(w, "Left alone: %d processing, which a worker has now.\n", n)
		case b.verb == "replay":
			fmt.Fprintf(w, "Left alone: %d %s; to replay these too: --state %s.\n", n, state, state)
		default:
			fmt.Fprintf(w, "Left alone: %d %s.\n", n, state)
		}
	}
	if found.Unknown > 0 {
		var ids []string
		for _, id := range found.UnknownIDs {
			ids = append(ids, fmt.Sprint(id))
		}
		if found.Unknown > int64(len(ids)) {
			ids = append(ids, "…")
		}
		fmt.Fprintf(w, "Not found: %s: %s\n", plain.Plural(found.Unknown, "inbox id", "inbox ids"), strings.Join(ids, ", "))
	}
}

func countEvents(b inboxops.Bulk) string {
	events := plain.Plural(b.Matched, "event", "events")
	if b.More {
		return "at least " + events
	}
	return events
}
