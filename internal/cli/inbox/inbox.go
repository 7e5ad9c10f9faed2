package inbox

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Command is the command inbox.
type Command struct {
	Status statusCommand `cmd:"" help:"Show what waits, what failed, for how long."`
	List   listCommand   `cmd:"" help:"List events, the latest first; with --remembered those that the receiver remembers."`
	Show   showCommand   `cmd:"" help:"Show one event, what is remembered of it, and why it waits."`
	Replay replayCommand `cmd:"" help:"Work failed or ignored events again."`
	Ignore ignoreCommand `cmd:"" help:"Give failed or pending events up."`
	Prune  pruneCommand  `cmd:"" help:"Forget what was finished long ago."`
}

func (Command) Help() string {
	return `The receiver's side: these commands work at the database of a receiver (package consumer). They need its URL and nothing else:

  export OUTBOX_DATABASE_URL=postgres://support@localhost:5432/shipping
  outbox-relay inbox status
  outbox-relay inbox list --status failed
  outbox-relay inbox show 4711
  outbox-relay inbox replay --status failed --type 'invoice.*'

The role inbox_support of migrations/roles.sql is enough for all but prune, which needs inbox_receiver. None of them reads a
payload or the headers of a request. An inbox id is the number that an event got when it was recorded; list shows it.`
}

// senderFlags are those of every inbox command but prune.
type senderFlags struct {
	config.DatabaseFlags
	Receiver string `placeholder:"NAME" help:"Only this receiver (consumer.Config.Receiver)."`
	Source   string `placeholder:"NAME" help:"Only this sender (consumer.Config.Source)."`
}

