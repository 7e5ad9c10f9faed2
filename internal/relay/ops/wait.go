package ops

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Wait is one reason for which a pending delivery has not been sent yet, or for which an event
// has no delivery yet.
type Wait struct {
	Destination string `json:"destination"` // empty: parked, or the event as a whole
	// Cause: untaken, in_hand, in_flight, parked, paused, breaker_open, slowed, behind, not_due,
	// no_relay, quarantined, unserved or due. What is a rule of package alert too has its name.
	// Names are added, never renamed.
	Cause string `json:"cause"`
	// Text explains it, and says what to do.
	Text string `json:"text"`
}

// Waits returns why an event has no deliveries yet, and why the pending ones have not been sent
// yet: every reason of each. A delivery without a reason to wait is due, and goes out with its
// relay's next claims.
func (o *Outbox) Waits(ctx context.Context, eventID int64) ([]Wait, error) {
	all := []Wait{}
	state, open, err := o.routing(ctx, eventID)
	if err != nil {
		return all, err
	}
	if open {
		all = append(all, state.reason())
	}
	list, err := o.waiting(ctx, eventID)
	for _, w := range list {
		all = append(all, w.reasons(eventID)...)
	}
	return all, err
}

// reason says where an event is that may lack deliveries.
func (s routeState) reason() Wait {
	if s.Range == 0 {
		return Wait{Cause: alert.RuleUntaken, Text: "not yet routed: no relay has taken it yet" + s.taker()}
	}
	relay := fmt.Sprintf("relay %d %s", s.RelayID, s.Name)
	if s.Name == "" {
		relay = fmt.Sprintf("relay %d, which is gone,", s.RelayID)
	}
	text := fmt.Sprintf("in the hand of %s since %s (range %d)", relay, timeText(s.TakenAt), s.Range)
	if len(s.Settled) > 0 {
		names := slices.Clone(s.Settled)
		if names[0] == "" {
			names[0] = "no destination (parked)"
		}
		text += "; these have their delivery already: " + strings.Join(names, ", ")
	}
	switch {
	case s.Name == "":
		text += "; another relay takes it over" + s.taker()
	case !s.Alive:
		text += "; that relay is silent, and another one takes it over" + s.taker()
	}
	return Wait{Cause: "in_hand", Text: text}
}

// taker says why no relay takes an event; empty: one runs.
func (s routeState) taker() string {
	switch {
	case s.Relays > 0:
		return ""
	case s.Quarantined:
		return "; the relays that run are quarantined and take nothing; see: outbox-relay identity show"
	}
	return "; no relay is running; start one: outbox-relay run"
}

// waitState is all that one pending delivery may wait for.
type waitState struct {
	Destination    string
	DueInSeconds   float64 // not above 0: it is due
	NextAttemptAt  time.Time
	Attempts       int
	ClaimedBy      *int32 // under a lease that has not ended
	ClaimedName    string // of that relay; empty: it is gone
	ClaimedAlive   bool
	LeaseSeconds   float64
	Paused         bool
	PausedReason   string
	PausedAt       *time.Time
	Breaker        string
	BreakerSeconds float64
	BreakerError   string
	BehindEvent    int64 // the first open one of its ordering key; 0: none is before it
	BehindStatus   string
	BehindReason   policy.Reason
	BehindAttempts int
	BehindError    string
	BehindNext     *time.Time // when it is attempted next
	BehindDue      bool       // that time has come
	OrderingKey    string
	Routed         bool          // it is parked, but its type has a route now
	Served         bool          // a registered relay serves the destination
	WaitUntil      *time.Time    // that the destination has asked relays to wait; nil: it has not
	Relays         int64         // that run and are not quarantined
	Quarantined    bool          // a relay that is quarantined runs
	AnyRoute       bool          // some route is stored
	LastReason     policy.Reason // of the latest attempt; empty: there was none, or it was replayed since
	LastError      string
	Ahead          int64 // due deliveries of the destination that go out before it, up to aheadTo and one
}

// reasons returns all that the delivery waits for.
func (w waitState) reasons(eventID int64) (all []Wait) {
	add := func(cause, text string) { all = append(all, Wait{w.Destination, cause, text}) }
	switch {
	case w.ClaimedBy != nil:
		add("in_flight", w.inFlight())
		return all
	case w.Destination == "":
		add(alert.RuleParked, w.parked(eventID))
		return all
	}
	if w.Relays > 0 && !w.Served { // first: nothing below helps before a relay serves it
		add(alert.RuleUnserved, fmt.Sprintf("unserved: no running relay has this destination; to put it back, write destinations.%s into a relay's configuration and reload that relay (SIGHUP); or give the delivery up: outbox-relay discard %d --destination %s",
			w.Destination, eventID, plain.ShellWord(w.Destination)))
	}
	if w.Paused {
		add(alert.RulePaused, fmt.Sprintf("the destination is paused since %s: %s; to continue: outbox-relay resume %s", timeText(w.PausedAt), cmp.Or(w.PausedReason, "no reason given"), plain.ShellWord(w.Destination)))
	}
	if w.Breaker != "closed" {
		remedy := alert.Repair(w.Destination, alert.ReasonOf(w.BreakerError), w.BreakerError, plainly)
		add(alert.RuleBreakerOpen, strings.TrimSpace(fmt.Sprintf("held: its requests fail (%s); %s. %s", w.BreakerError, w.nextProbe(), remedy)))
	}
	if asked := w.asked(); asked != "" && w.Breaker == "closed" {
		add(alert.RuleSlowed, asked)
	}
	if w.BehindEvent != 0 {
		state := "is " + w.BehindStatus
		if w.BehindStatus == "failed" {
			state = "has failed"
		}
		add("behind", fmt.Sprintf("behind event %d of its ordering key, which %s%s", w.BehindEvent, state, w.behindHint()))
	}
	if w.DueInSeconds > 0 {
		add("not_due", w.notDue())
	}
	switch {
	case w.Relays > 0:
	case w.Quarantined:
		add(alert.RuleQuarantined, "the relays that run are quarantined and send nothing; see: outbox-relay identity show")
	default:
		add(alert.RuleNoRelay, "no relay is running; start one: outbox-relay run")
	}
	if len(all) == 0 {
		add("due", "due: it goes out with the next claims of its destination"+w.ahead())
	}
	return all
}

