package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"
)

type statusCmd struct {
	databaseFlags
	Name        string `placeholder:"NAME" help:"With --healthcheck: the relay that must live. Default: relay.name, or the host's name."`
	JSON        bool   `help:"Print JSON." xor:"output"`
	Healthcheck bool   `help:"Print one line; exit 0 only if the database answers, has the right schema, and this relay lives." xor:"output"`
}

func (statusCmd) Help() string {
	return `--json prints one object. Fields are added, never renamed or removed:

  destinations   [{destination, pending, due, in_flight, retrying, failed, lag_seconds, paused, paused_reason?}]
                 due, in_flight and retrying are parts of pending; lag_seconds is the age of the oldest due delivery
  parked         deliveries that match no route
  relays         [{instance, name, version, started_at, heartbeat_age_seconds, idle}]
  alerts         [{rule, subject, count, opened_at, first_event_id, first_error}], the open ones; ids are strings`
}

const (
	// staleAfter is how old the heartbeat of a relay that lives can become at most; it beats every second.
	staleAfter = 10 * time.Second
	// healthTimeout bounds a health check, whose caller waits.
	healthTimeout = 5 * time.Second
)

func (cmd statusCmd) Run(inv *invocation) error {
	c, err := inv.config("database", "relay.name")
	if err != nil {
		return err
	}
	ctx := inv.ctx
	if cmd.Healthcheck {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, healthTimeout)
		defer cancel()
	}
	status, err := readStatus(ctx, c)
	switch {
	case cmd.Healthcheck && errors.Is(err, context.DeadlineExceeded):
		return exitError{code: exitDatabase, err: fmt.Errorf("the database did not answer within %s", healthTimeout)}
	case err != nil:
		return err
	case cmd.Healthcheck:
		return healthy(inv.Stdout, status, get[string](c, "relay.name"))
	case cmd.JSON:
		return writeJSON(inv.Stdout, status)
	}
	return printStatus(inv.Stdout, status)
}

// readStatus returns what stands in the outbox, with empty lists in place of absent ones.
func readStatus(ctx context.Context, c *config) (relay.Status, error) {
	pool, err := c.open(ctx)
	if err != nil {
		return relay.Status{}, err
	}
	defer pool.Close()
	ops := relay.NewOps(pool)
	if err := ops.CheckSchema(ctx); err != nil {
		return relay.Status{}, err
	}
	status, err := ops.Status(ctx)
	if err != nil {
		return relay.Status{}, err
	}
	if status.Destinations == nil {
		status.Destinations = []relay.DestinationStatus{}
	}
	if status.Relays == nil {
		status.Relays = []relay.RelayStatus{}
	}
	if status.Alerts == nil {
		status.Alerts = []relay.Alert{}
	}
	return status, nil
}

// healthy prints a line if the relay of that name lives; several may share it, and one is enough.
func healthy(w io.Writer, status relay.Status, name string) error {
	age := math.Inf(1)
	for _, r := range status.Relays {
		if r.Name == name {
			age = min(age, r.HeartbeatAgeSeconds)
		}
	}
	switch {
	case math.IsInf(age, 1):
		return fmt.Errorf("no relay named %q is registered in the database", name)
	case age >= staleAfter.Seconds():
		return fmt.Errorf("relay %q has not been heard of for %s", name, age2text(age))
	}
	_, err := fmt.Fprintf(w, "ok: relay %q was heard of %s ago\n", name, age2text(age))
	return err
}

func printStatus(w io.Writer, s relay.Status) error {
	if len(s.Destinations) == 0 {
		fmt.Fprintln(w, "No destination is known yet: a relay writes them here when it starts.")
	} else {
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(table, "DESTINATION\tPENDING\tDUE\tIN FLIGHT\tRETRYING\tFAILED\tLAG\tPAUSED\t")
		for _, d := range s.Destinations {
			paused := "no"
			if d.Paused {
				paused = strings.TrimSuffix("yes: "+printable(d.PausedReason), ": ")
			}
			fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t\n", printable(d.Destination),
				d.Pending, d.Due, d.InFlight, d.Retrying, d.Failed, age2text(d.LagSeconds), paused)
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintf(w, "\nParked: %d\nRelays: %d\n", s.Parked, len(s.Relays))
	for _, r := range s.Relays {
		state := "busy"
		switch {
		case r.HeartbeatAgeSeconds >= staleAfter.Seconds():
			state = "silent"
		case r.Idle:
			state = "idle"
		}
		fmt.Fprintf(w, "  %d %s %s, %s, started %s, heard of %s ago\n", r.Instance, printable(r.Name), printable(r.Version),
			state, r.StartedAt.UTC().Format(time.RFC3339), age2text(r.HeartbeatAgeSeconds))
	}
	fmt.Fprintf(w, "Open alerts: %d\n", len(s.Alerts))
	for _, a := range s.Alerts {
		fmt.Fprintf(w, "  %s %s: %d since %s, first event %d: %s\n", printable(a.Rule), printable(a.Subject), a.Count,
			a.OpenedAt.UTC().Format(time.RFC3339), a.FirstEventID, printable(a.FirstError))
	}
	_, err := fmt.Fprintf(w, "\n%s\n", nextStep(s))
	return err
}

// nextStep says what to do about the most urgent of what the status shows.
func nextStep(s relay.Status) string {
	alive := false
	for _, r := range s.Relays {
		alive = alive || r.HeartbeatAgeSeconds < staleAfter.Seconds()
	}
	if !alive {
		return "No relay is running. Start one: outbox-relay run"
	}
	for _, d := range s.Destinations {
		if d.Failed > 0 {
			return fmt.Sprintf("%d failed for %q. See why: outbox-relay events list --status failed --destination %s",
				d.Failed, printable(d.Destination), shellWord(printable(d.Destination)))
		}
	}
	if s.Parked > 0 {
		return fmt.Sprintf("%d match no route. See which: outbox-relay events list --parked; then add a route and restart the relay.", s.Parked)
	}
	for _, d := range s.Destinations {
		if d.Paused {
			return fmt.Sprintf("%q is paused: nothing is sent there.", printable(d.Destination))
		}
	}
	return "All is well."
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
	return shortDuration(d.Round(time.Second))
}
