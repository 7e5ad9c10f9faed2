package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Command is the command status.
type Command struct {
	config.DatabaseFlags
	Name        string `placeholder:"NAME" help:"With --healthcheck: the relay that must live. Default: relay.name, or the host's name."`
	Limit       int    `default:"100" help:"How many destinations at most, and how many of each other list, such as alerts: 1 to 10000. If there are more destinations, those in trouble come first, and then those with the largest backlog."`
	After       string `placeholder:"DESTINATION" help:"Only the destinations that follow this one, such as the last one of a page before."`
	Prefix      string `placeholder:"TEXT" help:"Only destinations whose name begins with this."`
	JSON        bool   `help:"Print JSON." xor:"output"`
	Watch       bool   `help:"Print it again every second, until it is interrupted." xor:"output"`
	Healthcheck bool   `help:"Print one line; exit 0 only if the database answers, has the right schema, and this relay lives and is not quarantined." xor:"output"`
}

func (Command) Help() string {
	return `With several entries in databases and without --database it prints a block for each, those with trouble first, and one line for each that is
well. --json prints {databases: [{database, status?, error?}]} then; --healthcheck succeeds while this relay lives in one of them.

--json prints one object. Fields are added, never renamed or removed:

  destinations   [{destination, state, pending, due, waiting, in_flight, retrying, failed, lag_seconds, paused, paused_reason?, paused_at?,
                 replays, blocked_keys, blocked_seconds, routed, breaker, breaker_opened_at?, breaker_seconds?, breaker_error?,
                 served, wait_until?, slowed_to?, retry_event_id?, retry_reason?, retry_error?, failed_unsendable, failed_reason?, failed_error?,
                 retry_at?, failed_at?, last_delivered_at?,
                 waiting_behind: [{event_id, waiting, key, status, attempts, due_in_seconds, reason?}]}]
                 each count ends at 10001, failed and failed_unsendable at 1001; due, in_flight, retrying and replays are parts of pending; lag_seconds is the
                 age of the oldest due delivery that no earlier one of its ordering key blocks, or of an event that is not routed yet
                 and has a route there, without replays; blocked_keys counts ordering keys that wait behind a failed delivery, up
                 to 10001; waiting_behind names up to three events that failed and block their key for longest, and up to three
                 that are not due and have most behind them; routed says whether a route leads there; breaker is
                 closed, open (held: the destination is down) or half_open (being tried); served says whether a running
                 relay has the destination: what is pending for another one is unserved; wait_until is when relays try it again that it
                 has asked to wait (Retry-After), and slowed_to how many requests a second they make because of its 429s; retry_… are of the latest attempt
                 of those that are retried; failed_unsendable counts events that cannot be sent as they are; last_delivered_at is
                 looked for among the newest 1000 deliveries and around retry_event_id
  destinations_total, destinations_left, next
                 how many destinations there are, how many of those asked for follow the last one listed, and --after of the
                 next page; empty: this is the last page
  untaken        {events, oldest_seconds}: events that are not routed yet, since no relay has taken them, and the age of the oldest
  parked         deliveries that match no route
  relays         [{relay_id, name, state, version, started_at, heartbeat_age_seconds, idle, session, in_flight, quarantined?,
                 destinations, destinations_left?, reload_error?, reload_failed_at?, refused_by?, refused_by_left?, asleep?}]
  differences?   [{destination, secrets, relays}]: relays that have different settings of a destination; secrets: nothing else differs
  refusals?      [{destination, relays, error, seconds}]: relays that a destination refuses while another relay may be accepted
  alerts         [{rule, subject, count, opened_at, began_at, database, returned?, first_event_id?, first_error?, detail?,
                 acknowledged_by?, silent_until?}], the open ones; ids are strings
  quarantined?   why relays do nothing on this database; see outbox-relay identity show
  advice         [{rule, subject, level, text, remedy, commands}]: what is wrong and what to do, the most urgent first: level is
                 critical, warning or notice; empty if all is well
  alerts_left, advice_left, differences_left?, refusals_left?
                 how many of these --limit has left out`
}

// maxLimit bounds --limit.
const maxLimit = 10_000

// healthTimeout bounds a health check, whose caller waits.
const healthTimeout = 5 * time.Second

func (cmd Command) Run(inv *cli.Invocation) error {
	if cmd.Limit < 1 || cmd.Limit > maxLimit {
		return cli.Usagef("--limit: %d is out of range; write 1 to %d", cmd.Limit, maxLimit)
	}
	if all := config.LoadAll(inv, "database", "relay.name"); len(all.Outboxes) > 0 && all.Err() == nil {
		return cmd.ofSeveral(inv, all)
	}
	c, err := config.ReadToLook(inv, "database", "relay.name")
	if err != nil {
		return err
	}
	if cmd.Healthcheck {
		return checkHealth(inv.Ctx, inv.Stdout, c)
	}
	return c.WithOutbox(inv.Ctx, func(outbox *ops.Outbox) error {
		look := func() error {
			status, err := outbox.Status(inv.Ctx, c.Relay.Environment)
			if err != nil {
				return err
			}
			if status, err = status.Bounded(ops.List{Prefix: cmd.Prefix, After: cmd.After, Limit: cmd.Limit}); err != nil {
				return cli.Usagef("--%w", err)
			}
			if cmd.Watch {
				output.ClearScreen(inv.Stdout)
			}
			return output.Show(inv.Stdout, cmd.JSON, status, cmd.printStatus)
		}
		if cmd.Watch {
			return cli.EverySecond(inv.Ctx, look)
		}
		return look()
	})
}