// filterFlags choose events by what stands in them.
type filterFlags struct {
	senderFlags
	Type        string `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Key         string `placeholder:"KEY" help:"Only events with this idempotency key."`
	OrderingKey string `placeholder:"KEY" help:"Only events with this ordering key."`
	Reference   string `placeholder:"TEXT" help:"Only events with this related reference."`
	From        int64  `placeholder:"ID" help:"Only inbox ids from this one on."`
	To          int64  `placeholder:"ID" help:"Only inbox ids up to this one."`
	Since       string `placeholder:"TIME" help:"Only events received since then: 2026-01-02T15:04:05Z, or 2h for two hours ago."`
	Until       string `placeholder:"TIME" help:"Only events received before then."`
}

func (f filterFlags) times() bulk.TimeFlags {
	return bulk.TimeFlags{Since: f.Since, Until: f.Until}
}

// selection returns what was asked for, but for its times and ids.
func (f filterFlags) selection(states []string) (inboxops.Selection, error) {
	s := inboxops.Selection{
		Receiver: f.Receiver, Source: f.Source, States: states, Type: f.Type, Key: f.Key, OrderingKey: f.OrderingKey,
		RelatedReference: f.Reference, FromID: f.From, ToID: f.To,
	}
	switch {
	case f.From < 0:
		return s, cli.Usagef("--from: %d is not an inbox id; they begin at 1", f.From)
	case f.To < 0:
		return s, cli.Usagef("--to: %d is not an inbox id; they begin at 1", f.To)
	case f.To != 0 && f.From > f.To:
		return s, cli.Usagef("--from %d is above --to %d", f.From, f.To)
	}
	return s, f.times().Check()
}

// describe repeats the selection in an audit line: every flag, but only the number of named events.
func (f filterFlags) describe(s inboxops.Selection) string {
	text := bulk.FlagText{}
	text.AddIDs("inbox id", "inbox ids", s.IDs)
	text.Add("receiver", s.Receiver)
	text.Add("source", s.Source)
	text.Add("status", strings.Join(s.States, ","))
	text.Add("type", s.Type)
	text.Add("key", s.Key)
	text.Add("ordering-key", s.OrderingKey)
	text.Add("reference", s.RelatedReference)
	text.Add("from", f.From)
	text.Add("to", f.To)
	text.Add("since", f.Since)
	text.Add("until", f.Until)
	text.Add("limit", s.Limit)
	return strings.Join(text, " ")
}

// ask connects to a receiver's database, checks its schema and lets f ask its questions. role is
// the one that f needs.
func ask(inv *cli.Invocation, role string, f func(context.Context, *config.Config, *inboxops.Ops) error) error {
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	pool, err := c.Open(inv.Ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	ops := inboxops.New(pool)
	if err = ops.CheckSchema(inv.Ctx); err == nil {
		err = f(inv.Ctx, c, ops)
	}
	if inboxops.LacksRight(err) {
		return fmt.Errorf("%w; this login needs a role of migrations/roles.sql: GRANT %s TO %s", err, role, c.Pool.ConnConfig.User)
	}
	return err
}

// Roles that the commands need.
const (
	supportRole = "inbox_support"
	prunerRole  = "inbox_receiver"
)

type statusCommand struct {
	senderFlags
	JSON bool `help:"Print JSON. Fields are added, never renamed or removed."`
}

func (statusCommand) Help() string {
	return `Counts by index entries, at most 100,000 of a kind for each receiver and source: what succeeded is not counted. --json prints:

  senders                [{receiver, source, pending, due, scheduled, waiting, processing, failed, ignored, at_least?, blocked_keys,
                         lag_seconds, processing_seconds, remembers_since}]
                         due, scheduled (tried again later) and waiting (behind an earlier event of the ordering key) are
                         parts of pending; at_least: there are more, the counts are lower bounds; lag_seconds: for how long
                         the oldest due event has been due; remembers_since: events created before it that are not known
                         are refused, null: nothing was forgotten yet
  inbox_rows_estimate    rows of inbox_events, as the database estimates; -1: it was never analysed
  memory_rows_estimate   rows of processed_events`
}

func (cmd statusCommand) Run(inv *cli.Invocation) error {
	return ask(inv, supportRole, func(ctx context.Context, _ *config.Config, ops *inboxops.Ops) error {
		status, err := ops.Status(ctx, cmd.Receiver, cmd.Source)
		if err != nil {
			return err
		}
		status.Senders = output.OrEmpty(status.Senders)
		return output.Show(inv.Stdout, cmd.JSON, status, printStatus)
	})
}

func printStatus(w io.Writer, s inboxops.Status) error {
	const header = "RECEIVER\tSOURCE\tPENDING\tDUE\tSCHEDULED\tWAITING\tPROCESSING\tFAILED\tIGNORED\tLAG\tREMEMBERS SINCE\t"
	err := output.Table(w, "No event was received here yet, or none of this receiver and source.", header, s.Senders, func(r inboxops.SenderStatus) []any {
		var since any = "the beginning"
		if r.RemembersSince != nil {
			since = *r.RemembersSince
		}
		pending := fmt.Sprint(r.Pending)
		if r.AtLeast {
			pending = "≥ " + pending
		}
		return []any{r.Receiver, r.Source, pending, r.Due, r.Scheduled, r.Waiting, r.Processing, r.Failed, r.Ignored, output.Age(r.LagSeconds), since}
	})
	if err != nil || len(s.Senders) == 0 {
		return err
	}
	fmt.Fprintf(w, "\nRows, as the database estimates: %s in inbox_events, %s in processed_events.\n\n", estimate(s.InboxRows), estimate(s.MemoryRows))
	_, err = fmt.Fprintln(w, strings.Join(nextSteps(s), "\n"))
	return err
}

func estimate(rows int64) string {
	if rows < 0 {
		return "an unknown number"
	}
	return fmt.Sprint(rows)
}

// nextSteps says what to do about what the status shows.
func nextSteps(s inboxops.Status) (steps []string) {
	add := func(format string, args ...any) { steps = append(steps, fmt.Sprintf(format, args...)) }
	for _, r := range s.Senders {
		who := plain.ShellFlag("--receiver", r.Receiver) + " " + plain.ShellFlag("--source", r.Source)
		if r.Failed > 0 {
			blocked := ""
			if r.BlockedKeys > 0 {
				blocked = fmt.Sprintf("; %s behind them", waitingKeys(r.BlockedKeys))
			}
			add("%s of %q failed%s. See why: outbox-relay inbox list --status failed %s\n  Work again: outbox-relay inbox replay --status failed %[4]s",
				plain.Plural(r.Failed, "event", "events"), r.Receiver, blocked, who)
		}
		if r.Ignored > 0 {
			add("%s of %q ignored. See why: outbox-relay inbox list --status ignored %s", plain.Plural(r.Ignored, "event was", "events were"), r.Receiver, who)
		}
		if r.Due > 0 && r.LagSeconds > 60 {
			add("The oldest due event of %q has been due for %s: its workers are too few, too slow, or not running.", r.Receiver, output.Age(r.LagSeconds))
		}
	}
	if len(steps) == 0 {
		return []string{"All is well."}
	}
	return steps[:min(len(steps), output.MaxAdvice)]
}

// waitingKeys says how many ordering keys wait; they are counted up to 10,001.
func waitingKeys(n int64) string {
	if n > 10_000 {
		return plain.UpTo(n, 10_000) + " ordering keys wait"
	}
	return plain.Plural(n, "ordering key waits", "ordering keys wait")
}
