package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A bulkCommand changes many deliveries at an operator's word: it shows what it found, asks, works in batches, and
// leaves one line that says who did what.
type bulkCommand struct {
	verb, done string // "replay", "replayed"
	selectionFlags
	statuses []string
	parked   bool
	// preview and act are the relay's methods.
	preview func(context.Context, *relay.Ops, relay.Selection) (relay.Bulk, error)
	act     func(context.Context, *relay.Ops, relay.Selection, func(relay.Bulk)) (relay.Bulk, error)
	// refuse looks at what was found before anybody is asked; nil: nothing is refused.
	refuse func(relay.Bulk) error
}

// bulkReport is what --json prints.
type bulkReport struct {
	Action string `json:"action"`
	DryRun bool   `json:"dry_run"`
	// Interrupted by a signal, or ended by an error, before everything was done; Left is then how much of what was
	// counted before was not.
	Interrupted bool  `json:"interrupted"`
	Left        int64 `json:"left"`
	relay.Bulk
}

func (b bulkCommand) run(inv *invocation, c *config) error {
	selection, err := b.selection(inv, b.statuses, b.parked)
	if err != nil {
		return err
	}
	return inv.askWith(c, func(ctx context.Context, ops *relay.Ops) error {
		if selection.Since, selection.Until, err = b.bounds(ctx, ops); err != nil {
			return err
		}
		found, err := b.preview(ctx, ops, selection)
		if err != nil {
			return err
		}
		if b.DryRun {
			return b.report(inv, bulkReport{DryRun: true, Bulk: found})
		}
		if b.refuse != nil {
			if err := b.refuse(found); err != nil {
				return err
			}
		}
		if found.Matched == 0 {
			return b.report(inv, bulkReport{Bulk: found})
		}
		if !b.Yes {
			if isTerminal(inv.Stdin) {
				b.printFound(inv.Stderr, printable(found))
			}
			what := fmt.Sprintf("%s %s", b.verb, count(found))
			if err := inv.confirm(what, "nothing was "+b.done); err != nil {
				return err
			}
		}
		result, err := b.act(ctx, ops, selection, b.progress(inv, found))
		b.audit(inv, c, selection, result, err)
		return b.finish(inv, found, result, err)
	})
}

// progress returns what shows a person how far it is.
func (b bulkCommand) progress(inv *invocation, found relay.Bulk) func(relay.Bulk) {
	if !isTerminal(inv.Stderr) || slices.Contains(inv.Env, "TERM=dumb") || found.Matched <= 1000 {
		return nil
	}
	return func(so relay.Bulk) {
		draw(inv.Stderr, fmt.Sprintf("%s %d of %s", b.done, so.Done, count(found)), so.Matched >= found.Matched)
	}
}

// audit leaves the line by which it can be told later who did this.
func (b bulkCommand) audit(inv *invocation, c *config, s relay.Selection, result relay.Bulk, err error) {
	line := inv.audit(c, b.verb).Str("selection", b.describe(s)).Int64("done", result.Done)
	if err != nil {
		line = line.Str("ended_by", oneLine(err.Error()))
	}
	line.Msg("audit")
}

// finish reports the end. An interruption is one between two batches: what is done is done.
func (b bulkCommand) finish(inv *invocation, found, result relay.Bulk, err error) error {
	found.Done, found.Missed = result.Done, result.Missed
	found.InFlight = max(found.InFlight, result.InFlight)
	if !found.More {
		found.Matched = max(found.Matched, result.Matched)
	} else {
		found.Matched, found.More = result.Matched, err != nil
	}
	left := found.Matched - result.Done - result.Missed
	if err == nil {
		return b.report(inv, bulkReport{Bulk: found, Left: max(left, 0)})
	}
	if b.JSON {
		if err := b.report(inv, bulkReport{Bulk: found, Interrupted: true, Left: left}); err != nil {
			return err
		}
	}
	leftText := fmt.Sprint(left)
	if found.More {
		leftText = "an unknown number"
	}
	text := fmt.Sprintf("%d %s, %s left; the same command goes on", result.Done, b.done, leftText)
	if errors.Is(err, errInterrupted) {
		return exitError{code: exitInterrupted, err: errors.New("interrupted: " + text)}
	}
	return fmt.Errorf("%w (%s)", err, text)
}

