// Package reconcile is the command reconcile, which compares what was delivered with what a
// receiver has.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/reconcile/compare"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay"
)

// receiverURL is the variable that names the receiver's database. What begins with OUTBOX_ is a
// setting.
const receiverURL = "RECEIVER_DATABASE_URL"

// Command is the command reconcile.
type Command struct {
	config.DatabaseFlags
	cli.ActorFlag
	Destination []string `placeholder:"NAME" help:"The destination that leads to the receiver; several with commas, if several do. Default: the only one there is."`
	URL         string   `placeholder:"URL" xor:"receiver" help:"Ask the receiver at this URL, signed with the destination's secrets: where consumer.Reconcile is mounted; in Node.js, Python and Java the receiver's path and /reconcile."`
	Receiver    string   `placeholder:"NAME" xor:"receiver" help:"Ask the receiver's database instead: that of $RECEIVER_DATABASE_URL, for this receiver (consumer.Config.Receiver)."`
	Source      string   `placeholder:"NAME" default:"outbox" help:"With --receiver: the receiver's name for this sender (consumer.Config.Source)."`
	Effects     string   `placeholder:"SQL" help:"With --receiver: a query that returns the idempotency key of each effect, in one row for each. It must have the effects of every type that is processed, and of this source alone."`
	Since       string   `placeholder:"TIME" help:"Compare only what was delivered since then: 2026-01-02T15:04:05Z, or 26h for 26 hours ago. Default: from when on both sides keep everything."`
	Settle      string   `placeholder:"1m" default:"1m" help:"How long ago an event was delivered, or received, before it is compared."`
	Limit       int      `default:"1000" help:"How many keys of a kind are named at most, 1 to 1000."`
	Heal        bool     `help:"Replay what never arrived, after a question."`
	Yes         bool     `short:"y" help:"Do not ask: for scripts."`
	Alert       bool     `help:"Open the alert reconcile if anything is found, or nothing can be compared, and end it otherwise. Relays send it to their channels."`
	JSON        bool     `help:"Print JSON. Fields are added, never renamed or removed."`
}

// Help explains the command.
func (Command) Help() string {
	return `Did everything that was delivered take effect, exactly once? Both sides digest ranges of idempotency keys; only ranges that differ are
compared key by key, and each finding is checked again before it is named:

  never arrived         delivered, and the receiver does not have it
  arrived, no effect    recorded in an inbox, and neither done nor ignored: pending, being worked, or failed
  effect without event  the receiver has it, and the sender has no such event
  effect twice          more than one row of --effects, or of the receiver's own query, has its key
  processed, no effect  the receiver has processed it, and no row of these has its key

Events that are delivered, retried or received meanwhile are no findings, nor is what one side may have forgotten (its retention), nor what a drill
left (keys drill-…): that is counted. What waits, failed or was discarded is counted; status and events list show it.

  outbox-relay reconcile --destination logistics --url https://logistics.internal/webhooks/finance/reconcile
  outbox-relay reconcile --destination logistics --receiver logistics --source finance --effects 'SELECT event_key FROM shipments'
  outbox-relay reconcile --destination logistics --url … --since 26h --alert        # every night
  outbox-relay reconcile --destination logistics --url … --heal                     # replays what never arrived

It exits 6 if anything is found, also if it was healed: run it again after the replay. It needs outbox_reader, and with --heal
or --alert outbox_relay; at the receiver's database inbox_support, and SELECT on what --effects reads. The source must be this outbox's alone.`
}

// Run compares, prints and heals.
func (cmd Command) Run(inv *cli.Invocation) error {
	settle, problem := settings.ParseDuration(cmd.Settle)
	since := bulk.TimeFlags{Since: cmd.Since}
	switch {
	case (cmd.URL == "") == (cmd.Receiver == ""):
		return cli.Usagef("nothing says who is asked; name the receiver's handler with --url, or the receiver in its database with --receiver")
	case cmd.URL != "" && cmd.Effects != "":
		return cli.Usagef("--effects: the receiver at --url counts by its own query (ReconcileConfig.Effects, effects); use it with --receiver")
	case problem != "":
		return cli.Usagef("--settle: %s", problem)
	case cmd.Limit < 1 || cmd.Limit > reconcile.MaxKeys:
		return cli.Usagef("--limit: %d is out of range; write 1 to %d", cmd.Limit, reconcile.MaxKeys)
	case cmd.Yes && !cmd.Heal:
		return cli.Usagef("--yes answers the question of --heal, which is not given")
	}
	if err := since.Check(); err != nil {
		return err
	}
	sections := []string{"database", "retention"}
	if cmd.URL != "" {
		sections = append(sections, "destinations", "egress")
	}
	c, err := config.Read(inv, sections...)
	if err != nil {
		return err
	}
	chosen, err := cmd.choose(inv, c)
	if err != nil {
		return err
	}
	return c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		begun := time.Now()
		o := compare.Options{Destinations: post.Names(chosen), Settle: settle, Keeps: c.Relay.Retention.DeleteAfter, Limit: cmd.Limit, Progress: progress(inv)}
		if o.Since, _, err = since.Bounds(ctx, outbox); err != nil {
			return err
		}
		found, err := cmd.compare(ctx, inv, c, chosen, outbox, o)
		if cmd.Alert && ctx.Err() == nil {
			found, problem := found, found.problem()
			if err != nil {
				found, problem = report{}, err
			}
			err = errors.Join(err, outbox.AlertReconciled(ctx, o.Destinations[0], int64(found.Findings()), problem))
		}
		if err != nil {
			return err
		}
		found.Seconds = time.Since(begun).Seconds()
		return cmd.finish(ctx, inv, c, outbox, found)
	})
}

