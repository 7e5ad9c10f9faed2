package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

type statusCmd struct {
	databaseFlags
	Name        string `placeholder:"NAME" help:"With --healthcheck: the relay that must live. Default: relay.name, or the host's name."`
	JSON        bool   `help:"Print JSON." xor:"output"`
	Healthcheck bool   `help:"Print one line; exit 0 only if the database answers, has the right schema, and this relay lives and is not quarantined." xor:"output"`
}

func (statusCmd) Help() string {
	return `--json prints one object. Fields are added, never renamed or removed:

  destinations   [{destination, pending, due, in_flight, retrying, failed, lag_seconds, paused, paused_reason?, paused_at?,
                 replays, blocked_keys, blocked_seconds, routed, breaker, breaker_opened_at?, breaker_seconds?, breaker_error?,
                 served}]
                 due, in_flight, retrying and replays are parts of pending; lag_seconds is the age of the oldest due
                 delivery; blocked_keys counts ordering keys that wait behind a failed delivery; routed says whether a
                 route leads there; breaker is closed, open (held: the destination is down) or half_open (being tried);
                 served says whether a running relay has the destination: what is pending for another one is unserved
  parked         deliveries that match no route
  relays         [{instance, name, version, started_at, heartbeat_age_seconds, idle, session, in_flight, quarantined?,
                 destinations}]
  alerts         [{rule, subject, count, opened_at, first_event_id, first_error}], the open ones; ids are strings
  quarantined?   why relays do nothing on this database; see outbox-relay identity show`
}

// healthTimeout bounds a health check, whose caller waits.
const healthTimeout = 5 * time.Second

func (cmd statusCmd) Run(inv *invocation) error {
	c, err := inv.config("database", "relay.name")
	if err != nil {
		return err
	}
	if cmd.Healthcheck {
		return checkHealth(inv.ctx, inv.Stdout, c)
	}
	return c.withOps(inv.ctx, func(outbox *ops.Outbox) error {
		status, err := outbox.Status(inv.ctx, c.relay.Environment)
		if err != nil {
			return err
		}
		return show(inv.Stdout, cmd.JSON, status, printStatus)
	})
}

// checkHealth prints a line if this relay lives.
func checkHealth(ctx context.Context, w io.Writer, c *config) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	var relays []ops.RelayStatus
	err := c.withOps(ctx, func(outbox *ops.Outbox) (err error) {
		relays, err = outbox.LifeSigns(ctx) // which counts nothing: an orchestrator kills a relay whose check takes long
		return err
	})
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return exitError{code: exitDatabase, err: fmt.Errorf("the database did not answer within %s", healthTimeout)}
	case err != nil:
		return err
	}
	return healthy(w, relays, c.relay.Name)
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
		_, err := fmt.Fprintf(w, "ok: relay %q was heard of %s ago\n", name, age2text(latest.HeartbeatAgeSeconds))
		return err
	case quarantined != "":
		return fmt.Errorf("relay %q is quarantined: %s; see: outbox-relay identity show", name, quarantined)
	case latest == nil:
		return fmt.Errorf("no relay named %q is registered in the database", name)
	}
	return fmt.Errorf("relay %q has not been heard of for %s", name, age2text(latest.HeartbeatAgeSeconds))
}

func printStatus(w io.Writer, s ops.Status) error {
	const header = "DESTINATION\tPENDING\tDUE\tFLYING\tRETRY\tREPLAY\tFAILED\tLAG\tSTATE\t"
	err := printTable(w, "No destination is known yet: a relay writes them here when it starts.", header, s.Destinations, func(d ops.DestinationStatus) []any {
		return []any{d.Destination, d.Pending, d.Due, d.InFlight, d.Retrying, d.Replays, d.Failed, age2text(d.LagSeconds), d.State()}
	})
	if err != nil {
		return err
	}
	for _, d := range s.Destinations {
		printLaneNotes(w, d)
	}
	fmt.Fprintf(w, "\nParked: %d\nRelays: %d\n", s.Parked, len(s.Relays))
	for _, r := range s.Relays {
		fmt.Fprintf(w, "  %d %s %s, %s, started %s, heard of %s ago\n", r.Instance, r.Name, r.Version,
			r.State(), r.StartedAt.UTC().Format(time.RFC3339), age2text(r.HeartbeatAgeSeconds))
	}
	fmt.Fprintf(w, "Open alerts: %d\n", len(s.Alerts))
	for _, a := range s.Alerts {
		fmt.Fprintf(w, "  %s %s: %d since %s%s%s\n", a.Rule, a.Subject, a.Count,
			a.OpenedAt.UTC().Format(time.RFC3339), firstEvent(a.FirstEventID), colon(cmp.Or(a.FirstError, a.Detail)))
	}
	_, err = fmt.Fprintf(w, "\n%s\n", strings.Join(nextSteps(s), "\n"))
	return err
}

