// Package identity is the command identity: which database relays were accepted on, and what to do
// about a copy.
package identity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Command is the command identity.
type Command struct {
	Show           showCommand    `cmd:"" help:"Show what is recorded of this database, what is found, and each difference."`
	Accept         acceptCommand  `cmd:"" help:"Make this database the one that relays work on: it has moved here for good."`
	DiscardPending discardCommand `cmd:"" help:"Give up all that is pending, and accept: this is a copy, whose pending events the original delivers."`
}

type showCommand struct {
	config.DatabaseFlags
	JSON bool `help:"Print JSON: {recorded, found, differences, foreign?, quarantined, working}. Fields are added, never renamed or removed."`
}

func (cmd showCommand) Run(inv *cli.Invocation) error {
	return onIdentity(inv, func(ctx context.Context, outbox *ops.Outbox, report identity.Report, _ *config.Config) error {
		report.Quarantined, report.Working = output.OrEmpty(report.Quarantined), output.OrEmpty(report.Working)
		return output.Show(inv.Stdout, cmd.JSON, report, printReport)
	})
}

type acceptCommand struct {
	config.DatabaseFlags
	cli.ActorFlag
	Yes bool `short:"y" help:"Do not ask."`
}

func (cmd acceptCommand) Run(inv *cli.Invocation) error {
	return onIdentity(inv, func(ctx context.Context, outbox *ops.Outbox, report identity.Report, c *config.Config) error {
		if report.Recorded != nil && len(report.Differences) == 0 && len(report.Quarantined) == 0 && report.Foreign == "" {
			_, err := fmt.Fprintln(inv.Stdout, "nothing to accept: this is the database that relays were accepted on")
			return err
		}
		const what = "relays will work on %s and send what is pending there%s; if the original of a copy sends it too, receivers get it twice"
		if err := confirmIdentity(inv, report, cmd.Yes, what, "nothing was accepted"); err != nil {
			return err
		}
		if err := rebase(ctx, inv, outbox); err != nil {
			return err
		}
		return accept(ctx, inv, outbox, c)
	})
}

// rebase makes events pending that relays could not find, since their transaction ids are another
// server's.
func rebase(ctx context.Context, inv *cli.Invocation, outbox *ops.Outbox) error {
	terminal, drawn := output.IsTerminal(inv.Stderr), false
	deliveries, err := outbox.Rebase(ctx, func(events int64) {
		if terminal {
			output.Draw(inv.Stderr, fmt.Sprintf("went through %d events", events), false)
			drawn = true
		}
	})
	if drawn {
		fmt.Fprintln(inv.Stderr)
	}
	if deliveries > 0 {
		fmt.Fprintf(inv.Stdout, "made %s of events whose transaction ids are another server's\n", plain.Plural(deliveries, "pending delivery", "pending deliveries"))
	}
	if err != nil {
		return fmt.Errorf("nothing is accepted; repeat the command: %w", err)
	}
	return nil
}

type discardCommand struct {
	config.DatabaseFlags
	cli.ActorFlag
	Yes bool `short:"y" help:"Do not ask."`
}

func (cmd discardCommand) Run(inv *cli.Invocation) error {
	return onIdentity(inv, func(ctx context.Context, outbox *ops.Outbox, report identity.Report, c *config.Config) error {
		if err := report.Discardable(); err != nil {
			return fmt.Errorf("discard what is pending: %w", err)
		}
		const what = "every pending delivery of %s will be discarded, and relays will work there%s"
		if err := confirmIdentity(inv, report, cmd.Yes, what, "nothing was discarded"); err != nil {
			return err
		}
		terminal := output.IsTerminal(inv.Stderr)
		b, err := outbox.DiscardQuarantined(ctx, c.Relay.Environment, func(b ops.Bulk) {
			if terminal {
				output.Draw(inv.Stderr, fmt.Sprintf("discarded %d", b.Done), false)
			}
		})
		if terminal && b.Done > 0 {
			fmt.Fprintln(inv.Stderr)
		}
		bulk.Audit(inv, c, "identity discard-pending", "what is pending", b.Done, err)
		fmt.Fprintf(inv.Stdout, "discarded %s, for the reason quarantined\n", plain.Plural(b.Done, "pending delivery", "pending deliveries"))
		if err != nil {
			return fmt.Errorf("not all is discarded, and nothing accepted; repeat the command: %w", err)
		}
		return accept(ctx, inv, outbox, c)
	})
}

// confirmIdentity asks whether relays may work on the database of a report. what has a place for
// its name, and for why.
func confirmIdentity(inv *cli.Invocation, report identity.Report, yes bool, what, refused string) error {
	id, err := report.Acceptable()
	switch {
	case err != nil:
		return fmt.Errorf("accept: %w", err)
	case yes:
		return nil
	}
	return inv.Confirm(fmt.Sprintf(what, describe(id), because(report)), refused)
}

