package inboxops

import (
	"context"
	"fmt"
	"time"
)

// A Received is what names an event that was received, what its sender said of it, and how far it
// is.
type Received struct {
	Receiver         string     `json:"receiver"`
	Source           string     `json:"source"`
	IdempotencyKey   string     `json:"idempotency_key"`
	EventType        string     `json:"event_type"`
	EventVersion     int        `json:"event_version"`
	EventID          *int64     `json:"event_id,string"` // in the sender's outbox
	RelatedReference *string    `json:"related_reference"`
	State            string     `json:"state"`
	ReceivedAt       time.Time  `json:"received_at"`
	ProcessedAt      *time.Time `json:"processed_at"`
}

// An Event is an event of an inbox without its payload and the headers of its request, which this
// package never reads.
type Event struct {
	InboxID int64 `json:"inbox_id,string"`
	Received
	Attempts      int `json:"attempts"`
	Interruptions int `json:"interruptions"` // in a row
	// NextAttemptAt of a pending one. nil: it waits for an earlier event of its ordering key.
	NextAttemptAt *time.Time `json:"next_attempt_at"`
	LastError     *string    `json:"last_error"`
	OrderingKey   *string    `json:"ordering_key"`
	Sequence      int64      `json:"sequence"`
	NotAfter      *time.Time `json:"not_after"`
	Claim         int64      `json:"claim"`
	ClaimedBy     *string    `json:"claimed_by"` // the worker that has it, or had it last
	ClaimedAt     *time.Time `json:"claimed_at"`
}

// A Page is a part of a list.
type Page struct {
	Events []Event `json:"events"`
	// Next is where the following part begins: the smallest id of this one. 0: there are no more.
	Next int64 `json:"next,string"`
}

// List returns the events that the selection names, in any state unless it names some, the latest
// first: at most s.Limit.
func (o *Ops) List(ctx context.Context, s Selection) (page Page, err error) {
	if err := s.check([]string{Pending, Processing, Succeeded, Ignored, Failed}); err != nil {
		return Page{}, err
	}
	found, err := o.gather(ctx, s, true, false, s.Limit+1)
	if err != nil {
		return Page{}, fmt.Errorf("list events: %w", err)
	}
	if int64(len(found)) > s.Limit {
		found = found[:s.Limit]
		page.Next = found[s.Limit-1].InboxID
	}
	ids := make([]int64, len(found))
	for i, c := range found {
		ids[i] = c.InboxID
	}
	if page.Events, err = o.events(ctx, ids); err != nil {
		return Page{}, fmt.Errorf("list events: %w", err)
	}
	return page, nil
}