// asked says until when the destination has asked relays to wait; empty: it has not.
func (w waitState) asked() string {
	if w.WaitUntil == nil {
		return ""
	}
	return "the destination has asked to wait (Retry-After): it is tried again at " + timeText(w.WaitUntil)
}

// inFlight says which relay has claimed the delivery.
func (w waitState) inFlight() string {
	text := fmt.Sprintf("in flight by relay %d %s; its lease ends in %s", *w.ClaimedBy, cmp.Or(w.ClaimedName, "that is gone"), seconds(w.LeaseSeconds))
	if !w.ClaimedAlive {
		text += "; that relay is silent, and another one takes the delivery over" + routeState{Relays: w.Relays, Quarantined: w.Quarantined}.taker()
	}
	return text + labelled("; %s", w.asked())
}

// notDue says when the delivery is attempted, and how the last attempt ended.
func (w waitState) notDue() string {
	text := "not yet due"
	if w.Attempts > 0 {
		text += ", after " + plain.Plural(w.Attempts, "attempt", "attempts")
	}
	text += fmt.Sprintf(": in %s, at %s", seconds(w.DueInSeconds), timeText(&w.NextAttemptAt))
	if w.LastReason != "" {
		text += "; the last attempt ended with " + orReason(w.LastError, w.LastReason)
	}
	if w.Breaker != "closed" && w.Attempts > 0 {
		text += ". " + spendsAttempts
	}
	return text
}

// aheadTo is up to how many deliveries before it are counted.
const aheadTo = 1_000

// ahead says how many go out before it: a receiver that is slow, or its rate limit, may take long
// for them.
func (w waitState) ahead() string {
	if w.Ahead == 0 {
		return ""
	}
	return "; " + countedTo(w.Ahead, aheadTo, "is", "are") + " due before it"
}

// parked says why an event is parked, and what releases it.
func (w waitState) parked(eventID int64) string {
	switch {
	case !w.AnyRoute:
		return "parked until the first relay starts: no route is stored yet; start one: outbox-relay run"
	case w.Routed:
		return "parked, but a route for its type exists now: a relay releases it within seconds"
	}
	return fmt.Sprintf("parked: no route matches its type; add one and reload the relays (SIGHUP), or give it up: outbox-relay discard %d", eventID)
}

// behindHint says what makes the ordering key continue; empty: it continues by itself.
func (w waitState) behindHint() string {
	if w.BehindStatus != "failed" {
		if w.BehindAttempts == 0 || w.BehindNext == nil {
			return ""
		}
		next := "it is tried at " + timeText(w.BehindNext)
		switch {
		case w.Paused || w.Breaker != "closed" || w.WaitUntil != nil && w.WaitUntil.After(*w.BehindNext):
			next = "it waits for the destination"
		case w.BehindDue:
			next = "it is due"
		}
		return fmt.Sprintf(": after %s, the last of which ended with %s, %s; see: outbox-relay explain %d",
			plain.Plural(w.BehindAttempts, "attempt", "attempts"), orReason(w.BehindError, w.BehindReason), next, w.BehindEvent)
	}
	skip := fmt.Sprintf("outbox-relay discard --destination %s %s", plain.ShellWord(w.Destination), plain.ShellFlag("--head-of-key", w.OrderingKey))
	if unsendable(w.BehindReason) {
		return fmt.Sprintf(" (%s) and cannot be sent as it is; to continue: %s", w.BehindReason, skip)
	}
	return fmt.Sprintf("; to continue: outbox-relay replay %d --destination %s, or %s", w.BehindEvent, plain.ShellWord(w.Destination), skip)
}

// nextProbe says when a held destination is probed.
func (w waitState) nextProbe() string {
	switch {
	case !w.Served || w.Relays == 0:
		return "no running relay probes it"
	case w.Breaker == "half_open" && w.WaitUntil == nil:
		return "a probe is under way"
	case w.Paused:
		return "no probe before it is resumed"
	case w.WaitUntil != nil:
		return "no probe before " + timeText(w.WaitUntil) + ", as it has asked (Retry-After)"
	case w.BreakerSeconds > 0:
		return "next probe in " + seconds(w.BreakerSeconds)
	case w.DueInSeconds > 0:
		return "the next delivery that is due is the probe"
	}
	return "the next probe is due"
}

func seconds(s float64) string {
	return time.Duration(max(s, 0) * float64(time.Second)).Round(time.Second).String()
}

func timeText(at *time.Time) string {
	if at == nil {
		return "?"
	}
	return at.UTC().Format(time.RFC3339)
}
