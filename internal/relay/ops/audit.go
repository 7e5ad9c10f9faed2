package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Origin says through what an operator gave an order.
type Origin string

// The origins that the audit knows.
const (
	OriginCLI  Origin = "cli"
	OriginAPI  Origin = "api"
	OriginPage Origin = "page"
)

// An Actor is who gives an order, for the audit.
type Actor struct {
	// Name of the person. Empty: the database user.
	Name string
	// Origin of the order. Empty: OriginCLI.
	Origin Origin
}

// As returns an Outbox that records the actor with every change.
func (o *Outbox) As(actor Actor) *Outbox {
	as := *o
	as.actor = actor
	return &as
}

// An AuditEntry is one thing that an operator did.
type AuditEntry struct {
	ID int64     `json:"id,string"`
	At time.Time `json:"at"`
	// UpdatedAt is when the last batch of a bulk operation was committed.
	UpdatedAt time.Time `json:"updated_at"`
	Actor     string    `json:"actor"`
	Origin    Origin    `json:"origin"`
	// Action: pause, resume, reset_breaker, replay, retry, discard, interrupt_operation,
	// resume_operation, reveal_payload, create_deliveries, accept_identity, acknowledge_alert,
	// silence_alerts, archive or send. Names are added, never renamed.
	Action string `json:"action"`
	// State: running, stalled, done, interrupted or failed. A stalled operation runs by its row,
	// but has changed nothing for 45 seconds: its process was probably killed.
	State       string  `json:"state"`
	Destination *string `json:"destination"`
	EventID     *int64  `json:"event_id,string"`
	// Selection of a bulk operation; nil: the operation has none, or it names too many events to be
	// kept.
	Selection *Selection `json:"selection"`
	// Matched is what the preview counted, and Done is what was changed so far.
	Matched int64 `json:"matched"`
	Done    int64 `json:"done"`
	// Detail is the reason of a pause, or the error that ended an operation.
	Detail *string `json:"detail"`
}

// Resumable reports whether [Outbox.TakeUp] can continue with the operation. One that changes
// delivered or discarded deliveries is not: it would find again what it has replayed already. Nor
// is one of which the audit does not know when it was ordered: it would change what came since.
func (e AuditEntry) Resumable() bool {
	ended := e.State == "stalled" || e.State == "interrupted" || e.State == "failed"
	return ended && e.Selection != nil && !e.Selection.SeenAt.IsZero() && e.Selection.repeatable() && slices.Contains([]string{"replay", "retry", "discard"}, e.Action)
}

func (s Selection) repeatable() bool {
	for _, status := range s.Statuses {
		if status != "failed" && status != "pending" {
			return false
		}
	}
	return true
}

// auditedIDs is up to how many events the audit keeps the ids of a selection.
const auditedIDs = 1000

// ErrNotResumable says that an operation cannot continue: it runs, is done, or cannot be repeated.
var ErrNotResumable = errors.New("the operation cannot continue")

// An Order is a bulk change that an operator wants.
type Order struct {
	Action    string        `json:"action"` // replay, retry or discard
	Selection Selection     `json:"selection"`
	Memory    time.Duration `json:"-"`       // of a replay, see [Outbox.Replay]
	Matched   int64         `json:"matched"` // that a preview counted; 0: there was none
}

// bounded returns the selection of no more than the preview counted.
func (r Order) bounded() Selection {
	s := r.Selection
	if 0 < r.Matched && r.Matched < batch.CountLimit {
		s.Limit = r.Matched
	}
	return s
}

func (r Order) action() (action, error) {
	switch r.Action {
	case "replay":
		return replayAction(r.Memory), nil
	case "retry":
		return retryAction(), nil
	case "discard":
		return discardAction(), nil
	}
	return action{}, fmt.Errorf("action %q is not known; choose replay, retry or discard", r.Action)
}

// Preview counts what the order would change, up to [batch.CountLimit], and changes nothing. The
// order that it returns changes no more than that: not what came, failed or was delivered since.
func (o *Outbox) Preview(ctx context.Context, order Order) (Order, Bulk, error) {
	a, err := order.action()
	if err == nil {
		order.Selection, err = o.seen(ctx, order.Selection)
	}
	if err != nil {
		return order, Bulk{}, err
	}
	found, err := o.preview(ctx, a, order.Selection)
	order.Matched = found.Matched
	return order, found, err
}

