package events

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Command is the command events.
type Command struct {
	List listCommand `cmd:"" help:"List deliveries, the newest first."`
	Show showCommand `cmd:"" help:"Show one event: what was inserted, its deliveries, and the attempts that did not deliver."`
	Tail tailCommand `cmd:"" help:"Print what happens from now on."`

	CreateDeliveries createCommand `cmd:"" help:"Create the deliveries of events that have none, and that no relay takes."`
}

type listCommand struct {
	config.DatabaseFlags
	Status      string `enum:"pending,retrying,parked,delivered,failed,discarded,any,held,paused,unserved,trying,slowed,failing,waiting,blocked" default:"any" help:"pending, retrying (pending after an attempt), parked (as --parked), delivered, failed, discarded or any."`
	Destination string `placeholder:"NAME" xor:"where" help:"Only deliveries to this destination."`
	Parked      bool   `xor:"where" help:"Only deliveries that match no route."`
	Type        string `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Reason      string `placeholder:"REASON" help:"Only deliveries whose last attempt ended so: rejected, timeout, …"`
	OrderingKey string `placeholder:"KEY" help:"Only events with this ordering key."`
	Key         string `placeholder:"KEY" xor:"event" help:"Only the event with this idempotency key."`
	Reference   string `placeholder:"REFERENCE" xor:"event" help:"Only events with this related reference; it is looked for from the newest event on."`
	bulk.TimeFlags
	After string `placeholder:"EVENT.DESTINATION" help:"Only what follows this delivery, such as the last one of a page before."`
	Limit int    `default:"50" help:"How many at most."`
	JSON  bool   `help:"Print JSON: an array of deliveries. Fields are added, never renamed or removed."`
}

// statusIn is the status of the deliveries that a destination in some state is about.
var statusIn = map[string]string{
	"held": "pending", "paused": "pending", "unserved": "pending", "trying": "pending", "slowed": "pending", "waiting": "pending", "failing": "retrying", "blocked": "failed",
}

func (cmd listCommand) Run(inv *cli.Invocation) error {
	if cmd.Limit < 1 || cmd.Limit > 10_000 {
		return cli.Usagef("--limit: %d is out of range; write 1 to 10000", cmd.Limit)
	}
	if err := cmd.Check(); err != nil {
		return err
	}
	if status, isState := statusIn[cmd.Status]; isState {
		return cli.Usagef("--status: %q is the state of a destination, as status prints it; its deliveries: --status %s --destination %s", cmd.Status, status, cmp.Or(cmd.Destination, "NAME"))
	}
	if cmd.Status == "parked" {
		if cmd.Destination != "" {
			return cli.Usagef("--status parked and --destination can't be used together: what is parked has no destination")
		}
		cmd.Status, cmd.Parked = "pending", true
	}
	filter, err := cmd.filter()
	if err != nil {
		return err
	}
	var page ops.DeliveryPage
	var untaken ops.Untaken
	err = config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		if filter.Since, filter.Until, err = cmd.Bounds(ctx, outbox); err != nil {
			return err
		}
		page, err = outbox.Deliveries(ctx, filter)
		if err == nil && len(page.Deliveries) == 0 {
			err = refuseUnknown(ctx, outbox, cmd.Destination, cmd.Reason, cmd.Type)
		}
		if err == nil && cmd.After == "" && (filter.Status == "" || filter.Status == "pending" && filter.Attempts == 0) {
			untaken, err = outbox.Untaken(ctx)
		}
		return err
	})
	if err != nil {
		return err
	}
	if untaken.Events > 0 {
		fmt.Fprintf(inv.Stderr, "Not listed: %s not routed yet, and so without deliveries.\n", plain.Plural(untaken.Events, "event is", "events are"))
	}
	if err := output.Show(inv.Stdout, cmd.JSON, output.OrEmpty(page.Deliveries), printDeliveries); err != nil || page.Searched == nil {
		return err
	}
	created := ""
	if at := page.Searched.CreatedAt; at != nil {
		created = " of " + output.Cell(*at)
	}
	_, err = fmt.Fprintf(inv.Stderr, "Searched back to event %d%s; to continue, repeat the command with --after %s\n", page.Searched.EventID, created, page.Next)
	return err
}

// filter returns what to list, but for the times.
func (cmd listCommand) filter() (ops.DeliveryFilter, error) {
	filter := ops.DeliveryFilter{
		Status: cmd.Status, Destination: cmd.Destination, Parked: cmd.Parked, Type: cmd.Type, Reason: cmd.Reason,
		OrderingKey: cmd.OrderingKey, Key: cmd.Key, Related: cmd.Reference, Limit: cmd.Limit, Among: searchedRows,
	}
	if cmd.After != "" {
		var good bool
		if filter.After, good = ops.ParsePosition(cmd.After); !good {
			return filter, cli.Usagef("--after: %q is no position; write the id of an event, a full stop, and a destination", cmd.After)
		}
	}
	switch cmd.Status {
	case "any":
		filter.Status = ""
	case "retrying": // as the status and the page call them
		filter.Status, filter.Attempts = "pending", 1
	}
	return filter, nil
}

// searchedRows is among how many deliveries a list looks for what no index leads to.
const searchedRows = 100_000

// refuseUnknown returns an error about the names in a filter that the outbox does not know. It is
// asked when nothing matches: an empty list would say that all is well where a name was mistyped.
func refuseUnknown(ctx context.Context, outbox *ops.Outbox, destination, reason, eventType string) error {
	unknown, err := outbox.UnknownNames(ctx, destination, reason, eventType)
	if err != nil || len(unknown) == 0 {
		return err
	}
	u := unknown[0]
	hint := settings.DidYouMean(u.Name, u.Known)
	if hint == "" && len(u.Known) > 0 && len(u.Known) <= 40 {
		hint = "; there are " + strings.Join(u.Known, ", ")
	}
	if u.What == "type" {
		return fmt.Errorf("no route and none of the newest events has the type %q%s", u.Name, hint)
	}
	return fmt.Errorf("there is no %s %q%s", u.What, u.Name, hint)
}

type showCommand struct {
	config.DatabaseFlags
	eventArg
	Payload bool `help:"Show the payload too. Who did is logged."`
	JSON    bool `help:"Print JSON: {event, deliveries, attempts, waits, replays}. Fields are added, never renamed or removed."`
}

// An eventArg names one event.
type eventArg struct {
	Event string `arg:"" name:"event" help:"The event's id, as in X-Outbox-Event-Id; or its idempotency key; or its related reference, if no other event has it."`
}

// report reads the event that is meant, and its payload if payload is true.
func (arg eventArg) report(ctx context.Context, inv *cli.Invocation, outbox *ops.Outbox, payload bool) (report ops.EventReport, err error) {
	id, err := arg.find(ctx, outbox)
	if err == nil && strconv.FormatInt(id, 10) == arg.Event {
		err = noteOtherKeys(ctx, inv, outbox, []string{arg.Event})
	}
	switch {
	case err != nil:
		return report, err
	case payload:
		report, err = outbox.Reveal(ctx, id)
		if pg.HasCode(err, "42501") { // insufficient_privilege
			err = fmt.Errorf("%w; run migrations/roles.sql and grant this login outbox_support", err)
		}
		return report, err
	}
	return outbox.Event(ctx, id)
}

// find returns the id of the event that is meant.
func (arg eventArg) find(ctx context.Context, outbox *ops.Outbox) (id int64, err error) {
	ids, err := outbox.FindEvents(ctx, arg.Event)
	switch {
	case err != nil:
		return 0, err
	case len(ids) > 1:
		var names []string
		for _, id := range ids {
			names = append(names, strconv.FormatInt(id, 10))
		}
		return 0, fmt.Errorf("several events have the related reference %q: %s; name one by its id, or list them: outbox-relay events list %s",
			arg.Event, strings.Join(names, ", "), plain.ShellFlag("--reference", arg.Event))
	}
	return ids[0], nil
}

// maxNotedIDs is for how many ids [noteOtherKeys] looks.
const maxNotedIDs = 100

// noteOtherKeys says of each argument that is the id of an event when it is the idempotency key of
// another event, too: an operator who has the number of an invoice in hand may mean that one.
func noteOtherKeys(ctx context.Context, inv *cli.Invocation, outbox *ops.Outbox, args []string) error {
	for _, text := range args[:min(len(args), maxNotedIDs)] {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil || id < 1 { // it is a name
			continue
		}
		others, err := outbox.EventsOfKey(ctx, text)
		if err != nil {
			return err
		}
		for _, other := range others {
			if other != id {
				fmt.Fprintf(inv.Stderr, "Note: %[1]s is taken as the id of an event; event %[2]d has it as its idempotency key: to name that one, write %[2]d.\n", text, other)
			}
		}
	}
	return nil
}

func (cmd showCommand) Run(inv *cli.Invocation) error {
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	var report ops.EventReport
	err = c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		report, err = cmd.report(ctx, inv, outbox, cmd.Payload)
		return err
	})
	if err != nil {
		return err
	}
	if cmd.Payload {
		c.Audit(inv, "show payload").Int64("event_id", report.Event.ID).Msg("audit")
	}
	return output.Show(inv.Stdout, cmd.JSON, report, printEvent)
}

func printEvent(w io.Writer, shown ops.EventReport) error {
	printInserted(w, shown.Event)
	if len(shown.Deliveries) == 0 {
		if printWaits(w, shown.Waits); len(shown.Waits) == 0 {
			fmt.Fprintln(w, "\nIt has no delivery, so that nothing sends it: outbox-relay events create-deliveries")
		}
		return nil
	}
	fmt.Fprintln(w)
	err := output.Table(w, "", "DESTINATION\tSTATUS\tATTEMPTS\tNEXT OR LAST\tAFTER DUE\tREASON\tLAST ERROR", shown.Deliveries, func(d ops.Delivery) []any {
		return []any{orParked(d.Destination), d.Status, d.Attempts, nextOrLast(d), cmp.Or(d.Latency(), "-"), d.LastReason, d.LastError}
	})
	if err != nil {
		return err
	}
	printWaits(w, shown.Waits)
	if len(shown.Attempts) == 0 {
		return nil
	}
	fmt.Fprintln(w, "\nAttempts that did not deliver:")
	return output.Table(w, "", "STARTED\tDESTINATION\tATTEMPT\tTOOK\tOUTCOME\tREASON\tERROR", shown.Attempts, func(a ops.Attempt) []any {
		return []any{a.StartedAt, a.Destination, a.Attempt, fmt.Sprintf("%dms", a.DurationMS), a.Outcome, a.Reason, a.Error}
	})
}

// printInserted prints what the producer inserted.
func printInserted(w io.Writer, e ops.Event) {
	fmt.Fprintf(w, "Event %d", e.ID)
	if e.Type == "" {
		fmt.Fprintln(w, ": its row is gone from outbox")
		return
	}
	fmt.Fprintf(w, ": %s, version %d\n", e.Type, e.Version)
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "  %-16s %s\n", name, value)
		}
	}
	line("key", e.IdempotencyKey)
	line("ordering key", plain.OrBlank(e.OrderingKey))
	line("reference", plain.OrBlank(e.RelatedReference))
	line("created", output.Cell(e.CreatedAt))
	if e.AvailableAt.After(e.CreatedAt) {
		line("not before", output.Cell(e.AvailableAt))
	}
	if e.ArchivedAt != nil {
		line("archived", output.Cell(e.ArchivedAt))
	}
	for _, name := range e.HeaderNames {
		value := "not shown"
		if e.Headers != nil {
			value = e.Headers[name]
		}
		line("header", name+": "+value)
	}
	if e.Payload == nil {
		line("payload", plain.Plural(e.PayloadBytes, "byte", "bytes")+", not shown; add --payload")
	} else {
		line("payload", *e.Payload)
	}
}

func printWaits(w io.Writer, waits []ops.Wait) {
	if len(waits) > 0 {
		fmt.Fprintln(w, "\nWhy it waits:")
	}
	for _, wait := range waits {
		if wait.Destination == "" { // parked or not routed, as the text says
			fmt.Fprintf(w, "  %s\n", wait.Text)
			continue
		}
		fmt.Fprintf(w, "  %s: %s\n", wait.Destination, wait.Text)
	}
}

// nextOrLast is when a pending delivery is attempted next, or any other was attempted last.
func nextOrLast(d ops.Delivery) time.Time {
	if d.Status != "pending" && d.LastAttemptAt != nil {
		return *d.LastAttemptAt
	}
	return d.NextAttemptAt
}

func printDeliveries(w io.Writer, list []ops.Delivery) error {
	const header = "EVENT\tTYPE\tKEY\tDESTINATION\tSTATUS\tATTEMPTS\tREASON\tNEXT OR LAST\tLAST ERROR"
	return output.List(w, "No delivery matches.", header, list, func(d ops.Delivery) []any {
		return []any{d.EventID, d.EventType, d.IdempotencyKey, orParked(d.Destination), d.Status, d.Attempts, d.LastReason, nextOrLast(d), d.LastError}
	})
}