// checkHealth prints a line if this relay lives.
func checkHealth(ctx context.Context, w io.Writer, c *config.Config) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	var relays []ops.RelayStatus
	err := c.WithOutbox(ctx, func(outbox *ops.Outbox) (err error) {
		relays, err = outbox.LifeSigns(ctx) // which counts nothing: an orchestrator kills a relay whose check takes long
		return err
	})
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return cli.ExitError{Code: cli.ExitDatabase, Err: fmt.Errorf("the database did not answer within %s", healthTimeout)}
	case err != nil:
		return err
	}
	return healthy(w, relays, c.Relay.Name)
}

// healthy prints a line if the relay of that name lives; several may share it, and one is enough.
func healthy(w io.Writer, relays []ops.RelayStatus, name string) error {
	var latest *ops.RelayStatus // to write a heartbeat, of those that are not quarantined
	quarantined := ""
	for _, r := range relays {
		switch {
		case r.Name != name:
		case r.Quarantined == "" && (latest == nil || r.HeartbeatAgeSeconds < latest.HeartbeatAgeSeconds):
			latest = &r
		case r.Alive():
			quarantined = r.Quarantined
		}
	}
	switch {
	case latest != nil && latest.Alive():
		_, err := fmt.Fprintf(w, "ok: relay %q was last seen %s ago\n", name, output.Age(latest.HeartbeatAgeSeconds))
		return err
	case quarantined != "":
		return fmt.Errorf("relay %q is quarantined: %s; see: outbox-relay identity show", name, quarantined)
	case latest == nil:
		return fmt.Errorf("no relay named %q is registered in the database", name)
	}
	ended := ""
	if latest.Cut {
		ended = ", and its session has ended"
	}
	return fmt.Errorf("relay %q was last seen %s ago%s", name, output.Age(latest.HeartbeatAgeSeconds), ended)
}

func (cmd Command) printStatus(w io.Writer, s ops.Status) error {
	const header = "DESTINATION\tPENDING\tDUE\tIN FLIGHT\tRETRY\tREPLAY\tFAILED\tLAG\tSTATE\t"
	none := "No destination is known yet: a relay writes them here when it starts."
	if s.DestinationsTotal > 0 {
		none = "No destination has a name that begins so."
	}
	err := output.Table(w, none, header, s.Destinations, func(d ops.DestinationStatus) []any {
		return []any{d.Destination, upTo(d.Pending, most), upTo(d.Due, most), upTo(d.InFlight, most), upTo(d.Retrying, most), upTo(d.Replays, most), upTo(d.Failed, ops.FailedTo), output.Age(d.LagSeconds), d.State}
	})
	if err != nil {
		return err
	}
	if s.DestinationsLeft > 0 {
		fmt.Fprintf(w, "%s: outbox-relay status%s %s\n", plain.Plural(s.DestinationsLeft, "more destination", "more destinations"), cmd.sameList(), plain.ShellFlag("--after", s.Next))
	}
	alive := slices.ContainsFunc(s.Relays, ops.RelayStatus.Alive)
	for _, d := range s.Destinations {
		printLaneNotes(w, d, alive)
	}
	fmt.Fprintf(w, "\nNot yet routed: %s\nParked: %s\nRelays: %d\n", unrouted(s.Untaken), upTo(s.Parked, most), len(s.Relays))
	for _, r := range s.Relays {
		has := ""
		if r.State == "silent" && r.InFlight > 0 {
			has = fmt.Sprintf(", %s in flight", upTo(r.InFlight, most))
		}
		fmt.Fprintf(w, "  %d %s %s, %s, started %s, last seen %s ago%s\n", r.RelayID, r.Name, r.Version,
			r.State, r.StartedAt.UTC().Format(time.RFC3339), output.Age(r.HeartbeatAgeSeconds), has)
	}
	fmt.Fprintf(w, "Open alerts: %d\n", len(s.Alerts)+s.AlertsLeft)
	for _, a := range s.Alerts {
		times := ""
		if a.Count > 1 {
			times = fmt.Sprintf("%d times ", a.Count)
		}
		fmt.Fprintf(w, "  %s %s: %ssince %s%s%s%s\n", a.Rule, a.Subject, times,
			a.OpenedAt.UTC().Format(time.RFC3339), firstEvent(a.FirstEventID), quiet(a), output.AfterColon(cmp.Or(a.LastError, a.FirstError, a.Detail)))
	}
	if s.AlertsLeft > 0 {
		fmt.Fprintf(w, "  and %d more\n", s.AlertsLeft)
	}
	if len(s.Alerts) > 0 && len(s.Advice) == 0 {
		fmt.Fprintln(w, "What they are about is over: they close soon.")
	}
	fmt.Fprintln(w)
	return printAdvice(w, s.Advice, s.AdviceLeft)
}

