package ops

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// DeliveryFilter chooses deliveries to list. The zero value is the newest of all.
type DeliveryFilter struct {
	// Status: pending, delivered, failed or discarded. Empty: any.
	Status string
	// Attempts is how many a delivery has had at least. 0: any.
	Attempts int
	// Destination by name. Empty: any.
	Destination string
	// Parked deliveries only: those that match no route. They have no destination.
	Parked bool
	// EventID of the one event to list the deliveries of. 0: any.
	EventID int64
	// EventIDs of the events to list the deliveries of. Empty: any.
	EventIDs []int64
	// Type is a pattern of event types, in which '*' stands for any characters. Empty: any.
	Type string
	// Since and Until bound when the event was created: Since <= created_at < Until. Zero: no
	// bound.
	Since, Until time.Time
	// Reason of the last attempt. Empty: any.
	Reason string
	// OrderingKey of the event. Empty: any, also none.
	OrderingKey string
	// Key is the idempotency key of the one event. Empty: any.
	Key string
	// Related is the related reference of the event. Empty: any.
	Related string
	// After is the last delivery of the page before: what follows it is returned. The zero value is
	// the first page.
	After DeliveryPosition
	// Limit is how many are returned at most, the newest first. 0: 50.
	Limit int
	// Among is among how many deliveries what matches is looked for, unless an index leads to it.
	// 0: 10,000.
	Among int
}

// A DeliveryPosition is a delivery's place in a list.
type DeliveryPosition struct {
	EventID     int64
	Destination string
}

// String returns the position as [ParsePosition] reads it.
func (p DeliveryPosition) String() string {
	return strconv.FormatInt(p.EventID, 10) + "." + p.Destination
}

// ParsePosition reads what String has written; false: it has not.
func ParsePosition(text string) (DeliveryPosition, bool) {
	number, destination, has := strings.Cut(text, ".")
	id, err := strconv.ParseInt(number, 10, 64)
	return DeliveryPosition{id, destination}, err == nil && id > 0 && has
}

// A DeliveryPage is one page of a list.
type DeliveryPage struct {
	Deliveries []Delivery
	// Next is where the next page begins; nil: this is the last.
	Next *DeliveryPosition
	// Searched is how far back this page has looked, if it ends there without being full. nil: it
	// is full, or nothing older matches.
	Searched *Searched
}

// Searched is the last delivery that a search has looked at.
type Searched struct {
	DeliveryPosition
	// CreatedAt is when its event was created; nil: the event is gone.
	CreatedAt *time.Time
}

const (
	// searchedRows is how many deliveries a page looks at, unless the filter says so.
	searchedRows = 10_000
	// firstWindow and widestWindow are how many one statement looks at: the first ones mostly fill
	// the page.
	firstWindow, widestWindow = 200, 5_000
	// asideWindow is how many it looks at for each destination.
	asideWindow = 1_000
)

// Deliveries lists the deliveries that match the filter, the newest first. Those of named events,
// failed and parked ones, and pending ones up to 10,000, are found by indexes. Others are looked
// for among a bounded number of deliveries, from the newest on, whatever the size of the table: see
// [DeliveryPage.Searched].
func (o *Outbox) Deliveries(ctx context.Context, filter DeliveryFilter) (page DeliveryPage, err error) {
	filter.Limit, filter.Among = cmp.Or(filter.Limit, 50), cmp.Or(filter.Among, searchedRows)
	if filter.EventID != 0 || len(filter.EventIDs) > 0 || filter.Key != "" {
		page.Deliveries, err = o.deliveriesOf(ctx, filter)
		if len(page.Deliveries) == filter.Limit {
			page.Next = page.last()
		}
		return page, err
	}
	from, names, err := o.sourceOf(ctx, filter)
	if err != nil {
		return page, err
	}
	page.Deliveries = []Delivery{}
	for looked, old, rows := 0, 0, max(firstWindow, filter.Limit); ; rows = min(rows*5, widestWindow) {
		switch from {
		case failedDeliveries, parkedDeliveries:
			rows = max(asideWindow, filter.Limit)
		case pendingDeliveries:
			rows = CountedTo + 1
		}
		w, err := o.readWindow(ctx, from, names, filter, rows, filter.Limit-len(page.Deliveries))
		if err != nil {
			return DeliveryPage{}, err
		}
		page.Deliveries = append(page.Deliveries, w.found...)
		looked += w.rows
		if old++; !w.last.createdBefore(filter.Since) {
			old = 0
		}
		switch {
		case len(page.Deliveries) == filter.Limit:
			page.Next = page.last()
			return page, nil
		case w.rows < rows, old == 2: // the first may be an event of a long transaction
			return page, nil
		case looked >= filter.Among:
			page.Next, page.Searched = &w.last.DeliveryPosition, &w.last
			return page, nil
		}
		filter.After = w.last.DeliveryPosition
	}
}

// last returns the position of the last delivery.
func (p DeliveryPage) last() *DeliveryPosition {
	d := p.Deliveries[len(p.Deliveries)-1]
	return &DeliveryPosition{d.EventID, d.Destination}
}

