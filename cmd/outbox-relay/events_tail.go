package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/ops"
)

type eventsTailCmd struct {
	databaseFlags
	JSON bool `help:"Print one JSON object a line: {at, destination, what, text}."`
}

func (eventsTailCmd) Help() string {
	return `Prints what happens from now on, until it is interrupted: each event that is inserted, each attempt that does not deliver, and what
becomes of each delivery. It looks once a second. Up to 1000 deliveries that have not ended are followed.`
}

// tailInterval is how often tail and status --watch look.
const tailInterval = time.Second

func (cmd eventsTailCmd) Run(inv *invocation) error {
	return inv.ask(func(ctx context.Context, outbox *ops.Outbox) error {
		tail, err := outbox.Tail(ctx)
		if err != nil {
			return err
		}
		return every(ctx, tailInterval, func() error {
			moments, err := tail.Look(ctx)
			if err != nil {
				return err
			}
			return cmd.print(inv.Stdout, moments)
		})
	})
}

func (cmd eventsTailCmd) print(w io.Writer, moments []ops.Moment) error {
	for _, m := range moments {
		if cmd.JSON {
			line, err := json.Marshal(m)
			if err != nil {
				return err
			}
			if _, err := (jsonWriter{w}).Write(append(line, '\n')); err != nil {
				return err
			}
			continue
		}
		where := ""
		if m.Destination != "" {
			where = "  " + m.Destination
		}
		if _, err := fmt.Fprintf(w, "%s%s  %s\n", m.At.UTC().Format("15:04:05.000"), where, printable(m.Text)); err != nil {
			return err
		}
	}
	return nil
}

// every runs f at once and then at every interval, until ctx is done, which is no error, or f fails.
func every(ctx context.Context, interval time.Duration, f func() error) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := f(); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}
