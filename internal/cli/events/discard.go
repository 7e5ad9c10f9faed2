package events

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Discard is the command discard.
type Discard struct {
	config.DatabaseFlags
	cli.ActorFlag
	selectionFlags
	Status    []string `enum:"pending,failed" placeholder:"STATUS" help:"pending or failed. Default: both."`
	Parked    bool     `help:"Only deliveries that match no route."`
	HeadOfKey string   `placeholder:"KEY" help:"With --destination: the one delivery for which the others of this ordering key wait."`
}

func (Discard) Help() string {
	return `Gives deliveries up for good: pending, parked or failed ones, never those that are in flight. A discarded delivery
can be brought back with replay --status discarded, until it is archived.

  outbox-relay discard 17                                     # of every destination
  outbox-relay discard --destination old --status pending     # what waits for a destination that is gone
  outbox-relay discard --parked --type 'test.*' --dry-run
  outbox-relay discard --destination logistics --head-of-key invoice-4711   # skip what blocks this key

It works in batches of 1000, each a transaction; Ctrl-C ends it between two. The same command again continues.`
}

func (cmd Discard) Run(inv *cli.Invocation) error {
	switch {
	case cmd.Parked && cmd.Destination != "":
		return cli.Usagef("--parked and --destination exclude each other: a parked delivery has no destination")
	case cmd.HeadOfKey != "" && cmd.Destination == "":
		return cli.Usagef("--head-of-key needs --destination: each orders its own deliveries")
	case cmd.HeadOfKey != "" && (len(cmd.IDs) > 0 || cmd.Type+cmd.Reason+cmd.Key+cmd.OrderingKey+cmd.Since+cmd.Until != "" || cmd.Limit != nil || len(cmd.Status) > 0):
		return cli.Usagef("--head-of-key names one delivery already; give only --destination beside it")
	}
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	bulk := operation{
		verb: "discard", done: "discarded", selectionFlags: cmd.selectionFlags,
		statuses: slices.Compact(slices.Sorted(slices.Values(cmd.Status))), parked: cmd.Parked,
	}
	if cmd.HeadOfKey == "" {
		return bulk.run(inv, c)
	}
	return cmd.skipHead(inv, c, bulk)
}

// skipHead discards the one delivery that holds up its ordering key. What is named is the event,
// not the key: should it be delivered while the operator thinks, the next one is not discarded in
// its place.
func (cmd Discard) skipHead(inv *cli.Invocation, c *config.Config, bulk operation) error {
	var head *ops.Head
	err := c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		head, err = outbox.HeadOfKey(ctx, cmd.Destination, cmd.HeadOfKey)
		return err
	})
	switch {
	case err != nil:
		return err
	case head == nil:
		return fmt.Errorf("nothing waits for %q with ordering key %q", cmd.Destination, cmd.HeadOfKey)
	}
	head = output.Printable(head)
	fmt.Fprintf(inv.Stderr, "Event %d (%s, key %s) is the head of %q: %s after %s", head.EventID, head.EventType,
		head.IdempotencyKey, cmd.HeadOfKey, head.Status, plain.Plural(head.Attempts, "attempt", "attempts"))
	if text := strings.TrimRight(plain.OrBlank(head.LastError), ". "); text != "" {
		fmt.Fprintf(inv.Stderr, ", last error: %s", text)
	}
	fmt.Fprintf(inv.Stderr, ". Waiting behind it: %s.\n", plain.UpTo(head.Behind, 10_000))
	bulk.headOfKey, bulk.IDs = true, []string{fmt.Sprint(head.EventID)}
	return bulk.run(inv, c)
}
