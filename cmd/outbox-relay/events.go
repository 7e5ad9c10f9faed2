package main

import (
	"context"
	"fmt"
	"io"

	"github.com/outbox-relay/outbox-relay/relay/ops"
)

type eventsCmd struct {
	List eventsListCmd `cmd:"" help:"List deliveries, the newest first."`
	Show eventsShowCmd `cmd:"" help:"Show one event: its deliveries, and the attempts that did not deliver."`

	CreateDeliveries eventsCreateCmd `cmd:"" help:"Create the deliveries of events that have none, since the trigger did not run."`
}

type eventsListCmd struct {
	databaseFlags
	Status      string `enum:"pending,delivered,failed,discarded,any" default:"any" help:"pending, delivered, failed, discarded or any."`
	Destination string `placeholder:"NAME" xor:"where" help:"Only deliveries to this destination."`
	Parked      bool   `xor:"where" help:"Only deliveries that match no route."`
	Type        string `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Reason      string `placeholder:"REASON" help:"Only deliveries whose last attempt ended so: rejected, timeout, …"`
	OrderingKey string `placeholder:"KEY" help:"Only events with this ordering key."`
	timeFlags
	Limit int  `default:"50" help:"How many at most."`
	JSON  bool `help:"Print JSON: an array of deliveries. Fields are added, never renamed or removed."`
}

func (cmd eventsListCmd) Run(inv *invocation) error {
	if cmd.Limit < 1 || cmd.Limit > 10_000 {
		return usagef("--limit: %d is out of range; write 1 to 10000", cmd.Limit)
	}
	if err := cmd.check(); err != nil {
		return err
	}
	filter := ops.DeliveryFilter{
		Status: cmd.Status, Destination: cmd.Destination, Parked: cmd.Parked, Type: cmd.Type, Reason: cmd.Reason,
		OrderingKey: cmd.OrderingKey, Limit: cmd.Limit,
	}
	if cmd.Status == "any" {
		filter.Status = ""
	}
	var list []ops.Delivery
	err := inv.ask(func(ctx context.Context, outbox *ops.Outbox) (err error) {
		if filter.Since, filter.Until, err = cmd.bounds(ctx, outbox); err != nil {
			return err
		}
		list, err = outbox.Deliveries(ctx, filter)
		return err
	})
	if err != nil {
		return err
	}
	return show(inv.Stdout, cmd.JSON, list, printDeliveries)
}

type eventsShowCmd struct {
	databaseFlags
	ID   int64 `arg:"" name:"event-id" help:"The event's id, as in X-Outbox-Event-Id."`
	JSON bool  `help:"Print JSON: {deliveries, attempts, waits}. Fields are added, never renamed or removed."`
}

func (cmd eventsShowCmd) Run(inv *invocation) error {
	if cmd.ID < 1 {
		return usagef("%d is not the id of an event", cmd.ID)
	}
	var event ops.EventReport
	err := inv.ask(func(ctx context.Context, outbox *ops.Outbox) (err error) {
		event, err = outbox.Event(ctx, cmd.ID)
		return err
	})
	switch {
	case err != nil:
		return err
	case len(event.Deliveries) == 0:
		return fmt.Errorf("event %d has no delivery: it does not exist, was archived, or needs outbox-relay events create-deliveries", cmd.ID)
	}
	return show(inv.Stdout, cmd.JSON, event, printEvent)
}

func printEvent(w io.Writer, shown ops.EventReport) error {
	if err := printDeliveries(w, shown.Deliveries); err != nil {
		return err
	}
	if len(shown.Waits) > 0 {
		fmt.Fprintln(w, "\nWhy it waits:")
		for _, wait := range shown.Waits {
			fmt.Fprintf(w, "  %s: %s\n", orParked(wait.Destination), wait.Text)
		}
	}
	if len(shown.Attempts) == 0 {
		return nil
	}
	fmt.Fprintln(w, "\nAttempts that did not deliver:")
	return printTable(w, "", "STARTED\tDESTINATION\tATTEMPT\tTOOK\tOUTCOME\tREASON\tERROR", shown.Attempts, func(a ops.Attempt) []any {
		return []any{a.StartedAt, a.Destination, a.Attempt, fmt.Sprintf("%dms", a.DurationMS), a.Outcome, a.Reason, a.Error}
	})
}

// ask connects, checks the schema and lets f ask its questions.
func (inv *invocation) ask(f func(context.Context, *ops.Outbox) error) error {
	c, err := inv.config("database")
	if err != nil {
		return err
	}
	return inv.askWith(c, f)
}

// askWith is ask for commands that need more of the configuration.
func (inv *invocation) askWith(c *config, f func(context.Context, *ops.Outbox) error) error {
	return c.withOps(inv.ctx, func(outbox *ops.Outbox) error {
		if err := inv.warnQuarantined(outbox, c.relay.Environment); err != nil {
			return err
		}
		return f(inv.ctx, outbox.As(inv.actor()))
	})
}

func printDeliveries(w io.Writer, list []ops.Delivery) error {
	const header = "EVENT\tTYPE\tKEY\tDESTINATION\tSTATUS\tATTEMPTS\tNEXT OR LAST\tREASON\tLAST ERROR"
	return printTable(w, "No delivery matches.", header, list, func(d ops.Delivery) []any {
		when := d.NextAttemptAt
		if d.Status != "pending" && d.LastAttemptAt != nil {
			when = *d.LastAttemptAt
		}
		return []any{d.EventID, d.EventType, d.IdempotencyKey, orParked(d.Destination), d.Status, d.Attempts, when, d.LastReason, d.LastError}
	})
}
