package ops

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A Selection names deliveries. Its conditions narrow each other; the zero value names every
// delivery, which is why callers should refuse it: see Empty.
type Selection struct {
	// EventIDs are the events whose deliveries are meant. Empty: any event.
	EventIDs batch.IDs `json:"event_ids,omitempty"`
	// Destination by name. Empty: any, also none (parked).
	Destination string `json:"destination,omitempty"`
	// Parked deliveries only: those that match no route.
	Parked bool `json:"parked,omitempty"`
	// Statuses of the deliveries. Replay takes failed (the default), delivered and discarded;
	// Discard takes pending and failed (both by default), and Retry pending.
	Statuses []string `json:"statuses,omitempty"`
	// Type is a pattern of event types, in which '*' stands for any characters. Empty: any.
	Type string `json:"type,omitempty"`
	// Since and Until bound when the event was created: Since <= created_at < Until. Zero: no
	// bound.
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
	// Reason of the last attempt, as in [Delivery]. Empty: any.
	Reason string `json:"reason,omitempty"`
	// OrderingKey of the event. Empty: any, also none.
	OrderingKey string `json:"ordering_key,omitempty"`
	// Limit is how many are changed at most. 0: no limit; below 0: none.
	Limit int64 `json:"limit,omitempty"`
	// Rate is how many deliveries a second a replay makes due, so that live events do not wait
	// behind them. nil: [DefaultReplayRate]; 0: as many as the database can change. Nothing but a
	// replay has a rate.
	Rate *int64 `json:"rate,omitempty"`
	// SeenAt and SeenEvent are set by a preview, or by the begin of an order without one: the time
	// of the database, and the largest id of an event that had a delivery. What came, failed or was
	// delivered later is not changed, however long the operation lasts.
	SeenAt    time.Time `json:"seen_at,omitzero"`
	SeenEvent int64     `json:"seen_event,omitempty,string"`

	waitingAt time.Time // of a retry: what is due later waits for its next attempt
}

// Empty reports whether nothing narrows the selection: not even a status was named.
func (s Selection) Empty() bool {
	return len(s.EventIDs) == 0 && len(s.Statuses) == 0 && !s.Parked && s.Since.IsZero() && s.Until.IsZero() &&
		s.Destination+s.Type+s.Reason+s.OrderingKey == ""
}

// A Bulk counts what a replay or a discard found and did. It counts deliveries.
type Bulk struct {
	batch.Counts
	// InFlight ones were left alone: a relay is sending them.
	InFlight int64 `json:"in_flight"`
	// TooOld ones cannot be replayed: their receivers may have forgotten that they processed them.
	TooOld int64 `json:"too_old"`
	// Rate of a replay that was previewed, and for how many seconds the matched keep it busy.
	Rate    int64   `json:"rate,omitempty"`
	Seconds float64 `json:"seconds,omitempty"`
	// NotWaiting ones cannot be retried: they are due already, or their producer wants them sent
	// later.
	NotWaiting int64 `json:"not_waiting,omitempty"`
	// Obstacles to a retry or a replay: what keeps a destination from being sent to, each with the
	// command that ends it. A retry of at most ten named events says of each, too, which one comes
	// before it in its ordering key.
	Obstacles []string `json:"obstacles,omitempty"`
	// EventMissing ones cannot be replayed: their event is gone.
	EventMissing int64 `json:"event_missing"`
	// BreaksRule ones are never sent: their event breaks a rule of its table.
	BreaksRule int64 `json:"breaks_rule,omitempty"`
	// OtherStatus counts, by status, the deliveries of named events that the selection leaves out
	// for their status.
	OtherStatus map[string]int64 `json:"other_status,omitempty"`
	// NotRouted counts the named events that have no delivery yet, since no relay has taken them,
	// or one is about to write it. Where none are named, a discard counts those that have waited
	// for more than a second: their deliveries may match later. Up to 10,001.
	NotRouted int64 `json:"not_routed,omitempty"`
	// Unknown counts the named events without a delivery here.
	Unknown int64 `json:"unknown_events"`
	// UnknownIDs are the first of them.
	UnknownIDs batch.IDs `json:"unknown_event_ids,omitempty"`
	// Sample holds the first few of the matched.
	Sample []Sample `json:"sample,omitempty"`

	destinations []string // of what matched
}