// compare asks both sides.
func (cmd Command) compare(ctx context.Context, inv *cli.Invocation, c *config.Config, chosen []relay.Destination, outbox *ops.Outbox, o compare.Options) (found report, err error) {
	receiver, err := cmd.open(inv, c, chosen)
	if err != nil {
		return found, err
	}
	defer receiver.close()
	o.Ask = receiver.ask
	cli.ReleaseProgram() // it shares the machine with what it compares
	defer debug.SetGCPercent(debug.SetGCPercent(50))
	found.Report, err = compare.Run(ctx, outbox.DB(), o)
	if o.Progress != nil {
		output.Draw(inv.Stderr, "", false)
	}
	return found, err
}

// choose returns the destinations that lead to the receiver.
func (cmd Command) choose(inv *cli.Invocation, c *config.Config) (chosen []relay.Destination, err error) {
	all := c.Relay.Destinations
	if len(cmd.Destination) == 0 {
		if len(all) != 1 {
			return nil, cli.Usagef("--destination: there are %d destinations; name the one that leads to the receiver: %s", len(all), strings.Join(post.Names(all), ", "))
		}
		cmd.Destination = post.Names(all)
	}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(cmd.Destination))) {
		i := slices.IndexFunc(all, func(d relay.Destination) bool { return d.Name == name })
		switch {
		case i >= 0:
			chosen = append(chosen, all[i])
		case cmd.URL != "":
			return nil, cli.Usagef("--destination: %s is not configured, and its secrets sign the questions; there are %s", settings.Quote(name), strings.Join(post.Names(all), ", "))
		default: // one of another configuration of the same database
			chosen = append(chosen, relay.Destination{Name: name})
		}
		if _, given := inv.Flags["settle"]; i >= 0 && all[i].IsLog() && !given {
			return nil, cli.Usagef("%s publishes to a log, and a delivery says nothing of its readers; give --settle, longer than they are behind", name)
		}
	}
	return chosen, nil
}

// progress returns what shows a person how far the command is; nil: nobody watches.
func progress(inv *cli.Invocation) func(sent int64) {
	if !output.IsTerminal(inv.Stderr) || slices.Contains(inv.Env, "TERM=dumb") {
		return nil
	}
	return func(sent int64) { output.Draw(inv.Stderr, fmt.Sprintf("%d deliveries compared", sent), false) }
}

// finish prints what was found, and replays what never arrived, if that is asked for.
func (cmd Command) finish(ctx context.Context, inv *cli.Invocation, c *config.Config, outbox *ops.Outbox, r report) error {
	to := inv.Stdout
	if cmd.JSON {
		to = inv.Stderr
	}
	if !cmd.JSON || cmd.Heal && !cmd.Yes {
		if err := printReport(to, output.Printable(r)); err != nil {
			return err
		}
	}
	var healing error
	if cmd.Heal {
		healing = cmd.heal(ctx, inv, c, outbox, &r)
	}
	if cmd.JSON {
		if err := output.WriteJSON(inv.Stdout, r); err != nil {
			return err
		}
	} else if r.Replayed > 0 {
		fmt.Fprintf(inv.Stdout, "Replayed %s. Run the command again when they are through.\n", plain.Plural(r.Replayed, "delivery", "deliveries"))
	}
	if healing != nil {
		return healing
	}
	return r.problem()
}

// heal replays what never arrived. What is in the archive, or older than receivers remember, stays
// as it is.
func (cmd Command) heal(ctx context.Context, inv *cli.Invocation, c *config.Config, outbox *ops.Outbox, r *report) error {
	lost := map[string]batch.IDs{}
	for _, f := range r.NeverArrived {
		if !f.Archived {
			lost[f.Destination] = append(lost[f.Destination], f.EventID)
		}
	}
	for _, destination := range r.Destinations {
		if len(lost[destination]) == 0 {
			continue
		}
		s := ops.Selection{EventIDs: lost[destination], Destination: destination, Statuses: []string{"delivered"}}
		order, found, err := outbox.Preview(ctx, ops.Order{Action: "replay", Selection: s, Memory: c.Relay.Retention.ProcessedEvents})
		if err != nil {
			return err
		}
		if found.TooOld > 0 {
			fmt.Fprintf(inv.Stderr, "Left alone: %s older than receivers remember (retention.processed_events).\n", plain.Plural(found.TooOld, "event is", "events are"))
		}
		if found.Matched == 0 {
			continue
		}
		if !cmd.Yes {
			what := fmt.Sprintf("replay %s to %s", plain.Plural(found.Matched, "delivery", "deliveries"), destination)
			if err := inv.Confirm(what, "nothing was replayed"); err != nil {
				return err
			}
		}
		done, err := outbox.Do(ctx, order, nil)
		r.Replayed += done.Done
		bulk.Audit(inv, c, "reconcile heal", fmt.Sprintf("%s --destination %s", plain.Plural(len(s.EventIDs), "event", "events"), destination), done.Done, err)
		if err != nil {
			return err
		}
	}
	return nil
}