// createdBefore reports whether the event was created so long before a bound that older ones cannot
// have been created after it: ids are given in the order of inserts, and created_at is when a
// transaction began.
func (s Searched) createdBefore(since time.Time) bool {
	return !since.IsZero() && s.CreatedAt != nil && s.CreatedAt.Before(since.Add(-longTransaction))
}

// longTransaction is how long a transaction that inserts events lasts at most, as far as a search
// by time goes.
const longTransaction = time.Hour

// sourceOf returns along which index the filter is best read, and for which destinations.
func (o *Outbox) sourceOf(ctx context.Context, filter DeliveryFilter) (from source, names []string, err error) {
	names = []string{filter.Destination}
	if filter.Parked {
		return parkedDeliveries, names, nil
	}
	if filter.Status != "failed" && filter.Status != "pending" {
		return allDeliveries, nil, nil
	}
	if filter.Destination == "" {
		if names, err = o.Destinations(ctx); err != nil {
			return "", nil, err
		}
	}
	if filter.Status == "failed" {
		return failedDeliveries, names, nil
	}
	if filter.Destination == "" {
		names = append(names, "") // what is parked is pending too
	}
	few, err := o.fewPending(ctx, names)
	if err != nil || few {
		return pendingDeliveries, names, err
	}
	return allDeliveries, nil, nil
}

// Delivery is one delivery with what identifies its event; never the payload.
type Delivery struct {
	EventID        int64      `json:"event_id,string"`
	EventType      string     `json:"event_type"`
	IdempotencyKey string     `json:"idempotency_key"`
	CreatedAt      *time.Time `json:"created_at"`
	Destination    string     `json:"destination"` // empty: parked
	Status         string     `json:"status"`
	Attempts       int        `json:"attempts"`
	NextAttemptAt  time.Time  `json:"next_attempt_at"` // of the pending
	LastAttemptAt  *time.Time `json:"last_attempt_at"`
	DeliveredAt    *time.Time `json:"delivered_at"`
	LastHTTPStatus *int       `json:"last_http_status"`
	LastReason     *string    `json:"last_reason"`
	LastError      *string    `json:"last_error"`
	ClaimedBy      *int32     `json:"claimed_by,string"` // the relay_id of the relay that has it in flight
	OrderingKey    *string    `json:"ordering_key"`
	Replay         bool       `json:"replay"` // an operator made it pending again
	// NotAfter is when the last request may reach the receiver, as X-Outbox-Not-After said. nil:
	// any time.
	NotAfter *time.Time `json:"not_after"`
	// LatencySeconds is from when the event became due (its created_at, or a later available_at) to
	// the delivery. nil: not delivered, or by a replay.
	LatencySeconds *float64 `json:"latency_seconds"`
}

// Attempt is one line of the attempt log, which holds the attempts that did not deliver.
type Attempt struct {
	EventID     int64          `json:"event_id,string"`
	Destination string         `json:"destination"`
	Attempt     int            `json:"attempt"`
	StartedAt   time.Time      `json:"started_at"`
	DurationMS  int            `json:"duration_ms"`
	RelayID     int32          `json:"relay_id,string"`
	HTTPStatus  *int           `json:"http_status"`
	Outcome     policy.Outcome `json:"outcome"`
	Reason      policy.Reason  `json:"reason"`
	Error       *string        `json:"error"`
}

// Head is the delivery of an ordering key that the later ones wait for.
type Head struct {
	Delivery
	// Behind counts what waits for it, up to 10,001.
	Behind int64 `json:"behind"`
}

// An EventReport is what the outbox holds of one event. It has no deliveries as long as it is not
// routed, as Waits says.
type EventReport struct {
	Event      Event      `json:"event"`
	Deliveries []Delivery `json:"deliveries"`
	Attempts   []Attempt  `json:"attempts"`
	Waits      []Wait     `json:"waits"`
	Replays    []Replay   `json:"replays"` // of its deliveries that were replayed, as far as the audit knows
	discards   []discard
	behind     map[string]int64 // by the destination where it has failed: what waits behind it
}

// Event returns an event, also an archived one, its deliveries, its logged attempts, and why it
// waits, without its payload and the values of its headers. The error is an [UnknownEvent] if there
// is none.
func (o *Outbox) Event(ctx context.Context, id int64) (e EventReport, err error) {
	if e.Event, e.Deliveries, err = o.event(ctx, id); err != nil {
		return EventReport{}, err
	}
	if e.Attempts, err = o.Attempts(ctx, id); err != nil {
		return EventReport{}, err
	}
	if e.Waits, err = o.Waits(ctx, id); err != nil {
		return EventReport{}, err
	}
	if e.behind, err = o.behindFailed(ctx, id); err != nil {
		return EventReport{}, err
	}
	replays, err := o.orders(ctx, e.Event, "replay")
	if err != nil {
		return EventReport{}, err
	}
	discards, err := o.orders(ctx, e.Event, "discard")
	if err != nil {
		return EventReport{}, err
	}
	e.Replays = replaysOf(e.Deliveries, replays, discards, e.Attempts)
	e.discards = discardsOf(e.Deliveries, discards, e.Replays)
	return e, nil
}
