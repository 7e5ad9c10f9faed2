package status

import (
	"context"
	"io"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// Relays is the command relays.
type Relays struct {
	config.DatabaseFlags
	JSON bool `help:"Print JSON: an array of relays. Fields are added, never renamed or removed."`
}

func (cmd Relays) Run(inv *cli.Invocation) error {
	var list []ops.RelayStatus
	err := config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		list, err = outbox.Relays(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, list, printRelays)
}

func printRelays(w io.Writer, list []ops.RelayStatus) error {
	const header = "NAME\tINSTANCE\tVERSION\tSTATE\tHEARD OF\tIN FLIGHT\tLIFE SIGN\tSTARTED\tSERVES"
	return output.List(w, "No relay is running. Start one: outbox-relay run", header, list, func(r ops.RelayStatus) []any {
		sign := "session"
		if !r.Session {
			sign = "heartbeat" // behind a pooler
		}
		return []any{
			r.Name, r.Instance, r.Version, r.State(), output.Age(r.HeartbeatAgeSeconds) + " ago", r.InFlight, sign, r.StartedAt,
			strings.Join(r.Destinations, ", "),
		}
	})
}
