package events

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

type tailCommand struct {
	config.DatabaseFlags
	Destination string `placeholder:"NAME" help:"Only what happens to deliveries to this destination."`
	Type        string `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Key         string `placeholder:"KEY" help:"Only the event with this idempotency key."`
	JSON        bool   `help:"Print one JSON object a line: {at, destination, what, text, event_id, event_type, idempotency_key, attempt?, reason?, error?, seconds?}. Fields are added, never renamed or removed."`
}

func (tailCommand) Help() string {
	return `Prints what happens from now on, until it is interrupted: each event that is inserted, each attempt that does not deliver, and what
becomes of each delivery. It looks once a second. Up to 1000 deliveries that have not ended are followed.`
}

func (cmd tailCommand) Run(inv *cli.Invocation) error {
	return config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		tail, err := outbox.Tail(ctx, ops.TailFilter{Destination: cmd.Destination, Type: cmd.Type, Key: cmd.Key})
		if err != nil {
			return err
		}
		fmt.Fprintln(inv.Stderr, "following; interrupt it to end")
		return cli.EverySecond(ctx, func() error {
			moments, err := tail.Look(ctx)
			if err != nil {
				return err
			}
			return cmd.print(inv.Stdout, moments)
		})
	})
}

func (cmd tailCommand) print(w io.Writer, moments []ops.TailMoment) error {
	for _, m := range moments {
		if cmd.JSON {
			line, err := json.Marshal(m)
			if err != nil {
				return err
			}
			if _, err := (output.JSONWriter{Writer: w}).Write(append(line, '\n')); err != nil {
				return err
			}
			continue
		}
		where := ""
		if m.Destination != "" {
			where = "  " + m.Destination
		}
		if _, err := fmt.Fprintf(w, "%s%s  %s\n", m.At.UTC().Format("15:04:05.000"), where, output.Printable(m.Text)); err != nil {
			return err
		}
	}
	return nil
}