func accept(ctx context.Context, inv *cli.Invocation, outbox *ops.Outbox, c *config.Config) error {
	id, err := outbox.AcceptIdentity(ctx, c.Relay.Environment)
	if err != nil {
		return err
	}
	bulk.Audit(inv, c, "identity accept", describe(id), 1, nil)
	_, err = fmt.Fprintf(inv.Stdout, "accepted: relays work on %s; those that wait begin within seconds\n", describe(id))
	return err
}

// onIdentity connects, checks the schema, compares the database with what is recorded, and lets f
// work.
func onIdentity(inv *cli.Invocation, f func(ctx context.Context, outbox *ops.Outbox, report identity.Report, c *config.Config) error) error {
	c, err := config.Read(inv, "database", "environment")
	if err != nil {
		return err
	}
	err = c.WithOutbox(inv.Ctx, func(outbox *ops.Outbox) error {
		report, err := outbox.Identity(inv.Ctx, c.Relay.Environment)
		if err != nil {
			return err
		}
		return f(inv.Ctx, outbox.As(inv.Actor()), report, c)
	})
	if errors.Is(err, context.Canceled) && inv.Ctx.Err() != nil {
		return context.Cause(inv.Ctx)
	}
	return err
}

// describe names a database by what a person knows it by.
func describe(id identity.Identity) string {
	text := strings.Join(id.Addresses, " or ")
	if id.Environment != "" {
		text += fmt.Sprintf(" as environment %q", id.Environment)
	}
	return output.Printable(text)
}

// because repeats why an operator has to decide.
func because(r identity.Report) string {
	var texts []string
	for _, d := range r.Differences {
		texts = append(texts, d.String())
	}
	if r.Foreign != "" {
		texts = append(texts, r.Foreign)
	}
	for _, q := range r.Quarantined {
		texts = append(texts, fmt.Sprintf("relay %q is quarantined", q.Name))
	}
	if len(texts) == 0 {
		return ""
	}
	return output.Printable(" (" + strings.Join(texts, "; ") + ")")
}

func printReport(w io.Writer, r identity.Report) error {
	recorded := identity.Identity{}
	if r.Recorded != nil {
		recorded = *r.Recorded
	}
	err := output.Table(w, "", "\tRECORDED\tFOUND", [][]any{
		{"system identifier", number(recorded.SystemIdentifier), number(r.Found.SystemIdentifier)},
		{"database oid", number(recorded.DatabaseOID), number(r.Found.DatabaseOID)},
		{"timeline", number(int64(recorded.Timeline)), number(int64(r.Found.Timeline))},
		{"environment", output.OrDash(recorded.Environment), output.OrDash(r.Found.Environment)},
		{"address", output.OrDash(strings.Join(recorded.Addresses, " or ")), output.OrDash(strings.Join(r.Found.Addresses, " or "))},
	}, func(cells []any) []any { return cells })
	if err != nil {
		return err
	}
	if recorded.RecordedAt != nil {
		fmt.Fprintf(w, "Recorded %s.\n", recorded.RecordedAt.UTC().Format(time.RFC3339))
	}
	fmt.Fprintln(w)
	for _, d := range r.Differences {
		fmt.Fprintf(w, "Different: %s.\n", d)
	}
	if r.Foreign != "" {
		fmt.Fprintf(w, "No relay takes events: %s.\n", r.Foreign)
	}
	for _, name := range r.Working {
		fmt.Fprintf(w, "Relay %q works here.\n", name)
	}
	for _, q := range r.Quarantined {
		fmt.Fprintf(w, "Relay %q is quarantined: %s.\n", q.Name, q.Reason)
	}
	_, err = fmt.Fprintln(w, advice(r))
	return err
}

// advice says what to do about a report.
func advice(r identity.Report) string {
	switch {
	case r.Foreign != "":
		return "If relays shall work here, and send what the tables show as not yet sent:\n" +
			"  outbox-relay identity accept\n" +
			"If it is a copy, whose pending events the original delivers:\n" +
			"  outbox-relay identity discard-pending"
	case r.Recorded == nil:
		return "No relay has worked here yet: the first one records the database as its own."
	case len(r.Quarantined) == 0 && len(r.Working) == 0 && r.Discardable() != nil && len(r.Differences) > 0:
		return "Only the address differs, perhaps because you look from elsewhere. A relay that is configured so quarantines,\n" +
			"unless another one works here. To expect relays under it: outbox-relay identity accept"
	case len(r.Quarantined) == 0 && (len(r.Differences) == 0 || len(r.Working) > 0):
		return "Relays may work here."
	}
	return "Nothing is claimed or sent by a relay that differs. If the database has moved here for good:\n" +
		"  outbox-relay identity accept\n" +
		"If it is a copy, whose pending events the original delivers:\n" +
		"  outbox-relay identity discard-pending"
}

func number(n int64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
