package events

import (
	"context"
	"fmt"
	"io"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

type createCommand struct {
	config.DatabaseFlags
	cli.ActorFlag
	Yes  bool `help:"Do it without asking."`
	JSON bool `help:"Print JSON: {events, deliveries}. Fields are added, never renamed or removed."`
}

func (createCommand) Help() string {
	return `Events that were loaded from another server, by logical replication or from a dump, may have no deliveries, and no relay takes
them. This gives each of them the deliveries that its type has by the stored routes, or parks it. Events that have a delivery
are left alone, and so are those that a relay has yet to route. They are sent as new ones: an event with an ordering key arrives after later ones that were delivered.

It works in batches, each a transaction; Ctrl-C ends it between two. The same command again continues.`
}

func (cmd createCommand) Run(inv *cli.Invocation) error {
	var done ops.CreatedDeliveries
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	err = c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		found, err := outbox.Undelivered(ctx)
		if err != nil || found.Events == 0 {
			return err
		}
		if !cmd.Yes {
			what := fmt.Sprintf("create the deliveries of %s without any, the first is event %d, as the stored routes say",
				plain.Plural(found.Events, "event", "events"), found.FirstEventID)
			if err := inv.Confirm(what, "nothing was created"); err != nil {
				return err
			}
		}
		done, err = outbox.CreateDeliveries(ctx)
		bulk.Audit(inv, c, "events create-deliveries", "events without deliveries", done.Deliveries, err)
		return err
	})
	switch {
	case err != nil && done.Events > 0:
		return fmt.Errorf("after %s: %w", plain.Plural(done.Events, "event", "events"), err)
	case err != nil:
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, done, func(w io.Writer, done ops.CreatedDeliveries) error {
		_, err := fmt.Fprintf(w, "%s created for %s\n", plain.Plural(done.Deliveries, "delivery", "deliveries"), plain.Plural(done.Events, "event", "events"))
		return err
	})
}
