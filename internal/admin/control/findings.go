package control

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// A Level says how bad a finding is.
type Level string

// The levels, the worst first.
const (
	Critical Level = "critical" // something is not delivered until a person acts, or a receiver does
	Warning  Level = "warning"  // a person should look at it
	Notice   Level = "notice"   // the relay deals with it
)

// A Finding is one thing that is not as it should be, and what to do about it.
type Finding struct {
	Level Level  `json:"level"`
	Text  string `json:"text"`
	// Advice is what to do; one sentence or two.
	Advice string `json:"advice"`
	// Destination that it is about; empty: none, or all.
	Destination string `json:"destination"`
	// Status of the deliveries to look at, failed, retrying or parked; empty: none.
	Status string `json:"status"`
}

// Counted is up to how many deliveries of a kind the status counts at each destination.
const Counted = 10_000

// lagging is from when on a lag without another reason is worth a look.
const lagging = time.Minute

// Findings says what is wrong, the worst first. It returns none if all is well.
func Findings(s ops.Status) []Finding {
	all := []Finding{}
	pending, alive := s.Parked, 0
	for _, d := range s.Destinations {
		pending += d.Pending
	}
	for _, r := range s.Relays {
		if r.Alive() {
			alive++
		}
	}
	switch {
	case s.Quarantined != "":
		all = append(all, Finding{Level: Critical, Text: "Relays do nothing here: " + s.Quarantined, Advice: "If the database has moved for good, run: outbox-relay identity accept. On a copy, leave it so."})
	case alive == 0:
		level, text := Warning, "No relay is running."
		if pending > 0 {
			level, text = Critical, fmt.Sprintf("No relay is running, and %s.", waits(pending))
		}
		all = append(all, Finding{Level: level, Text: text, Advice: "Start one: outbox-relay run"})
	}
	for _, d := range s.Destinations {
		all = append(all, findingsOf(d, alive > 0)...)
	}
	if s.Parked > 0 {
		all = append(all, Finding{
			Level: Warning, Status: "parked",
			Text:   fmt.Sprintf("%s no route.", counted(s.Parked, "event matches", "events match")),
			Advice: "Add a route for the type and reload the relays, or discard them. Until then they wait.",
		})
	}
	slices.SortStableFunc(all, func(a, b Finding) int { return rank(a.Level) - rank(b.Level) })
	return all
}

func rank(level Level) int { return slices.Index([]Level{Critical, Warning, Notice}, level) }

// findingsOf says what is wrong with one destination. One cause hides its consequences: what is held also lags.
func findingsOf(d ops.DestinationStatus, relayRuns bool) (all []Finding) {
	add := func(level Level, status, advice, format string, args ...any) {
		all = append(all, Finding{Level: level, Destination: d.Destination, Status: status, Text: d.Destination + " " + fmt.Sprintf(format, args...), Advice: advice})
	}
	switch state := d.State(); {
	case state == "paused":
		reason := d.PausedReason
		if reason != "" {
			reason = " (" + reason + ")"
		}
		add(Warning, "", "Resume it when its receiver is ready. No attempt is spent meanwhile.", "is paused%s; %s.", reason, waits(d.Pending))
	case state == "unserved" && relayRuns:
		add(Critical, "", "Start a relay whose configuration has this destination, or discard what waits.", "is served by no running relay; %s.", waits(d.Pending))
	case state == "held", state == "trying":
		answer := ""
		if d.BreakerError != "" {
			answer = ": " + d.BreakerError
		}
		add(Critical, "", "Nothing is lost and no attempt is spent. The relay probes it and goes on by itself once it answers; reset the breaker to send at once.",
			"is down%s; %s.", answer, held(d.Pending))
	case d.BlockedKeys > 0, d.RetryRepair() != "": // what follows says why deliveries are late
	case d.LagSeconds >= lagging.Seconds() && relayRuns:
		add(Warning, "", "The receiver answers slower than events arrive, or a limit is too low: compare its latency with max_in_flight and rate_limit.",
			"lags by %s; %s.", plain.Span(time.Duration(d.LagSeconds*float64(time.Second))), waits(d.Pending))
	}
	if d.BlockedKeys > 0 {
		add(Warning, "failed", "Mend the receiver, then replay the failed event at the head of each key, or discard it.",
			"has %s behind a failed event.", counted(d.BlockedKeys, "ordering key that waits", "ordering keys that wait"))
	}
	if d.Failed > 0 {
		add(Warning, "failed", "Look at the reasons, mend the cause, then replay them.", "has %s%s.", counted(d.Failed, "failed delivery", "failed deliveries"), last(d.FailedError))
	}
	if d.Retrying > 0 && d.Breaker == "closed" {
		level, advice := Notice, "The relay tries again by itself. Look at the last answers if the number grows."
		if repair := d.RetryRepair(); repair != "" {
			level, advice = Warning, repair
		}
		add(level, "retrying", advice, "has %s%s.", counted(d.Retrying, "delivery that is retried", "deliveries that are retried"), last(d.RetryError))
	}
	return all
}

func waits(n int64) string {
	if n == 0 {
		return "nothing waits"
	}
	return counted(n, "delivery waits", "deliveries wait")
}

func held(n int64) string {
	if n == 0 {
		return "nothing is held"
	}
	return counted(n, "delivery is held", "deliveries are held")
}

// counted writes what the status counts up to a bound.
func counted(n int64, one, many string) string {
	if n > Counted {
		return fmt.Sprintf("more than %d %s", Counted, many)
	}
	return plain.Plural(n, one, many)
}

// last repeats what was answered last.
func last(text string) string {
	if text = strings.TrimRight(text, ". "); text == "" {
		return ""
	}
	return "; last: " + plain.Shorten(text, 160)
}