// Sample is one of the deliveries that a bulk command would change.
type Sample struct {
	EventID        int64      `json:"event_id,string"`
	EventType      string     `json:"event_type"`
	IdempotencyKey string     `json:"idempotency_key"`
	CreatedAt      *time.Time `json:"created_at"`
	Destination    string     `json:"destination"` // empty: parked
	Status         string     `json:"status"`
}

// An action is what a bulk command does to the deliveries that it finds.
type action struct {
	name     string
	allowed  []string // statuses that it can change
	standard []string // those that it changes unless the selection names some
	memory   time.Duration
	inFlight bool         // it changes what is in flight too
	paced    bool         // it spreads what it changes over time
	ends     bool         // what it changes blocks its ordering key no longer
	change   string       // statement
	check    func() error // before each batch; nil: none. Then nothing may be missed
}

func replayAction(memory time.Duration) action {
	return action{
		name: "replay", allowed: []string{"failed", "delivered", "discarded"}, standard: []string{"failed"}, memory: memory, paced: true, change: replayDeliveries,
	}
}

func discardAction() action {
	statuses := []string{"pending", "failed"}
	return action{name: "discard", allowed: statuses, standard: statuses, ends: true, change: discardDeliveries}
}

// retryAction makes due what waits for its next attempt.
func retryAction() action {
	statuses := []string{"pending"}
	return action{name: "retry", allowed: statuses, standard: statuses, change: retryDeliveries}
}

// quarantineAction discards what the original of a copied database delivers, in flight there or
// not.
func quarantineAction(check func() error) action {
	statuses := []string{"pending"}
	return action{name: "discard", allowed: statuses, standard: statuses, inFlight: true, change: discardQuarantined, check: check}
}

// Replay makes deliveries pending again, with all their attempts before them, behind everything
// that is not a replay: so many a second as the selection says, because a receiver, the relays and
// the database share what they have with live events. It leaves pending ones alone, and events
// created longer ago than memory: the receiver may have forgotten that it processed them, and would
// process them twice. 0: it never forgets.
//
// Each batch is its own transaction, and progress, which may be nil, is called after each.
// When ctx ends, the current batch is finished, and the error says why it ended. With every error,
// Bulk is what was done. A call finds a delivery at most once, and not while it is pending, so that
// a replay can be repeated.
func (o *Outbox) Replay(ctx context.Context, selection Selection, memory time.Duration, progress func(Bulk)) (Bulk, error) {
	return o.Do(ctx, Order{Action: "replay", Selection: selection, Memory: memory}, progress)
}

// Discard gives pending, parked and failed deliveries up for good, unless they are in flight. It
// works in batches as Replay does.
func (o *Outbox) Discard(ctx context.Context, selection Selection, progress func(Bulk)) (Bulk, error) {
	return o.Do(ctx, Order{Action: "discard", Selection: selection}, progress)
}

// Retry makes due what was attempted and waits for its next attempt. Its attempts, its place in its
// ordering key and its not_after stay, and so do a pause and an open breaker: [Bulk.Obstacles]
// names them. It works in batches as Replay does, and makes a delivery due once: one that fails
// again meanwhile waits for its next attempt.
func (o *Outbox) Retry(ctx context.Context, selection Selection, progress func(Bulk)) (Bulk, error) {
	return o.Do(ctx, Order{Action: "retry", Selection: selection}, progress)
}

