package ops

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// An UnknownEvent is the error for an id, an idempotency key or a related reference that no event
// has, archived or not.
type UnknownEvent struct {
	// Detail says what was looked for, and Further which command looks further back; empty: all was
	// searched.
	Detail, Further string
}

func (e UnknownEvent) Error() string {
	text := "unknown event: " + e.Detail
	if e.Further != "" {
		text += "; look further back with: " + e.Further
	}
	return text
}

// An Event is what a producer inserted.
type Event struct {
	ID               int64      `json:"id,string"`         // as in X-Outbox-Event-Id
	Type             string     `json:"event_type"`        // empty: the row is gone, only its deliveries are left
	Version          int        `json:"event_version"`     // of the payload's shape
	IdempotencyKey   string     `json:"idempotency_key"`   // by which receivers know it
	OrderingKey      *string    `json:"ordering_key"`      // nil: it has no order
	RelatedReference *string    `json:"related_reference"` // what the producer calls the business object
	AvailableAt      time.Time  `json:"available_at"`      // not sent before
	CreatedAt        time.Time  `json:"created_at"`        // when its transaction began
	ArchivedAt       *time.Time `json:"archived_at"`       // nil: it is not archived
	HeaderNames      []string   `json:"header_names"`      // of the headers that are sent with it
	PayloadBytes     int        `json:"payload_bytes"`
	// Payload as the producer wrote it, and Headers; nil unless they were revealed.
	Payload *string           `json:"payload,omitempty" db:"-"`
	Headers map[string]string `json:"headers,omitempty" db:"-"`
}

// maxFound is how many events of one related reference are named.
const maxFound = 20

// FindEvents returns the ids of the events that have the given text as their id, else as their
// idempotency key, else as their related reference, the newest first and at most 20. Archived
// events are found by id and key. No index leads to a reference: it is looked for among the newest
// 200,000 events, in short statements. The error is an [UnknownEvent] if there is none.
func (o *Outbox) FindEvents(ctx context.Context, text string) ([]int64, error) {
	if id, err := strconv.ParseInt(text, 10, 64); err == nil && id > 0 {
		if known, err := o.hasEvent(ctx, id); err != nil || known {
			return []int64{id}, err
		}
	}
	if ids, err := o.EventsOfKey(ctx, text); err != nil || len(ids) > 0 {
		return ids, err
	}
	ids, all, err := o.RelatedEvents(ctx, text, maxFound)
	switch {
	case err != nil || len(ids) > 0:
	case all:
		err = UnknownEvent{Detail: fmt.Sprintf("no event has the id, the idempotency key or the related reference %q", plain.Clip(text))}
	default:
		err = UnknownEvent{
			Detail:  fmt.Sprintf("no event has the id or the idempotency key %q, and none of the newest %d has it as its related reference", plain.Clip(text), relatedAmong),
			Further: "outbox-relay events list " + plain.ShellFlag("--reference", plain.Clip(text)),
		}
	}
	return ids, err
}

// A Moment is one line of the history of an event.
type Moment struct {
	At          time.Time `json:"at"`
	Destination string    `json:"destination"` // empty: the event as a whole, or parked
	// What: inserted, available, attempt, replayed, delivered, failed, discarded or archived. Names
	// are added, never renamed.
	What string `json:"what"`
	Text string `json:"text"`
}

// An Explanation says what became of an event, and why it still waits.
type Explanation struct {
	Event   Event    `json:"event"`
	History []Moment `json:"history"`
	Waits   []Wait   `json:"waits"`
}

// Explain puts a report into the order of time. Attempts that delivered stand in no log unless it
// is configured so; the delivery itself stands for them.
func (e EventReport) Explain() Explanation {
	x := Explanation{Event: e.Event, Waits: e.Waits}
	add := func(at time.Time, destination, what, format string, args ...any) {
		x.History = append(x.History, Moment{at, destination, what, fmt.Sprintf(format, args...)})
	}
	add(e.Event.CreatedAt, "", "inserted", "inserted as event %d of type %s", e.Event.ID, e.Event.Type)
	if e.Event.AvailableAt.After(e.Event.CreatedAt) {
		add(e.Event.AvailableAt, "", "available", "not to be sent before")
	}
	e.explainAttempts(add)
	for _, r := range e.Replays {
		add(r.At, r.Destination, "replayed", "%s", r)
	}
	for _, d := range e.Deliveries {
		switch {
		case d.Status == "delivered" && d.DeliveredAt != nil:
			add(*d.DeliveredAt, d.Destination, "delivered", "delivered %s", d.Arrival())
		case d.Status == "failed":
			reason := policy.Reason(plain.OrBlank(d.LastReason))
			add(d.lastTouched(), d.Destination, "failed", "failed for good: %s. %s", orReason(plain.OrBlank(d.LastError), reason), e.afterFailure(d, reason))
		}
		for _, given := range e.discards {
			switch {
			case given.destination != d.Destination:
			case given.at.IsZero():
				add(d.lastTouched(), d.Destination, "discarded", "an operator has given it up, some time after this: the audit does not say when")
			default:
				add(given.at, d.Destination, "discarded", "an operator has given it up")
			}
		}
	}
	if e.Event.ArchivedAt != nil {
		add(*e.Event.ArchivedAt, "", "archived", "moved into the archive")
	}
	slices.SortStableFunc(x.History, func(a, b Moment) int { return a.At.Compare(b.At) })
	return x
}

