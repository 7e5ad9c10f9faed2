package relay

import (
	"cmp"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

var classNames = [classes]string{live: "live", backlog: "backlog", replays: "replay"}

// placeInKey returns where a delivery stands in its ordering key.
func (d *delivery) placeInKey() ordering.Place {
	return ordering.Place{Joined: d.joined, Event: d.eventID}
}

// settlement returns the settlement of a delivery, without the payload, which is not needed any more.
func (d *delivery) settlement(decided policy.Decision, startedAt time.Time, took time.Duration) settle.Settlement {
	return settle.Settlement{
		Decision: decided, EventID: d.eventID, Destination: d.destination, Fence: d.fence, Attempts: d.attempts,
		OrderingKey: d.event.OrderingKey, Key: d.event.Key, NotAfter: d.notAfter, Promised: d.promised, LeaseEnds: d.leaseEnds,
		StartedAt: startedAt, Took: took, InHand: d.given, Class: int(d.class), DueAt: d.nextAttemptAt.Time,
	}
}

// held returns the settlement that gives a delivery back of which nothing was sent.
func (d *delivery) held(reason policy.Reason) settle.Settlement {
	return d.settlement(policy.Decide(policy.Result{Reason: reason}, policy.Circumstances{}), time.Now(), 0)
}

// A class is one of three kinds of deliveries that share a lane fairly.
type class int

const (
	live    class = iota // became due within liveWindow
	backlog              // became due before: what waited for its destination
	replays              // made pending again by an operator
	classes = 3
)

// liveWindow is how long after it became due a delivery goes before the backlog.
const liveWindow = 10 * time.Second

// keyset is a place in the order in which a lane is claimed.
type keyset struct {
	at time.Time
	id int64
}

// delivery is one event on its way to one destination. One with given is of a range, and has no row yet; others are claimed rows.
type delivery struct {
	eventID       int64
	destination   string
	fence         int64
	attempts      int
	rescues       int
	lost          bool // a suspect's previous claim was not settled
	alone         bool // a suspect is being sent with nothing beside it
	nextAttemptAt pgtype.Timestamptz
	payloadBytes  int
	replay        bool
	leaseEnds     time.Time // on this process's clock, never later than what the database holds
	notAfter      time.Time // the promise: no request is under way any more
	promiseEnds   time.Time // the same on this process's clock, like leaseEnds
	promised      bool      // by this claim: the receiver has not been told yet

	scan      int   // number of the scan that found it, from 1; 0: it was found by its ordering key
	after     int64 // event before it in its run; 0: the first
	joined    int64 // of its ordering.Place
	class     class
	lastOfRun bool

	given *settle.InHand // of a range; nil: it was claimed
	rule  string         // that the event breaks

	event post.Event
	span  trace.Span // of the attempt; nil: there is none, or traces are off
}

// inlinePayload is up to which size a claim brings the payload along, in bytes. It bounds what a lane holds in memory:
// 110 MiB, with maxTaken deliveries of each class and maxBehind in runs.
const inlinePayload = 8 << 10

// message returns what a request for the delivery says.
func (d *delivery) message() post.Message {
	return post.Message{
		EventID: d.eventID, Destination: d.destination, Fence: d.fence, Attempt: d.attempts + 1, NotAfter: d.notAfter, Replay: d.replay,
		Event: d.event,
	}
}

// place returns where a delivery stands in the order in which a lane is claimed.
func (d *delivery) place() keyset { return keyset{at: d.nextAttemptAt.Time, id: d.eventID} }

func (k keyset) compare(other keyset) int {
	if order := k.at.Compare(other.at); order != 0 {
		return order
	}
	return cmp.Compare(k.id, other.id)
}

// bound returns the keyset's time as the database compares it; for the zero keyset, which is a time too, the given end.
func (k keyset) bound(end pgtype.InfinityModifier) pgtype.Timestamptz {
	if k == (keyset{}) {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: k.at, Valid: true}
}

// classAt returns the class of a delivery when the live window begins at the given time.
func (d *delivery) classAt(window time.Time) class {
	switch {
	case d.replay:
		return replays
	case d.nextAttemptAt.Time.Before(window):
		return backlog
	}
	return live
}

// orderingKey returns the key of a delivery that has one.
func (d *delivery) orderingKey() ordering.Key {
	return ordering.Key{Destination: d.destination, Key: *d.event.OrderingKey}
}
