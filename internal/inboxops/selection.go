package inboxops

import (
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
)

// A Selection names events of inboxes. Its conditions narrow each other. The zero value names every
// event, which is why callers should refuse it: see Empty.
type Selection struct {
	// Receiver and Source by name. Empty: any.
	Receiver, Source string
	// IDs are inbox ids (inbox_events.inbox_id). Empty: any.
	IDs []int64
	// FromID and ToID bound the inbox id, both inclusive. 0: no bound.
	FromID, ToID int64
	// States of the events. Empty: those that the operation is meant for.
	States []string
	// Type is a pattern of event types, in which '*' stands for any characters. Empty: any.
	Type string
	// Key is one idempotency key. Empty: any.
	Key string
	// OrderingKey is one ordering key. Empty: any, and none.
	OrderingKey string
	// RelatedReference is one related reference. Empty: any, and none.
	RelatedReference string
	// Since and Until bound when an event was received: Since <= received_at < Until. Zero: no
	// bound.
	Since, Until time.Time
	// Limit of how many events, those with the lowest ids. 0: no limit.
	Limit int64
}

// Empty reports whether nothing narrows the selection: a receiver or a source alone does not.
func (s Selection) Empty() bool {
	return len(s.IDs) == 0 && s.FromID == 0 && s.ToID == 0 && len(s.States) == 0 && s.Since.IsZero() && s.Until.IsZero() &&
		s.Type+s.Key+s.OrderingKey+s.RelatedReference == ""
}

// check returns an error if the selection contradicts itself or names states that are not among
// allowed.
func (s Selection) check(allowed []string) error {
	switch {
	case s.FromID < 0 || s.ToID < 0:
		return fmt.Errorf("ids %d to %d: inbox ids begin at 1", s.FromID, s.ToID)
	case s.ToID != 0 && s.FromID > s.ToID:
		return fmt.Errorf("ids %d to %d: the first is above the last", s.FromID, s.ToID)
	case !s.Since.IsZero() && !s.Until.IsZero() && !s.Since.Before(s.Until):
		return fmt.Errorf("since %s is not before until %s", s.Since.Format(time.RFC3339), s.Until.Format(time.RFC3339))
	case s.Limit < 0:
		return fmt.Errorf("limit %d is negative", s.Limit)
	}
	return batch.CheckChosen("state", s.States, allowed)
}

// has reports whether any of the states is chosen.
func (s Selection) has(states ...string) bool {
	return slices.ContainsFunc(states, func(state string) bool { return slices.Contains(s.States, state) })
}