// sameList returns the flags that choose the same destinations again, each after a blank.
func (cmd Command) sameList() (flags string) {
	if cmd.Prefix != "" {
		flags += " " + plain.ShellFlag("--prefix", cmd.Prefix)
	}
	if cmd.Limit != ops.MaxListed {
		flags += fmt.Sprintf(" --limit %d", cmd.Limit)
	}
	return flags
}

// unrouted says how many events no relay has taken, and for how long the oldest waits.
func unrouted(u ops.Untaken) string {
	if u.Events == 0 {
		return "0"
	}
	return upTo(u.Events, most) + ", the oldest for " + output.Age(u.OldestSeconds)
}

// quiet says why an alert is not sent; empty: it is.
func quiet(a alert.Alert) (text string) {
	if a.AcknowledgedBy != "" {
		text = ", acknowledged by " + a.AcknowledgedBy
	}
	if a.SilentUntil != nil {
		text += ", silent until " + a.SilentUntil.UTC().Format(time.RFC3339)
	}
	return text
}

// firstEvent names an alert's first event; empty: it has none.
func firstEvent(id int64) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf(", first event %d", id)
}

// most is up to which number a status counts, except for failed deliveries: [ops.FailedTo].
const most = 10_000

// upTo writes a count that ends behind a bound.
func upTo(n, bound int64) string {
	if n > bound {
		return fmt.Sprintf("%d+", bound)
	}
	return strconv.FormatInt(n, 10)
}

// printLaneNotes prints what the table has no room for. alive: a relay is running.
func printLaneNotes(w io.Writer, d ops.DestinationStatus, alive bool) {
	name := d.Destination
	if d.Paused {
		fmt.Fprintf(w, "  %s: paused%s%s\n", name, since(d.PausedAt), output.AfterColon(d.PausedReason))
	}
	if d.Served && d.Breaker != "closed" && d.Breaker != "" {
		probe := "a probe is due"
		switch {
		case !alive:
			probe = "no running relay probes it"
		case d.Breaker == "half_open" && d.WaitUntil == nil:
			probe = "a probe is under way"
		case d.Paused:
			probe = "no probe before it is resumed"
		case d.WaitUntil != nil:
			probe = "no probe before " + d.WaitUntil.UTC().Format(time.RFC3339) + ", as it has asked (Retry-After)"
		case d.BreakerSeconds > 0:
			probe = "next probe in " + output.Age(d.BreakerSeconds)
		}
		fmt.Fprintf(w, "  %s: held%s, %s%s\n", name, since(d.BreakerOpenedAt), probe, output.AfterColon(d.BreakerError))
	}
	switch {
	case d.WaitUntil != nil && d.Breaker == "closed":
		fmt.Fprintf(w, "  %s: asked to wait until %s (Retry-After)\n", name, d.WaitUntil.UTC().Format(time.RFC3339))
	case d.SlowedTo > 0 && d.Pending > 0:
		fmt.Fprintf(w, "  %s: slowed to %.3g/s by its 429s\n", name, d.SlowedTo)
	}
	if d.BlockedKeys > 0 {
		fmt.Fprintf(w, "  %s: ordering keys are blocked, the oldest for %s\n", name, output.Age(d.BlockedSeconds))
	}
}

func since(at *time.Time) string {
	if at == nil {
		return ""
	}
	return " since " + at.UTC().Format(time.RFC3339)
}

// printAdvice prints what is wrong and what to do about it. left counts the advice that follows.
func printAdvice(w io.Writer, advice []ops.Advice, left int) error {
	if len(advice) == 0 {
		output.Paint(w, output.Green)
		_, err := fmt.Fprintln(w, "All is well.")
		output.Paint(w, output.NoColor)
		return err
	}
	for i, a := range advice {
		if i == output.MaxAdvice {
			fmt.Fprintf(w, "\n%s; what to do: outbox-relay doctor\n", plain.Plural(len(advice)-i+left, "more problem", "more problems"))
		}
		output.Paint(w, output.Yellow)
		if i >= output.MaxAdvice {
			output.Prose(w, "  ", a.Text)
			output.Paint(w, output.NoColor)
			continue
		}
		output.Prose(w, "  ", a.String())
		output.Paint(w, output.NoColor)
		for _, command := range a.Commands {
			fmt.Fprintln(w, "  "+command)
		}
	}
	if left > 0 {
		fmt.Fprintf(w, "  and %d more\n", left)
	}
	return nil
}
