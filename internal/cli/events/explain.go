package events

import (
	"context"
	"fmt"
	"io"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// Explain is the command explain.
type Explain struct {
	config.DatabaseFlags
	eventArg
	JSON bool `help:"Print JSON: {event, history, waits}. Fields are added, never renamed or removed."`
}

func (Explain) Help() string {
	return `Tells the history of one event in the order of time, from its insert on: every attempt that the log holds, what became of
each delivery, and why what is pending still waits, with the command that goes on.

  outbox-relay explain 17
  outbox-relay explain invoice-4711      # by its idempotency key, or its related reference`
}

func (cmd Explain) Run(inv *cli.Invocation) error {
	var report ops.EventReport
	err := config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		report, err = cmd.report(ctx, outbox, false)
		return err
	})
	if err != nil {
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, report.Explain(), printExplanation)
}

func printExplanation(w io.Writer, x ops.Explanation) error {
	err := output.Table(w, "", "", x.History, func(m ops.Moment) []any {
		text := m.Text
		if m.Destination != "" {
			text = m.Destination + ": " + text
		}
		return []any{m.At.UTC().Format("2006-01-02 15:04:05.000"), text}
	})
	if err != nil {
		return err
	}
	printWaits(w, x.Waits)
	if len(x.History) == 1 && len(x.Waits) == 0 {
		fmt.Fprintln(w, "\nIt has no delivery, so that nothing sends it: outbox-relay events create-deliveries")
	}
	return nil
}
