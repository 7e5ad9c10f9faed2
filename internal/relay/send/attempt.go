package send

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// An Attempt is one POST.
type Attempt struct {
	EventID     int64
	Destination string
	Number      int // 1 for the first
	StatusCode  int // 0 without a response
	Outcome     policy.Outcome
	Reason      policy.Reason
	Duration    time.Duration
	// Duplicate: delivered, and the receiver says that it had the message already. Only streams say
	// so.
	Duplicate bool
	// DroppedHeaders counts the headers of the event that the destination does not let through, see
	// [post.Wire].
	DroppedHeaders int
	// Batch is how many events the request carried, said of one of them; 0 of the others, and of a
	// request for one event alone.
	Batch int
	// Class is live, backlog or replay; see [Classes].
	Class string
	// SinceFirstDue and SinceDue are the times from when the event became due (its created_at, or a
	// later available_at), and from when this attempt became due, until the attempt ended. The
	// database's clock dates both. Never negative.
	SinceFirstDue, SinceDue time.Duration
}

// Phases end one after the other at a stop. After taking nothing more is claimed or sent; after
// doing POSTs in flight are cut off; after settling what could not be written is left to the lease.
type Phases struct{ Taking, Doing, Settling context.Context }
