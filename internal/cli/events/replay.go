package events

import (
	"fmt"
	"slices"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Replay is the command replay.
type Replay struct {
	config.DatabaseFlags
	cli.ActorFlag
	selectionFlags
	Status []string `enum:"failed,delivered,discarded" placeholder:"STATUS" help:"failed, delivered or discarded; several with commas. Default: failed."`
	Rate   *int64   `placeholder:"N" help:"Deliveries a second, so that live events do not wait behind them; 0: as many as the database can change. Default: 500."`
	Force  bool     `help:"Also events that are older than receivers remember: they may be processed twice."`
}

func (Replay) Help() string {
	return `Makes deliveries pending again. They keep their key, start with all their attempts before them, wait behind
everything that is not a replay, and are sent with X-Outbox-Replay: true. A receiver that has processed one already
suppresses it, as long as it remembers: events older than retention.processed_events are refused without --force.

Of an ordering key, the later deliveries that are still pending wait until a replayed earlier one is through.

  outbox-relay replay 17 18                                   # these, if they failed
  outbox-relay replay --destination logistics                 # all that failed there
  outbox-relay replay --status delivered --since 2h --until 1h --destination logistics
  outbox-relay replay --type 'invoice.*' --reason timeout --dry-run
  outbox-relay replay $(cat ids.txt)                          # - reads them from standard input, in a script

It makes 500 deliveries a second due, or --rate of them, in small batches, each a transaction, and lasts as long as that takes:
what it has not made due stays failed. Ctrl-C ends it between two batches. The same command again continues.`
}

func (cmd Replay) Run(inv *cli.Invocation) error {
	if cmd.Rate != nil && *cmd.Rate < 0 {
		return cli.Usagef("--rate: %d is below 0; write how many deliveries a second, or 0 for no limit", *cmd.Rate)
	}
	c, err := config.Read(inv, "database", "retention.processed_events")
	if err != nil {
		return err
	}
	remembered := c.Relay.Retention.ProcessedEvents
	memory := remembered
	if cmd.Force {
		memory = 0
	}
	return operation{
		verb: "replay", done: "replayed", selectionFlags: cmd.selectionFlags, statuses: slices.Compact(slices.Sorted(slices.Values(cmd.Status))), rate: cmd.Rate,
		memory: memory,
		tooOld: func(n int64) error {
			return fmt.Errorf("%s of events older than %s, which is how long receivers remember what they processed (retention.processed_events): "+
				"sent again, they may be processed twice. Leave them out with --since %[2]s, or add --force",
				plain.Plural(n, "delivery is", "deliveries are"), settings.ShortDuration(remembered))
		},
	}.run(inv, c)
}