// firstEvent names an alert's first event; empty: it has none.
func firstEvent(id int64) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf(", first event %d", id)
}

// printLaneNotes tells what the table has no room for.
func printLaneNotes(w io.Writer, d ops.DestinationStatus) {
	name := d.Destination
	if d.Paused {
		fmt.Fprintf(w, "  %s: paused%s%s\n", name, since(d.PausedAt), colon(d.PausedReason))
	}
	if d.Breaker != "closed" && d.Breaker != "" {
		probe := "a probe is due"
		switch {
		case !d.Served:
			probe = "no running relay probes it"
		case d.BreakerSeconds > 0:
			probe = "next probe in " + age2text(d.BreakerSeconds)
		}
		fmt.Fprintf(w, "  %s: held%s, %s%s\n", name, since(d.BreakerOpenedAt), probe, colon(d.BreakerError))
	}
	if d.BlockedKeys > 0 {
		fmt.Fprintf(w, "  %s: %s behind a failed delivery, the oldest for %s\n", name, waitingKeys(d.BlockedKeys), age2text(d.BlockedSeconds))
	}
}

// waitingKeys says how many ordering keys wait; they are counted up to 10,001.
func waitingKeys(n int64) string {
	if n > 10_000 {
		return plain.UpTo(n, 10_000) + " ordering keys wait"
	}
	return plain.Plural(n, "ordering key waits", "ordering keys wait")
}

func since(at *time.Time) string {
	if at == nil {
		return ""
	}
	return " since " + at.UTC().Format(time.RFC3339)
}

func colon(text string) string {
	if text == "" {
		return ""
	}
	return ": " + text
}

// maxSteps is how many next steps are shown; who has more to do begins with these.
const maxSteps = 6

// nextSteps says what to do about what the status shows, the most urgent first.
func nextSteps(s ops.Status) (steps []string) {
	add := func(format string, args ...any) { steps = append(steps, fmt.Sprintf(format, args...)) }
	alive := false
	for _, r := range s.Relays {
		alive = alive || r.Alive()
	}
	if s.Quarantined != "" {
		add("Nothing is claimed or sent: %s.\n  Decide what is to become of it: outbox-relay identity show", s.Quarantined)
	}
	if !alive {
		add("No relay is running. Start one: outbox-relay run")
	}
	for _, d := range s.Destinations {
		name := d.Destination
		word := shellWord(name)
		if d.Paused {
			add("%q is paused: nothing is sent there. To go on: outbox-relay resume %s", name, word)
		}
		if d.Served && (d.Breaker == "open" || d.Breaker == "half_open") {
			add("%q is down, its deliveries are held, and relays probe it. To send at once:\n  outbox-relay resume %s --reset-breaker", name, word)
		}
		if d.Failed > 0 {
			add("%s to %q failed. See why: outbox-relay events list --status failed --destination %s\n  Send again: outbox-relay replay --destination %s",
				plain.Plural(d.Failed, "delivery", "deliveries"), name, word, word)
		}
		if d.BlockedKeys > 0 {
			add("%s at %q. Replay the failed delivery, or skip it:\n  outbox-relay discard --destination %s --head-of-key KEY",
				waitingKeys(d.BlockedKeys), name, word)
		}
		if alive && !d.Served && d.Pending > 0 {
			add("%s unserved: no running relay has %q. Start one that has, or give them up:\n  outbox-relay discard --destination %s",
				plain.Plural(d.Pending, "delivery is", "deliveries are"), name, word)
		}
	}
	if slices.ContainsFunc(s.Alerts, func(a alert.Alert) bool { return a.Rule == alert.RuleRoutesChanged }) {
		add("The routes changed, and not all relays have the same. See which has which: outbox-relay routes list")
	}
	if s.Parked > 0 {
		add("%s no route. See which: outbox-relay events list --parked\n  Then add a route and reload the relays (SIGHUP).", plain.Plural(s.Parked, "event matches", "events match"))
	}
	switch {
	case len(steps) == 0 && len(s.Alerts) > 0:
		return []string{"Look at the open alerts above."}
	case len(steps) == 0:
		return []string{"All is well."}
	}
	return steps[:min(len(steps), maxSteps)]
}

// shellWord quotes a word for a shell, unless it needs no quotes.
func shellWord(word string) string {
	if strings.Trim(word, "abcdefghijklmnopqrstuvwxyz0123456789_-") == "" && word != "" {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// age2text writes seconds as a short duration, never negative: two clocks may disagree.
func age2text(seconds float64) string {
	d := time.Duration(max(seconds, 0) * float64(time.Second))
	switch {
	case d == 0:
		return "0s"
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return settings.ShortDuration(d.Round(time.Second))
}