// Do records the order in the audit and does it, as [Outbox.Replay] and [Outbox.Discard] do.
func (o *Outbox) Do(ctx context.Context, order Order, progress func(Bulk)) (Bulk, error) {
	id, order, err := o.Begin(ctx, order)
	if err != nil {
		return Bulk{}, fmt.Errorf("%s: %w", order.Action, err)
	}
	return o.Work(ctx, id, order, progress)
}

// Begin records the order in the audit and returns its number there. Work does what it returns.
func (o *Outbox) Begin(ctx context.Context, order Order) (int64, Order, error) {
	a, err := order.action()
	if err == nil && order.Selection.SeenAt.IsZero() {
		order.Selection, err = o.seen(ctx, order.Selection)
	}
	if err != nil {
		return 0, order, err
	}
	row := auditRow{action: a.name, destination: order.Selection.Destination, selection: &order.Selection, matched: order.Matched}
	if n := len(order.Selection.EventIDs); n > auditedIDs {
		row.selection, row.detail = nil, fmt.Sprintf("%d events by id", n)
	}
	id, err := o.beginAudit(ctx, row)
	return id, order, err
}

// Work does an order that Begin or TakeUp has returned. It works as [Outbox.Replay] and
// [Outbox.Discard] do.
func (o *Outbox) Work(ctx context.Context, id int64, order Order, progress func(Bulk)) (Bulk, error) {
	a, err := order.action()
	if err != nil {
		return Bulk{}, err
	}
	return o.work(ctx, a, order.bounded(), id, progress)
}

// TakeUp makes an operation that was interrupted or killed run again, and returns what is left to
// do: Work finds what it has not changed, within what is left of what the preview counted. What it
// has replayed, and what has failed again since, is not replayed a second time. The error wraps
// [ErrNotResumable] if there is no such operation.
func (o *Outbox) TakeUp(ctx context.Context, id int64) (Order, error) {
	entry, err := o.AuditEntry(ctx, id)
	if err != nil {
		return Order{}, err
	}
	if !entry.Resumable() {
		return Order{}, fmt.Errorf("%w: %s %d is %s", ErrNotResumable, entry.Action, id, entry.State)
	}
	if err := o.resumeAudit(ctx, id); err != nil {
		return Order{}, err
	}
	left := Order{Selection: *entry.Selection, Matched: entry.Matched}.bounded()
	if left.Limit > 0 {
		left.Limit = cmp.Or(max(left.Limit-entry.Done, 0), -1)
	}
	return Order{Action: entry.Action, Selection: left}, nil
}

// RecordInterrupt records in the audit who ends an operation.
func (o *Outbox) RecordInterrupt(ctx context.Context, id int64) error {
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return o.record(ctx, tx, auditRow{action: "interrupt_operation", detail: fmt.Sprintf("operation %d", id)})
	})
}

// endOf returns the last state of an operation, and what the audit says of its error.
func endOf(ctx context.Context, err error) (state, detail string) {
	switch {
	case err == nil:
		return "done", ""
	case context.Cause(ctx) != nil:
		return "interrupted", ""
	}
	return "failed", err.Error()
}

// Reveal returns what Event does, with the payload and the headers, after it has recorded in the
// audit who sees them.
func (o *Outbox) Reveal(ctx context.Context, eventID int64) (EventReport, error) {
	report, err := o.Event(ctx, eventID)
	if err != nil || report.Event.Type == "" {
		return report, err
	}
	report.Event.Payload, report.Event.Headers, err = o.reveal(ctx, eventID)
	return report, err
}

// durably runs f in a transaction whose commit survives a crash of the server, and that holds its
// locks for seconds at most.
func (o *Outbox) durably(ctx context.Context, f func(context.Context, pgx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	return pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, durable); err != nil {
			return err
		}
		return f(ctx, tx)
	})
}

// maxActor bounds the name of a person, in bytes.
const maxActor = 256

// actorOf returns the name and the origin that the audit records.
func (o *Outbox) actorOf() (name string, origin Origin) {
	return plain.Shorten(plain.Line(o.actor.Name), maxActor), cmp.Or(o.actor.Origin, OriginCLI)
}