// afterFailure says what waits behind a failed delivery, and what comes next.
func (e EventReport) afterFailure(d Delivery, reason policy.Reason) (text string) {
	word := plain.ShellWord(d.Destination)
	if n := e.behind[d.Destination]; n > 0 {
		text = fmt.Sprintf("%s behind it; to skip it: outbox-relay discard %d --destination %s. ", counted(n, "delivery waits", "deliveries wait"), d.EventID, word)
	}
	if unsendable(reason) {
		return text + "No replay sends it: its producer must insert a corrected event under a new key"
	}
	return text + fmt.Sprintf("Once the cause is fixed: outbox-relay replay %d --destination %s", d.EventID, word)
}

// explainAttempts adds the logged attempts and what came of them, but for how a delivery ended that
// has not been replayed since: its row says that.
func (e EventReport) explainAttempts(add func(at time.Time, destination, what, format string, args ...any)) {
	for i, a := range e.Attempts {
		ended := a.StartedAt.Add(time.Duration(a.DurationMS) * time.Millisecond)
		if a.Outcome == policy.Delivered {
			if e.replayedAfter(a.Destination, ended) {
				add(ended, a.Destination, "delivered", "delivered with the %s attempt", ordinal(a.Attempt))
			}
			continue
		}
		text := orReason(plain.OrBlank(a.Error), a.Reason)
		if a.Outcome == policy.Hold { // the next attempt has the same number
			text += " (held: no attempt is spent)"
		}
		add(a.StartedAt, a.Destination, "attempt", "attempt %d by relay %d failed after %s: %s", a.Attempt, a.RelayID, time.Duration(a.DurationMS)*time.Millisecond, text)
		isLast := !slices.ContainsFunc(e.Attempts[i+1:], func(later Attempt) bool { return later.Destination == a.Destination })
		if a.Outcome == policy.Fail && !(isLast && e.hasFailed(a.Destination)) {
			add(ended, a.Destination, "failed", "failed for good: %s", orReason(plain.OrBlank(a.Error), a.Reason))
		}
	}
}

// hasFailed reports whether the delivery to a destination is failed now.
func (e EventReport) hasFailed(destination string) bool {
	return slices.ContainsFunc(e.Deliveries, func(d Delivery) bool { return d.Destination == destination && d.Status == "failed" })
}

// lastTouched returns when a delivery was attempted last or, without an attempt, was due.
func (d Delivery) lastTouched() time.Time {
	if d.LastAttemptAt != nil {
		return *d.LastAttemptAt
	}
	return d.NextAttemptAt
}

func ordinal(n int) string {
	switch {
	case n%100 >= 11 && n%100 <= 13:
	case n%10 == 1:
		return fmt.Sprintf("%dst", n)
	case n%10 == 2:
		return fmt.Sprintf("%dnd", n)
	case n%10 == 3:
		return fmt.Sprintf("%drd", n)
	}
	return fmt.Sprintf("%dth", n)
}

// Unknown says which name of a filter the outbox does not know, and the known ones, for a filter
// that matches nothing.
type Unknown struct {
	What  string // destination, reason or type
	Name  string
	Known []string
}

// UnknownNames returns the names in a filter that nothing has; empty: each is known, and there is
// only nothing that matches all. A type is compared with the routes and with the newest 10,000
// events.
func (o *Outbox) UnknownNames(ctx context.Context, destination, reason, eventType string) (all []Unknown, err error) {
	if destination != "" {
		names, err := o.Destinations(ctx)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(names, destination) {
			all = append(all, Unknown{"destination", destination, names})
		}
	}
	if reasons := Reasons(); reason != "" && !slices.Contains(reasons, reason) {
		all = append(all, Unknown{"reason", reason, reasons})
	}
	if eventType != "" {
		types, known, err := o.recentTypes(ctx, eventType)
		if err != nil {
			return nil, err
		}
		if !known {
			all = append(all, Unknown{"type", eventType, types})
		}
	}
	return all, nil
}

// ReasonQuarantined is why [Outbox.DiscardQuarantined] discards. It is the one reason that no
// attempt ends with.
const ReasonQuarantined = "quarantined"

// Reasons returns every reason for which deliveries are selected.
func Reasons() (all []string) {
	for _, reason := range policy.Reasons() {
		all = append(all, string(reason))
	}
	return append(all, ReasonQuarantined)
}
