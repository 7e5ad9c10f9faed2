package inboxops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// statusLimit is how many index entries of each kind one status reads for a sender.
const statusLimit = 100_000

// Status is what stands in a receiver's database at one moment.
type Status struct {
	Senders []SenderStatus `json:"senders"`
	// InboxRows and MemoryRows estimate how many rows inbox_events and processed_events have, from
	// the statistics of the database. -1: there are no statistics yet.
	InboxRows  int64 `json:"inbox_rows_estimate"`
	MemoryRows int64 `json:"memory_rows_estimate"`
}

// SenderStatus counts the events of one sender of one receiver. Succeeded events are not counted:
// no index has them.
type SenderStatus struct {
	Sender
	// Pending is the backlog: Due, Scheduled and Waiting together.
	Pending int64 `json:"pending"`
	// Due of the pending could be worked now.
	Due int64 `json:"due"`
	// Scheduled of the pending are tried again later.
	Scheduled int64 `json:"scheduled"`
	// Waiting of the pending stand behind an earlier event of their ordering key.
	Waiting int64 `json:"waiting"`
	// Processing have a worker.
	Processing int64 `json:"processing"`
	Failed     int64 `json:"failed"`
	Ignored    int64 `json:"ignored"`
	// AtLeast: there are more than were counted, so that the counts are lower bounds.
	AtLeast bool `json:"at_least,omitempty"`
	// BlockedKeys counts the ordering keys whose later events wait behind a failed one. It looks at
	// 10,000 failed ones.
	BlockedKeys int64 `json:"blocked_keys"`
	// LagSeconds is for how long the oldest due event has been due; 0 without one.
	LagSeconds float64 `json:"lag_seconds"`
	// ProcessingSeconds is for how long the oldest event with a worker has had it; 0 without one.
	ProcessingSeconds float64 `json:"processing_seconds"`
	// RemembersSince is the moment since which everything that was received is known; nil: nothing
	// was ever forgotten.
	RemembersSince *time.Time `json:"remembers_since"`
}

// Status counts what is pending, being worked, failed or ignored, by index entries and at most
// 100,000 of a kind. It costs nothing for what succeeded.
func (o *Ops) Status(ctx context.Context, receiver, source string) (s Status, err error) {
	var all []Sender
	err = o.read(ctx, func(tx pgx.Tx) error {
		open, err := withOpenEvents(ctx, tx, receiver, source)
		if err != nil {
			return err
		}
		known, err := remembered(ctx, tx, receiver, source)
		if err != nil {
			return err
		}
		all = sortedOnce(append(open, known...))
		return estimateRows(ctx, tx, &s)
	})
	if err != nil {
		return Status{}, fmt.Errorf("read status: %w", err)
	}
	// A transaction for each: vacuum does not wait for all of them.
	for _, sender := range all {
		err := o.read(ctx, func(tx pgx.Tx) error {
			counted, err := countSender(ctx, tx, sender)
			s.Senders = append(s.Senders, counted)
			return err
		})
		if err != nil {
			return Status{}, fmt.Errorf("read status: %w", err)
		}
	}
	return s, nil
}
