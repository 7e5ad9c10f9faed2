package bulk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// An Operation changes many rows at an operator's word: it shows what it found, asks, works in
// batches, and leaves one line that says who did what.
type Operation[B any] struct {
	Flags
	Action     string // "replay", or "inbox replay"
	Verb, Done string // "replay", "replayed"
	One, Many  string // "delivery", "deliveries"
	Selection  string // for the audit line
	Work       Work[B]
}

// Work is what differs between deliveries and events of an inbox. B is what was found or done.
type Work[B any] interface {
	Preview(ctx context.Context) (B, error)
	// Refuse looks at what was found before the operator is asked.
	Refuse(found B) error
	// Act changes what was found.
	Act(ctx context.Context, found B, progress func(B)) (B, error)
	// Counts returns the part of B that counts.
	Counts(b *B) *batch.Counts
	// Merge adds to found what only the result knows.
	Merge(found *B, result B)
	// Report returns what --json prints.
	Report(r Outcome, found B) any
	// Sample returns a remark about what was found, and the cells of the first rows of it.
	Sample(found B) (remark string, rows [][]any)
	// LeftOut returns lines about what was found and stays as it is.
	LeftOut(found B) []string
}

// An Outcome is what --json prints before the counts.
type Outcome struct {
	Action string `json:"action"`
	DryRun bool   `json:"dry_run"`
	// Interrupted by a signal, or ended by an error, before everything was done; Left is then how
	// much of what was counted before was not.
	Interrupted bool  `json:"interrupted"`
	Left        int64 `json:"left"`
}

// Run looks, asks and works. The audit line names what was done, also when an error ended it.
func (b Operation[B]) Run(ctx context.Context, inv *cli.Invocation, c *config.Config) error {
	found, err := b.Work.Preview(ctx)
	if err != nil {
		return err
	}
	if b.DryRun {
		return b.print(inv, Outcome{DryRun: true}, found)
	}
	if err := b.Work.Refuse(found); err != nil {
		return err
	}
	if b.Work.Counts(&found).Matched == 0 {
		return b.print(inv, Outcome{}, found)
	}
	if !b.Yes {
		b.printFound(inv.Stderr, output.Printable(found))
		if err := inv.Confirm(b.Verb+" "+b.count(found), "nothing was "+b.Done); err != nil {
			return err
		}
	}
	result, err := b.Work.Act(ctx, found, b.progress(inv, found))
	Audit(inv, c, b.Action, b.Selection, b.Work.Counts(&result).Done, err)
	return b.finish(inv, found, result, err)
}

// progress returns what shows a person how far the command is.
func (b Operation[B]) progress(inv *cli.Invocation, found B) func(B) {
	matched := b.Work.Counts(&found).Matched
	if !output.IsTerminal(inv.Stderr) || slices.Contains(inv.Env, "TERM=dumb") || matched <= 1000 {
		return nil
	}
	return func(so B) {
		t := b.Work.Counts(&so)
		output.Draw(inv.Stderr, fmt.Sprintf("%s %d of %s", b.Done, t.Done, b.count(found)), t.Matched >= matched)
	}
}

// Audit leaves the line that says later who changed how much.
func Audit(inv *cli.Invocation, c *config.Config, action, selection string, done int64, err error) {
	line := c.Audit(inv, action).Str("selection", selection).Int64("done", done)
	if err != nil {
		line = line.Str("ended_by", cli.OneLine(err.Error()))
	}
	line.Msg("audit")
}

// finish reports the end. An interruption comes between two batches: what is done is done.
func (b Operation[B]) finish(inv *cli.Invocation, found, result B, err error) error {
	b.Work.Merge(&found, result)
	f, r := b.Work.Counts(&found), b.Work.Counts(&result)
	f.Done, f.Missed = r.Done, r.Missed
	if f.More {
		f.Matched, f.More = r.Matched, err != nil
	} else {
		f.Matched = max(f.Matched, r.Matched)
	}
	left := max(f.Matched-r.Done-r.Missed, 0)
	if err == nil {
		return b.print(inv, Outcome{Left: left}, found)
	}
	if b.JSON {
		if err := b.print(inv, Outcome{Interrupted: true, Left: left}, found); err != nil {
			return err
		}
	}
	leftText := fmt.Sprint(left)
	if f.More {
		leftText = "an unknown number"
	}
	text := fmt.Sprintf("%d %s, %s left; the same command continues", r.Done, b.Done, leftText)
	if errors.Is(err, cli.ErrInterrupted) {
		return cli.ExitError{Code: cli.ExitInterrupted, Err: errors.New("interrupted: " + text)}
	}
	return fmt.Errorf("%w (%s)", err, text)
}

func (b Operation[B]) print(inv *cli.Invocation, r Outcome, found B) error {
	if b.JSON {
		r.Action = b.Action
		return output.WriteJSON(inv.Stdout, b.Work.Report(r, found))
	}
	w := inv.Stdout
	found = output.Printable(found)
	t := b.Work.Counts(&found)
	if r.DryRun || t.Matched == 0 {
		b.printFound(w, found)
		if r.DryRun && t.Matched > 0 {
			fmt.Fprintf(w, "Nothing was %s: this was a dry run.\n", b.Done)
		}
		return nil
	}
	fmt.Fprintf(w, "%s %s.\n", plain.Capital(b.Done), plain.Plural(t.Done, b.One, b.Many))
	if t.Missed > 0 {
		fmt.Fprintf(w, "%d changed in the meantime and were left alone.\n", t.Missed)
	}
	printLines(w, b.Work.LeftOut(found))
	return nil
}

// printFound says how many there are, which the first of them are, and what is left out.
func (b Operation[B]) printFound(w io.Writer, found B) {
	if t := b.Work.Counts(&found); t.Matched == 0 {
		fmt.Fprintf(w, "There is nothing to %s.\n", b.Verb)
	} else {
		remark, rows := b.Work.Sample(found)
		if t.Matched > int64(len(rows)) {
			remark += ", such as"
		}
		fmt.Fprintf(w, "%s to %s%s:\n", plain.Capital(b.count(found)), b.Verb, remark)
		_ = output.List(w, "", "", rows, func(cells []any) []any { return cells })
	}
	printLines(w, b.Work.LeftOut(found))
}

func printLines(w io.Writer, lines []string) {
	for _, line := range lines {
		fmt.Fprintln(w, line)
	}
}

// count says how many were found.
func (b Operation[B]) count(found B) string {
	t := b.Work.Counts(&found)
	text := plain.Plural(t.Matched, b.One, b.Many)
	if t.More {
		return "at least " + text
	}
	return text
}

// NotFound names the first of the ids that exist nowhere.
func NotFound(what string, ids []int64, all int64) string {
	var texts []string
	for _, id := range ids {
		texts = append(texts, fmt.Sprint(id))
	}
	if all > int64(len(ids)) {
		texts = append(texts, "…")
	}
	return fmt.Sprintf("Not found: %s: %s", what, strings.Join(texts, ", "))
}
