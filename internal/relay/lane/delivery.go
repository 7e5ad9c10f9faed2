package lane

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

// A Class is one of three kinds of deliveries that share a lane fairly.
type Class int

const (
	Live    Class = iota // became due within LiveWindow
	Backlog              // became due before: what waited for its destination
	Replays              // made pending again by an operator
	Classes = 3
)

var classNames = [Classes]string{Live: "live", Backlog: "backlog", Replays: "replay"}

// String returns the name of the class, as metrics have it.
func (c Class) String() string { return classNames[c] }

// LiveWindow is how long after it became due a delivery goes before the backlog.
const LiveWindow = 10 * time.Second

// Keyset is a place in the order in which a lane is claimed.
type Keyset struct {
	At time.Time
	ID int64
}

// Delivery is one event on its way to one destination. One with given is of a range, and has no row
// yet; others are claimed rows.
type Delivery struct {
	EventID       int64
	Destination   string
	Fence         int64
	Attempts      int
	Rescues       int
	Lost          bool // a suspect's previous claim was not settled
	Alone         bool // a suspect is being sent with nothing beside it
	NextAttemptAt pgtype.Timestamptz
	FirstDue      pgtype.Timestamptz // when its event became due: created_at, or a later available_at
	PayloadBytes  int
	Replay        bool
	LeaseEnds     time.Time // on this process's clock, never later than what the database holds
	NotAfter      time.Time // no request is made after this time, as the receiver was told
	PromiseEnds   time.Time // the same on this process's clock, like LeaseEnds
	Promised      bool      // by this claim: the receiver has not been told yet

	Scan      int   // number of the scan that found it, from 1; 0: it was found by its ordering key
	After     int64 // event before it in its run; 0: the first
	Joined    int64 // of its ordering.Place
	Class     Class
	LastOfRun bool

	Given *settle.InHand // of a range; nil: it was claimed
	Rule  string         // that the event breaks

	Event post.Event
	Span  trace.Span // of the attempt; nil: there is none, or traces are off
}

// InlinePayload is up to which size a claim brings the payload along, in bytes. It bounds what a
// lane holds in memory: 110 MiB, with maxTaken deliveries of each class and MaxBehind in runs.
const InlinePayload = 8 << 10

// Message returns what a request for the delivery says.
func (d *Delivery) Message() post.Message {
	return post.Message{
		EventID: d.EventID, Destination: d.Destination, Fence: d.Fence, Attempt: d.Attempts + 1, NotAfter: d.NotAfter, Replay: d.Replay,
		Event: d.Event,
	}
}

// PlaceInKey returns where a delivery stands in its ordering key.
func (d *Delivery) PlaceInKey() ordering.Place {
	return ordering.Place{Joined: d.Joined, Event: d.EventID}
}

// Settlement returns the settlement of a delivery, without the payload, which is not needed any
// more.
func (d *Delivery) Settlement(decided policy.Decision, startedAt time.Time, took time.Duration) settle.Settlement {
	return settle.Settlement{
		Decision: decided, EventID: d.EventID, Destination: d.Destination, Fence: d.Fence, Attempts: d.Attempts,
		EventType: d.Event.EventType, OrderingKey: d.Event.OrderingKey, Joined: d.Joined, Key: d.Event.Key,
		NotAfter: d.NotAfter, Promised: d.Promised, LeaseEnds: d.LeaseEnds,
		StartedAt: startedAt, Took: took, InHand: d.Given, Class: int(d.Class), DueAt: d.NextAttemptAt.Time,
	}
}

// GivenBack returns the settlement that gives a delivery back of which nothing was sent.
func (d *Delivery) GivenBack(reason policy.Reason) settle.Settlement {
	return d.Settlement(policy.Decide(policy.Result{Reason: reason}, policy.Circumstances{}), time.Now(), 0)
}

// Place returns where a delivery stands in the order in which a lane is claimed.
func (d *Delivery) Place() Keyset { return Keyset{At: d.NextAttemptAt.Time, ID: d.EventID} }

// Compare orders by time, then by event.
func (k Keyset) Compare(other Keyset) int {
	if order := k.At.Compare(other.At); order != 0 {
		return order
	}
	return cmp.Compare(k.ID, other.ID)
}

// Bound returns the keyset's time as the database compares it; for the zero keyset, which is a time
// too, the given end.
func (k Keyset) Bound(end pgtype.InfinityModifier) pgtype.Timestamptz {
	if k == (Keyset{}) {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: k.At, Valid: true}
}

// ClassAt returns the class of a delivery when the live window begins at the given time.
func (d *Delivery) ClassAt(window time.Time) Class {
	switch {
	case d.Replay:
		return Replays
	case d.NextAttemptAt.Time.Before(window):
		return Backlog
	}
	return Live
}

// OrderingKey returns the key of a delivery that has one.
func (d *Delivery) OrderingKey() ordering.Key {
	return ordering.Key{Destination: d.Destination, Key: *d.Event.OrderingKey}
}
