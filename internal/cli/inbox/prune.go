package inbox

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
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

type pruneCommand struct {
	config.DatabaseFlags
	Receiver  string `placeholder:"NAME" help:"Only what this receiver remembers (consumer.Config.Receiver)."`
	OlderThan string `required:"" placeholder:"2160h" help:"How long an event is remembered after it was received and processed. At least 24h, and longer than senders may send one again."`
	DryRun    bool   `help:"Only count what would be forgotten."`
	Yes       bool   `short:"y" help:"Do not ask."`
	JSON      bool   `help:"Print JSON: {dry_run, complete, removed, announced}. Fields are added, never renamed or removed."`
}

func (pruneCommand) Help() string {
	return `Forgets events that succeeded or were ignored, and were received and processed longer ago than --older-than; the same as
consumer.Prune. Events that are pending, being worked or failed stay. A forgotten event that comes again is refused (422), never
worked twice.

An event goes in two runs: the first announces from when on everything is known, the next one removes, a minute later or more.

It needs the role inbox_receiver. It works in short transactions with pauses in between; Ctrl-C ends it between two.`
}

// pruneReport is what --json prints.
type pruneReport struct {
	DryRun   bool `json:"dry_run"`
	Complete bool `json:"complete"`
	inboxops.Pruned
}

func (cmd pruneCommand) Run(inv *cli.Invocation) error {
	age, problem := settings.ParseDuration(cmd.OlderThan)
	switch {
	case problem != "":
		return cli.Usagef("--older-than: %s", problem)
	case age < 24*time.Hour:
		return cli.Usagef("--older-than: %s is less than 24h: senders may send such an event again", cmd.OlderThan)
	}
	p := inboxops.Prune{Receiver: cmd.Receiver, OlderThan: age}
	return ask(inv, prunerRole, func(ctx context.Context, c *config.Config, ops *inboxops.Ops) error {
		if !cmd.Yes || cmd.DryRun {
			found, err := ops.PreviewPrune(ctx, p)
			switch {
			case err != nil:
				return err
			case cmd.DryRun:
				return cmd.print(inv, pruneReport{DryRun: true, Complete: true, Pruned: found})
			}
			what := fmt.Sprintf("forget %s now, and announce that %s forgotten next time", plain.Plural(found.Removed, "event", "events"),
				plain.Plural(found.Announced, "event is", "events are"))
			if err := inv.Confirm(what, "nothing was forgotten"); err != nil {
				return err
			}
		}
		progress := func(inboxops.Pruned) {}
		if output.IsTerminal(inv.Stderr) {
			progress = func(so inboxops.Pruned) { output.Draw(inv.Stderr, fmt.Sprintf("%d forgotten", so.Removed), false) }
		}
		done, err := ops.Prune(ctx, p, progress)
		if output.IsTerminal(inv.Stderr) {
			output.Draw(inv.Stderr, "", false)
		}
		bulk.Audit(inv, c, "inbox prune", cmd.describe(), done.Removed, err)
		if err != nil && done == (inboxops.Pruned{}) {
			return err
		}
		// It says what was done, also when that is not all.
		return errors.Join(cmd.print(inv, pruneReport{Complete: err == nil, Pruned: done}), err)
	})
}

func (cmd pruneCommand) describe() string {
	flags := filterFlags{}.describe(inboxops.Selection{Receiver: cmd.Receiver})
	return strings.TrimSpace(flags + " --older-than " + cmd.OlderThan)
}

func (cmd pruneCommand) print(inv *cli.Invocation, r pruneReport) error {
	return output.Show(inv.Stdout, cmd.JSON, r, func(w io.Writer, r pruneReport) error {
		removed, announced := "Forgot", "announced"
		if r.DryRun {
			removed, announced = "Would forget", "would announce"
		}
		_, err := fmt.Fprintf(w, "%s %s; %s %s, for the next run.\n", removed, plain.Plural(r.Removed, "event", "events"), announced,
			plain.Plural(r.Announced, "event", "events"))
		return err
	})
}
