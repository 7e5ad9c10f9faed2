package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
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
	JSON        bool   `help:"Print JSON." xor:"output"`
	Watch       bool   `help:"Print it again every second, until it is interrupted." xor:"output"`
	Healthcheck bool   `help:"Print one line; exit 0 only if the database answers, has the right schema, and this relay lives and is not quarantined." xor:"output"`
}

func (Command) Help() string {
	return `--json prints one object. Fields are added, never renamed or removed:

  destinations   [{destination, pending, due, in_flight, retrying, failed, lag_seconds, paused, paused_reason?, paused_at?,
                 replays, blocked_keys, blocked_seconds, routed, breaker, breaker_opened_at?, breaker_seconds?, breaker_error?,
                 served, retry_event_id, retry_reason?, retry_error?, failed_unsendable, failed_reason?, failed_error?,
                 retry_at?, failed_at?, last_delivered_at?,
                 waiting_behind: [{event_id, waiting, key, status, attempts, due_in_seconds, reason?}]}]
                 each count ends at 10001, failed and failed_unsendable at 1001; due, in_flight, retrying and replays are parts of pending; lag_seconds is the
                 age of the oldest due delivery that no earlier one of its ordering key blocks, or of an event that is not routed yet
                 and has a route there, without replays; blocked_keys counts ordering keys that wait behind a failed delivery, up
                 to 10001; waiting_behind names up to three events that failed and block their key for longest, and up to three
                 that are not due and have most behind them; routed says whether a route leads there; breaker is
                 closed, open (held: the destination is down) or half_open (being tried); served says whether a running
                 relay has the destination: what is pending for another one is unserved; retry_… are of the latest attempt
                 of those that are retried; failed_unsendable counts events that can never be sent; last_delivered_at is
                 looked for among the newest 1000 deliveries and around retry_event_id
  untaken        {events, oldest_seconds}: events that are not routed yet, since no relay has taken them, and the age of the oldest
  parked         deliveries that match no route
  relays         [{instance, name, version, started_at, heartbeat_age_seconds, idle, session, in_flight, quarantined?,
                 destinations, reload_error?, reload_failed_at?, refused_by?}]
  differences?   [{destination, secrets, relays}]: relays that have different settings of a destination; secrets: nothing else differs
  refusals?      [{destination, relays, error, seconds}]: relays that a destination refuses while another relay may be accepted
  alerts         [{rule, subject, count, opened_at, began_at, database, returned?, first_event_id?, first_error?, detail?,
                 acknowledged_by?, silent_until?}], the open ones; ids are strings
  quarantined?   why relays do nothing on this database; see outbox-relay identity show
  advice         [{why, subject, level, text, remedy, commands}]: what is wrong and what to do, the most urgent first: level is
                 critical, warning or notice; empty if all is well`
}

// healthTimeout bounds a health check, whose caller waits.
const healthTimeout = 5 * time.Second

func (cmd Command) Run(inv *cli.Invocation) error {
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
			if cmd.Watch {
				output.ClearScreen(inv.Stdout)
			}
			return output.Show(inv.Stdout, cmd.JSON, status, printStatus)
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
	return fmt.Errorf("relay %q was last seen %s ago", name, output.Age(latest.HeartbeatAgeSeconds))
}

func printStatus(w io.Writer, s ops.Status) error {
	const header = "DESTINATION\tPENDING\tDUE\tIN FLIGHT\tRETRY\tREPLAY\tFAILED\tLAG\tSTATE\t"
	shown := first(s)
	err := output.Table(w, "No destination is known yet: a relay writes them here when it starts.", header, shown, func(d ops.DestinationStatus) []any {
		return []any{d.Destination, upTo(d.Pending), upTo(d.Due), upTo(d.InFlight), upTo(d.Retrying), upTo(d.Replays), failedUpTo(d.Failed), output.Age(d.LagSeconds), d.State()}
	})
	if err != nil {
		return err
	}
	if left := len(s.Destinations) - len(shown); left > 0 {
		fmt.Fprintf(w, "%s: outbox-relay status --json\n", plain.Plural(left, "more destination", "more destinations"))
	}
	for _, d := range shown {
		printLaneNotes(w, d)
	}
	fmt.Fprintf(w, "\nNot yet routed: %s\nParked: %s\nRelays: %d\n", unrouted(s.Untaken), upTo(s.Parked), len(s.Relays))
	for _, r := range s.Relays {
		fmt.Fprintf(w, "  %d %s %s, %s, started %s, last seen %s ago\n", r.Instance, r.Name, r.Version,
			r.State(), r.StartedAt.UTC().Format(time.RFC3339), output.Age(r.HeartbeatAgeSeconds))
	}
	fmt.Fprintf(w, "Open alerts: %d\n", len(s.Alerts))
	for i, a := range s.Alerts {
		if i == maxDestinations {
			fmt.Fprintf(w, "  and %d more\n", len(s.Alerts)-i)
			break
		}
		fmt.Fprintf(w, "  %s %s: %d since %s%s%s%s\n", a.Rule, a.Subject, a.Count,
			a.OpenedAt.UTC().Format(time.RFC3339), firstEvent(a.FirstEventID), quiet(a), output.AfterColon(cmp.Or(a.FirstError, a.Detail)))
	}
	if len(s.Alerts) > 0 && len(s.Advice) == 0 {
		fmt.Fprintln(w, "What they are about is over: they close soon.")
	}
	fmt.Fprintln(w)
	return printAdvice(w, s.Advice)
}