// DiscardQuarantined gives every pending delivery of a copied database up, parked ones and those in
// flight too, for the reason "quarantined"; see [identity.Report.Discardable]. Events that are not
// routed yet, or in a relay's hand, get pending deliveries before. It accepts nothing, so that
// relays continue waiting. It works in batches as Discard does, and returns an error if a delivery
// was missed: accepting the database would send that. It stops as soon as another command accepts
// the database.
func (o *Outbox) DiscardQuarantined(ctx context.Context, environment string, progress func(Bulk)) (Bulk, error) {
	first, err := o.Identity(ctx, environment)
	if err == nil {
		err = first.Discardable()
	}
	if err != nil {
		return Bulk{}, err
	}
	a := quarantineAction(func() error {
		report, err := o.Identity(ctx, environment)
		if err == nil {
			err = report.Discardable()
		}
		if err == nil && !reflect.DeepEqual(report.Recorded, first.Recorded) {
			err = fmt.Errorf("%w: it was accepted meanwhile", identity.ErrNotQuarantined)
		}
		return err
	})
	audit, err := o.beginAudit(ctx, auditRow{action: a.name, detail: ReasonQuarantined}) // without a selection, it cannot be resumed
	if err != nil {
		return Bulk{}, fmt.Errorf("discard: %w", err)
	}
	if _, err := identity.Cover(ctx, o.pool, nil); err != nil {
		state, detail := endOf(ctx, err)
		return Bulk{}, fmt.Errorf("discard: %w", errors.Join(err, o.endAudit(ctx, audit, state, detail)))
	}
	return o.work(ctx, a, Selection{}, audit, progress)
}

// preview counts what work would find.
func (o *Outbox) preview(ctx context.Context, a action, selection Selection) (b Bulk, err error) {
	err = o.walk(ctx, a, selection, batch.Size, &b, func(found []candidate) (bool, error) {
		for _, c := range found[:min(len(found), batch.SampleSize-len(b.Sample))] {
			b.Sample = append(b.Sample, Sample{c.EventID, c.EventType, c.IdempotencyKey, c.CreatedAt, c.Destination, c.Status})
		}
		return b.Found(len(found)), nil
	})
	if err != nil {
		return b, fmt.Errorf("preview %s: %w", a.name, err)
	}
	pace := a.pace(selection)
	b.Rate, b.Seconds = int64(pace), pace.spread(b.Matched).Seconds()
	return b, nil
}

// work changes what it finds, batch by batch, and notifies relays. audit is the operation's number.
func (o *Outbox) work(ctx context.Context, a action, selection Selection, audit int64, progress func(Bulk)) (b Bulk, err error) {
	pace := a.pace(selection)
	var late error // of what follows a batch: the operation is done all the same
	err = o.walk(ctx, a, selection, pace.chunk(), &b, func(found []candidate) (bool, error) {
		for part := range slices.Chunk(found, pace.batch()) {
			begun := time.Now()
			if a.check != nil {
				if err := a.check(); err != nil {
					return false, err
				}
			}
			done, err := o.changeDeliveries(context.WithoutCancel(ctx), a, part, pace, audit)
			if err != nil {
				return false, err
			}
			first := b.Done == 0
			b.Changed(len(part), done)
			if first && b.Done > 0 { // relays continue looking there as long as they find something
				late = o.requestSweep(context.WithoutCancel(ctx))
			}
			if progress != nil {
				progress(b)
			}
			if err := sleep.For(ctx, pace.rest(len(part), time.Since(begun))); err != nil {
				return false, err
			}
		}
		return true, nil
	})
	if b.Done > 0 { // also after an error: what was done must not wait for a relay's own sweep
		late = errors.Join(late, o.requestSweep(context.WithoutCancel(ctx)), o.endFailed(context.WithoutCancel(ctx)))
	}
	if err == nil && a.check != nil && b.Missed > 0 {
		err = fmt.Errorf("%s locked or changed by another session", plain.Plural(b.Missed, "delivery was", "deliveries were"))
	}
	state, detail := endOf(ctx, err)
	if auditErr := o.endAudit(ctx, audit, state, detail); err == nil {
		err = auditErr
	}
	if err == nil {
		err = late
	}
	if err != nil {
		return b, fmt.Errorf("%s: %w", a.name, err)
	}
	return b, nil
}