func (b bulkCommand) report(inv *invocation, r bulkReport) error {
	r.Action = b.verb
	return show(inv.Stdout, b.JSON, r, b.print)
}

func (b bulkCommand) print(w io.Writer, r bulkReport) error {
	switch {
	case r.DryRun:
		b.printFound(w, r.Bulk)
		if r.Matched > 0 {
			fmt.Fprintf(w, "Nothing was %s: this was a dry run.\n", b.done)
		}
	case r.Matched == 0:
		b.printFound(w, r.Bulk)
	default:
		fmt.Fprintf(w, "%s %s.\n", capital(b.done), plain.Plural(r.Done, "delivery", "deliveries"))
		if r.Missed > 0 {
			fmt.Fprintf(w, "%d changed in the meantime and were left alone.\n", r.Missed)
		}
		b.printLeftOut(w, r.Bulk)
	}
	return nil
}

// printFound says how many deliveries there are, which the first of them are, and what is left out.
func (b bulkCommand) printFound(w io.Writer, found relay.Bulk) {
	if found.Matched == 0 {
		fmt.Fprintf(w, "There is nothing to %s.\n", b.verb)
	} else {
		fmt.Fprintf(w, "%s to %s", capital(count(found)), b.verb)
		if found.Matched > int64(len(found.Sample)) {
			fmt.Fprintf(w, ", such as")
		}
		fmt.Fprintln(w, ":")
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, s := range found.Sample {
			created := ""
			if s.CreatedAt != nil {
				created = s.CreatedAt.UTC().Format(time.RFC3339)
			}
			fmt.Fprintf(table, "  %d\t%s\t%s\t%s\t%s\t%s\n", s.EventID, s.EventType, s.IdempotencyKey,
				orParked(s.Destination), s.Status, created)
		}
		_ = table.Flush()
	}
	b.printLeftOut(w, found)
}

func (b bulkCommand) printLeftOut(w io.Writer, found relay.Bulk) {
	if found.InFlight > 0 {
		fmt.Fprintf(w, "Left alone: %d in flight, which a relay is sending now; repeat the command later.\n", found.InFlight)
	}
	if found.TooOld > 0 {
		fmt.Fprintf(w, "Left alone: %d older than receivers remember (--force).\n", found.TooOld)
	}
	if found.EventMissing > 0 {
		fmt.Fprintf(w, "Left alone: %d whose event is gone.\n", found.EventMissing)
	}
	for _, status := range []string{"pending", "failed", "delivered", "discarded"} {
		n := found.OtherStatus[status]
		switch {
		case n == 0:
		case b.verb == "replay" && status == "pending":
			fmt.Fprintf(w, "Left alone: %d pending, which will be sent anyway.\n", n)
		case b.verb == "replay":
			fmt.Fprintf(w, "Left alone: %d %s; to %s these too: --status %s.\n", n, status, b.verb, status)
		default:
			fmt.Fprintf(w, "Left alone: %d %s.\n", n, status)
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
		fmt.Fprintf(w, "Not found: %s no delivery here: %s\n", plain.Plural(found.Unknown, "event has", "events have"), strings.Join(ids, ", "))
	}
}

// who returns the person at the keyboard, as far as a program can know.
func who() string {
	name, host := "unknown", "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return name + "@" + host
}

func count(b relay.Bulk) string {
	deliveries := plain.Plural(b.Matched, "delivery", "deliveries")
	if b.More {
		return "at least " + deliveries
	}
	return deliveries
}

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

func orParked(destination string) string {
	if destination == "" {
		return "(parked)"
	}
	return destination
}