// maxDestinations is how many destinations a person is shown.
const maxDestinations = 100

// first returns the destinations to show, by name: of too many, those that are in trouble, and then those for which most is pending.
func first(s ops.Status) []ops.DestinationStatus {
	if len(s.Destinations) <= maxDestinations {
		return s.Destinations
	}
	troubled := map[string]bool{}
	for _, a := range s.Advice {
		troubled[a.Subject] = true
	}
	rank := func(d ops.DestinationStatus) int64 {
		n := d.Pending + d.Failed
		if troubled[d.Destination] {
			n += math.MaxInt32
		}
		return n
	}
	shown := slices.Clone(s.Destinations)
	slices.SortStableFunc(shown, func(a, b ops.DestinationStatus) int { return cmp.Compare(rank(b), rank(a)) })
	shown = shown[:maxDestinations]
	slices.SortFunc(shown, func(a, b ops.DestinationStatus) int { return cmp.Compare(a.Destination, b.Destination) })
	return shown
}

// unrouted says how many events no relay has taken, and for how long the oldest waits.
func unrouted(u ops.Untaken) string {
	if u.Events == 0 {
		return "0"
	}
	return upTo(u.Events) + ", the oldest for " + output.Age(u.OldestSeconds)
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

// upTo writes a count of a status, which ends at 10,001.
func upTo(n int64) string {
	if n > 10_000 {
		return "10000+"
	}
	return strconv.FormatInt(n, 10)
}

// failedUpTo writes a count of failed deliveries, which ends at 1,001.
func failedUpTo(n int64) string {
	if n > ops.FailedTo {
		return "1000+"
	}
	return strconv.FormatInt(n, 10)
}

// printLaneNotes prints what the table has no room for.
func printLaneNotes(w io.Writer, d ops.DestinationStatus) {
	name := d.Destination
	if d.Paused {
		fmt.Fprintf(w, "  %s: paused%s%s\n", name, since(d.PausedAt), output.AfterColon(d.PausedReason))
	}
	if d.Breaker != "closed" && d.Breaker != "" {
		probe := "a probe is due"
		switch {
		case !d.Served:
			probe = "no running relay probes it"
		case d.Breaker == "half_open":
			probe = "a probe is under way"
		case d.BreakerSeconds > 0:
			probe = "next probe in " + output.Age(d.BreakerSeconds)
		}
		fmt.Fprintf(w, "  %s: held%s, %s%s\n", name, since(d.BreakerOpenedAt), probe, output.AfterColon(d.BreakerError))
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

// printAdvice prints what is wrong and what to do about it.
func printAdvice(w io.Writer, advice []ops.Advice) error {
	if len(advice) == 0 {
		output.Paint(w, output.Green)
		_, err := fmt.Fprintln(w, "All is well.")
		output.Paint(w, output.NoColor)
		return err
	}
	for i, a := range advice {
		if i == output.MaxAdvice {
			fmt.Fprintf(w, "\n%s; what to do: outbox-relay doctor\n", plain.Plural(len(advice)-i, "more problem", "more problems"))
		}
		output.Paint(w, output.Yellow)
		if i == maxDestinations {
			output.Paint(w, output.NoColor)
			fmt.Fprintf(w, "  and %d more: outbox-relay status --json\n", len(advice)-i)
			break
		}
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
	return nil
}
