package ops

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Replay is an operator's order that made a delivery pending again.
type Replay struct {
	Destination string    `json:"destination"`
	At          time.Time `json:"at"` // of the order; a large replay makes its last deliveries due later
	Actor       string    `json:"actor"`
	Origin      Origin    `json:"origin"`
	// Was is the status that the delivery had: failed, delivered or discarded. Empty: the order
	// named several.
	Was string `json:"was"`
	// Certain: the order named the event, or no other one can have replayed it. Otherwise its
	// conditions include the event.
	Certain bool `json:"certain"`
	// If says on what it depends whether an order that is not certain replayed the delivery: what
	// its reason was, whether a limit left room.
	If string `json:"if,omitempty"`
}

// String says who replayed what.
func (r Replay) String() string {
	text := fmt.Sprintf("replayed by %s (%s)", r.Actor, r.Origin)
	if !r.Certain {
		text = "perhaps " + text + ": the order includes it"
		if r.If != "" {
			text += ", if " + r.If
		}
		return text
	}
	switch r.Was {
	case "failed":
		return text + ", after it had failed"
	case "delivered":
		return text + ", after it had been delivered"
	case "discarded":
		return text + ", after it had been given up"
	}
	return text
}

// replaysOf returns the orders that replayed the deliveries of one event. An order that came after
// the delivery has found nothing to replay: a nightly replay of all that failed includes the event
// every night. Nor has an order for what failed, as long as the log of attempts says that the
// delivery was retried, or says nothing since an earlier replay. It has, if the log says that the
// delivery failed, unless one of the discards gave it up first.
func replaysOf(deliveries []Delivery, orders, discards []bulkOrder, attempts []Attempt) []Replay {
	all := []Replay{}
	for _, d := range deliveries {
		if !d.Replay {
			continue
		}
		var replayed time.Time // by the latest order that has surely done so
		var possible []Replay
		for _, o := range orders {
			if !o.reaches(d) || d.DeliveredAt != nil && o.At.After(*d.DeliveredAt) {
				continue
			}
			last := lastAttempt(attempts, d.Destination, replayed, o.At)
			ofFailed, failed := o.was() == "failed", last.Outcome == policy.Fail
			if ofFailed && !failed && (last.Outcome != "" || !replayed.IsZero()) {
				continue
			}
			certain := ofFailed && failed && o.condition() == "" && !slices.ContainsFunc(discards, func(x bulkOrder) bool {
				return x.reaches(d) && x.At.After(last.StartedAt) && x.At.Before(o.At)
			})
			if certain || o.Named && (ofFailed || !failed) {
				replayed = o.At
			}
			r := Replay{Destination: d.Destination, At: o.At, Actor: o.Actor, Origin: o.Origin, Was: o.was(), Certain: o.Named || certain}
			if !r.Certain {
				r.If = o.condition()
			}
			possible = append(possible, r)
		}
		if len(possible) == 1 {
			possible[0].Certain, possible[0].If = true, ""
		}
		all = append(all, possible...)
	}
	return all
}

// reaches reports whether an order may have changed a delivery, as far as its destination goes.
func (o bulkOrder) reaches(d Delivery) bool {
	return o.Destination == "" || o.Destination == d.Destination
}

// lastAttempt returns the last logged attempt between two times; the zero value: there is none.
func lastAttempt(attempts []Attempt, destination string, from, to time.Time) (last Attempt) {
	for _, a := range attempts {
		if a.Destination == destination && a.StartedAt.After(from) && a.StartedAt.Before(to) {
			last = a
		}
	}
	return last
}

// condition returns on what it depends whether the order changed a delivery that it includes;
// empty: on nothing that is known.
func (o bulkOrder) condition() string {
	var all []string
	if o.Reason != "" {
		all = append(all, "its last reason was "+o.Reason)
	}
	if o.Limited {
		all = append(all, "the limit left room")
	}
	return strings.Join(all, " and ")
}

// A discard is when a delivery was given up, as far as the audit knows. Zero: it does not say.
type discard struct {
	destination string
	at          time.Time
}

// discardsOf returns when the deliveries of one event were given up: those that are discarded, and
// those that a replay took back. The latest order before that counts, if it is certain that it gave
// the delivery up.
func discardsOf(deliveries []Delivery, orders []bulkOrder, replays []Replay) (all []discard) {
	for _, d := range deliveries {
		possible := slices.DeleteFunc(slices.Clone(orders), func(o bulkOrder) bool {
			return !o.reaches(d) || o.Reason != "" && d.LastReason != nil && o.Reason != *d.LastReason
		})
		before := func(end time.Time) (at time.Time) {
			n := len(possible)
			for n > 0 && !end.IsZero() && possible[n-1].At.After(end) {
				n--
			}
			if n == 1 || n > 1 && (possible[n-1].Named || !possible[n-1].Limited) {
				at = possible[n-1].At
			}
			return at
		}
		for _, r := range replays {
			if at := before(r.At); r.Destination == d.Destination && r.Was == "discarded" && r.Certain && !at.IsZero() {
				all = append(all, discard{d.Destination, at})
			}
		}
		if d.Status == "discarded" {
			all = append(all, discard{d.Destination, before(time.Time{})})
		}
	}
	return all
}

// was returns the one status that an order changed; empty: it changed several.
func (o bulkOrder) was() string {
	switch len(o.Statuses) {
	case 0:
		return "failed"
	case 1:
		return o.Statuses[0]
	}
	return ""
}

// replayedAfter reports whether a replay of the delivery followed a time.
func (e EventReport) replayedAfter(destination string, at time.Time) bool {
	return slices.ContainsFunc(e.Replays, func(r Replay) bool { return r.Certain && r.Destination == destination && r.At.After(at) })
}

// Latency returns LatencySeconds as text; empty: there is none.
func (d Delivery) Latency() string {
	if d.LatencySeconds == nil {
		return ""
	}
	return time.Duration(max(*d.LatencySeconds, 0) * float64(time.Second)).Round(time.Millisecond).String()
}

// afterDue says how long after its event became due a delivery ended; empty: that is not known, or
// before.
func afterDue(seconds *float64) string {
	if seconds == nil || *seconds < 0 {
		return ""
	}
	return Delivery{LatencySeconds: seconds}.Latency() + " after it was due"
}

// Arrival says with which attempt a delivery arrived, and how long that took. Attempts count again
// after a replay.
func (d Delivery) Arrival() string {
	text := "with the "
	if d.Replay {
		text = "by the replay, with its "
	}
	return text + ordinal(d.Attempts) + " attempt" + labelled(", %s", afterDue(d.LatencySeconds))
}
