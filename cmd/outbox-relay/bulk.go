package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// A bulk changes many rows at an operator's word: it shows what it found, asks, works in batches, and leaves one line that
// says who did what.
type bulk[B any] struct {
	bulkFlags
	action     string // "replay", or "inbox replay"
	verb, done string // "replay", "replayed"
	one, many  string // "delivery", "deliveries"
	selection  string // for the audit line
	work       bulkWork[B]
}

// bulkWork is what differs between deliveries and events of an inbox. B is what was found or done.
type bulkWork[B any] interface {
	preview(ctx context.Context) (B, error)
	// refuse looks at what was found before the operator is asked.
	refuse(found B) error
	// act changes what was found.
	act(ctx context.Context, found B, progress func(B)) (B, error)
	// total returns the fields of B that count.
	total(b *B) bulkTotal
	// merge adds to found what only the result knows.
	merge(found *B, result B)
	// report returns what --json prints.
	report(r bulkOutcome, found B) any
	// sample returns a remark about what was found, and the cells of the first rows of it.
	sample(found B) (remark string, rows [][]any)
	// leftOut returns lines about what was found and stays as it is.
	leftOut(found B) []string
}

// bulkTotal holds the common fields of a command's counts.
type bulkTotal struct {
	matched, done, missed *int64
	more                  *bool
}

// A bulkOutcome is what --json prints before the counts.
type bulkOutcome struct {
	Action string `json:"action"`
	DryRun bool   `json:"dry_run"`
	// Interrupted by a signal, or ended by an error, before everything was done; Left is then how much of what was
	// counted before was not.
	Interrupted bool  `json:"interrupted"`
	Left        int64 `json:"left"`
}

func (b bulk[B]) run(ctx context.Context, inv *cli.Invocation, c *config.Config) error {
	found, err := b.work.preview(ctx)
	if err != nil {
		return err
	}
	if b.DryRun {
		return b.print(inv, bulkOutcome{DryRun: true}, found)
	}
	if err := b.work.refuse(found); err != nil {
		return err
	}
	if *b.work.total(&found).matched == 0 {
		return b.print(inv, bulkOutcome{}, found)
	}
	if !b.Yes {
		if output.IsTerminal(inv.Stdin) {
			b.printFound(inv.Stderr, output.Printable(found))
		}
		if err := inv.Confirm(b.verb+" "+b.count(found), "nothing was "+b.done); err != nil {
			return err
		}
	}
	result, err := b.work.act(ctx, found, b.progress(inv, found))
	auditBulk(inv, c, b.action, b.selection, *b.work.total(&result).done, err)
	return b.finish(inv, found, result, err)
}

// progress returns what shows a person how far the command is.
func (b bulk[B]) progress(inv *cli.Invocation, found B) func(B) {
	matched := *b.work.total(&found).matched
	if !output.IsTerminal(inv.Stderr) || slices.Contains(inv.Env, "TERM=dumb") || matched <= 1000 {
		return nil
	}
	return func(so B) {
		t := b.work.total(&so)
		output.Draw(inv.Stderr, fmt.Sprintf("%s %d of %s", b.done, *t.done, b.count(found)), *t.matched >= matched)
	}
}

// auditBulk leaves the line that says later who changed how much.
func auditBulk(inv *cli.Invocation, c *config.Config, action, selection string, done int64, err error) {
	line := c.Audit(inv, action).Str("selection", selection).Int64("done", done)
	if err != nil {
		line = line.Str("ended_by", cli.OneLine(err.Error()))
	}
	line.Msg("audit")
}

// finish reports the end. An interruption comes between two batches: what is done is done.
func (b bulk[B]) finish(inv *cli.Invocation, found, result B, err error) error {
	b.work.merge(&found, result)
	f, r := b.work.total(&found), b.work.total(&result)
	*f.done, *f.missed = *r.done, *r.missed
	if *f.more {
		*f.matched, *f.more = *r.matched, err != nil
	} else {
		*f.matched = max(*f.matched, *r.matched)
	}
	left := max(*f.matched-*r.done-*r.missed, 0)
	if err == nil {
		return b.print(inv, bulkOutcome{Left: left}, found)
	}
	if b.JSON {
		if err := b.print(inv, bulkOutcome{Interrupted: true, Left: left}, found); err != nil {
			return err
		}
	}
	leftText := fmt.Sprint(left)
	if *f.more {
		leftText = "an unknown number"
	}
	text := fmt.Sprintf("%d %s, %s left; the same command goes on", *r.done, b.done, leftText)
	if errors.Is(err, cli.ErrInterrupted) {
		return cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted: " + text)}
	}
	return fmt.Errorf("%w (%s)", err, text)
}

func (b bulk[B]) print(inv *cli.Invocation, r bulkOutcome, found B) error {
	if b.JSON {
		r.Action = b.action
		return output.WriteJSON(inv.Stdout, b.work.report(r, found))
	}
	w := inv.Stdout
	found = output.Printable(found)
	t := b.work.total(&found)
	if r.DryRun || *t.matched == 0 {
		b.printFound(w, found)
		if r.DryRun && *t.matched > 0 {
			fmt.Fprintf(w, "Nothing was %s: this was a dry run.\n", b.done)
		}
		return nil
	}
	fmt.Fprintf(w, "%s %s.\n", capital(b.done), plain.Plural(*t.done, b.one, b.many))
	if *t.missed > 0 {
		fmt.Fprintf(w, "%d changed in the meantime and were left alone.\n", *t.missed)
	}
	printLines(w, b.work.leftOut(found))
	return nil
}

// printFound says how many there are, which the first of them are, and what is left out.
func (b bulk[B]) printFound(w io.Writer, found B) {
	if t := b.work.total(&found); *t.matched == 0 {
		fmt.Fprintf(w, "There is nothing to %s.\n", b.verb)
	} else {
		remark, rows := b.work.sample(found)
		if *t.matched > int64(len(rows)) {
			remark += ", such as"
		}
		fmt.Fprintf(w, "%s to %s%s:\n", capital(b.count(found)), b.verb, remark)
		_ = output.Table(w, "", "", rows, func(cells []any) []any { return cells })
	}
	printLines(w, b.work.leftOut(found))
}

func printLines(w io.Writer, lines []string) {
	for _, line := range lines {
		fmt.Fprintln(w, line)
	}
}

// count says how many were found.
func (b bulk[B]) count(found B) string {
	t := b.work.total(&found)
	text := plain.Plural(*t.matched, b.one, b.many)
	if *t.more {
		return "at least " + text
	}
	return text
}

// notFound names the first of the ids that exist nowhere.
func notFound(what string, ids []int64, all int64) string {
	var texts []string
	for _, id := range ids {
		texts = append(texts, fmt.Sprint(id))
	}
	if all > int64(len(ids)) {
		texts = append(texts, "…")
	}
	return fmt.Sprintf("Not found: %s: %s", what, strings.Join(texts, ", "))
}

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }
