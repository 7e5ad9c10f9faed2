package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"
)

type relaysCmd struct {
	databaseFlags
	JSON bool `help:"Print JSON: an array of relays. Fields are added, never renamed or removed."`
}

func (cmd relaysCmd) Run(inv *invocation) error {
	var list []relay.RelayStatus
	err := inv.ask(func(ctx context.Context, ops *relay.Ops) (err error) {
		list, err = ops.Relays(ctx)
		return err
	})
	if err != nil {
		return err
	}
	return show(inv.Stdout, cmd.JSON, orEmpty(list), printRelays)
}

func printRelays(w io.Writer, list []relay.RelayStatus) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No relay is running. Start one: outbox-relay run")
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tINSTANCE\tVERSION\tSTATE\tHEARD OF\tIN FLIGHT\tLIFE SIGN\tSTARTED\tSERVES")
	for _, r := range list {
		sign := "session"
		if !r.Session {
			sign = "heartbeat" // behind a pooler
		}
		fmt.Fprintf(table, "%s\t%d\t%s\t%s\t%s ago\t%d\t%s\t%s\t%s\n", r.Name, r.Instance, r.Version,
			relayState(r), age2text(r.HeartbeatAgeSeconds), r.InFlight, sign, r.StartedAt.UTC().Format(time.RFC3339), strings.Join(r.Destinations, ", "))
	}
	return table.Flush()
}

// relayState says in a word what a relay does.
func relayState(r relay.RelayStatus) string {
	switch {
	case r.HeartbeatAgeSeconds >= staleAfter.Seconds():
		return "silent"
	case r.Quarantined != "":
		return "quarantined"
	case r.Idle:
		return "idle"
	}
	return "busy"
}
