package status

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
)

// Relays is the command relays.
type Relays struct {
	config.DatabaseFlags
	JSON bool `help:"Print JSON: an array of relays. Fields are added, never renamed or removed."`
}

func (cmd Relays) Run(inv *cli.Invocation) error {
	var list []ops.RelayStatus
	var differences []watch.Difference
	err := config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		if list, err = outbox.Relays(ctx); err != nil {
			return err
		}
		differences, err = outbox.Differences(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, list, func(w io.Writer, list []ops.RelayStatus) error { return printRelays(w, list, differences) })
}

// printRelays prints the relays, and below them what distinguishes one from the others: status and
// alerts lead here.
func printRelays(w io.Writer, list []ops.RelayStatus, differences []watch.Difference) error {
	const header = "NAME\tID\tVERSION\tSTATE\tLAST SEEN\tIN FLIGHT\tSEEN BY\tSTARTED\tSERVES"
	err := output.List(w, "No relay is running. Start one: outbox-relay run", header, list, func(r ops.RelayStatus) []any {
		seenBy := "session"
		if !r.Session {
			seenBy = "heartbeat" // behind a pooler
		}
		return []any{
			r.Name, r.RelayID, r.Version, r.State, output.Age(r.HeartbeatAgeSeconds) + " ago", r.InFlight, seenBy, r.StartedAt,
			strings.Join(r.Destinations, ", "),
		}
	})
	if err != nil {
		return err
	}
	note := func(format string, args ...any) { output.Prose(w, "  ", fmt.Sprintf(format, args...)) }
	for _, r := range list {
		if r.Quarantined != "" {
			note("%s is quarantined: %s", r.Called, output.Printable(r.Quarantined))
		}
		if r.ReloadError != "" {
			note("%s refused its new configuration%s: %s", r.Called, since(r.ReloadFailedAt), output.Printable(r.ReloadError))
		}
		if len(r.RefusedBy) > 0 {
			note("%s is refused by %s, and other relays are not", r.Called, strings.Join(r.RefusedBy, ", "))
		}
	}
	for _, d := range differences {
		note("%s has %s", d.Destination, d)
	}
	return nil
}
