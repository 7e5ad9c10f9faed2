package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// stalledAfter is for how long a bulk operation that lives may change nothing: one batch ends
// within the timeout of a statement.
const stalledAfter = 45 * time.Second

// auditRow is what one operation writes.
type auditRow struct {
	action, state, destination, detail string
	eventID                            int64
	selection                          *Selection
	matched, done                      int64
}

const insertAudit = `
INSERT INTO outbox_audit (actor, origin, action, state, destination, event_id, selection, matched, done, detail)
VALUES (coalesce(nullif($1, ''), session_user::text), $2, $3, $4, nullif($5, ''), nullif($6::bigint, 0), $7, $8, $9, nullif($10, ''))
RETURNING id`

// record writes what an operator did, in the transaction that does it.
func (o *Outbox) record(ctx context.Context, tx pg.DB, row auditRow) error {
	_, err := o.insertAudit(ctx, tx, row)
	return err
}

func (o *Outbox) insertAudit(ctx context.Context, tx pg.DB, row auditRow) (id int64, err error) {
	name, origin := o.actorOf()
	err = tx.QueryRow(ctx, insertAudit, name, origin, row.action, cmp.Or(row.state, "done"), row.destination, row.eventID,
		row.selection, row.matched, row.done, row.detail).Scan(&id)
	if err != nil {
		return 0, fmt.Errorf("write audit: %w", err)
	}
	return id, nil
}

// beginAudit records a bulk operation that has changed nothing so far.
func (o *Outbox) beginAudit(ctx context.Context, row auditRow) (id int64, err error) {
	row.state = "running"
	err = o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		id, err = o.insertAudit(ctx, tx, row)
		return err
	})
	return id, err
}

// Recorded runs f as one operation of the audit, which has it from its begin on. f gets its number,
// and returns how much it did beyond what it has added itself, and what.
func (o *Outbox) Recorded(ctx context.Context, action string, f func(audit int64) (done int64, detail string, err error)) error {
	id, err := o.beginAudit(ctx, auditRow{action: action})
	if err != nil {
		return err
	}
	done, detail, err := f(id)
	state, cause := endOf(ctx, err)
	return errors.Join(err, growAuditBy(context.WithoutCancel(ctx), o.pool, id, done), o.endAudit(ctx, id, state, cmp.Or(cause, detail)))
}

const growAudit = `UPDATE outbox_audit SET done = done + $2, updated_at = clock_timestamp() WHERE id = $1`

// growAuditBy adds a batch to a bulk operation, in the transaction of the batch.
func growAuditBy(ctx context.Context, tx pg.DB, id, done int64) error {
	if _, err := tx.Exec(ctx, growAudit, id, done); err != nil {
		return fmt.Errorf("write audit: %w", err)
	}
	return nil
}

// Another process may have gone on with an operation that seemed killed, and may have ended it.
const endAudit = `
UPDATE outbox_audit SET state = $2, detail = coalesce(nullif($3, ''), detail), updated_at = clock_timestamp() WHERE id = $1 AND state = 'running'`

// endAudit records how a bulk operation has ended.
func (o *Outbox) endAudit(ctx context.Context, id int64, state, detail string) error {
	return pg.Exec(context.WithoutCancel(ctx), o.pool, "write audit", endAudit, id, state, detail)
}

// Two operators may press the button at the same time: one of them finds the row changed.
const resumeAudit = `
UPDATE outbox_audit SET state = 'running', detail = NULL, updated_at = clock_timestamp()
WHERE id = $1 AND (state IN ('interrupted', 'failed') OR state = 'running' AND updated_at < clock_timestamp() - make_interval(secs => $2))`

func (o *Outbox) resumeAudit(ctx context.Context, id int64) error {
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, resumeAudit, id, stalledAfter.Seconds())
		switch {
		case err != nil:
			return fmt.Errorf("write audit: %w", err)
		case tag.RowsAffected() == 0:
			return fmt.Errorf("%w: another process continues with operation %d", ErrNotResumable, id)
		}
		return o.record(ctx, tx, auditRow{action: "resume_operation", detail: fmt.Sprintf("operation %d", id)})
	})
}

const selectAudit = `
SELECT id, at, updated_at, actor, origin, action,
       CASE WHEN state = 'running' AND updated_at < clock_timestamp() - make_interval(secs => $1) THEN 'stalled' ELSE state END,
       destination, event_id, selection, matched, done, detail
FROM outbox_audit `

const auditPage = selectAudit + `WHERE ($2::bigint = 0 OR id < $2) ORDER BY id DESC LIMIT $3`

// Audit lists what operators did, the newest first: the entries with numbers below before (0: all),
// limit of them at most (0: 50).
func (o *Outbox) Audit(ctx context.Context, before int64, limit int) ([]AuditEntry, error) {
	return rows.Structs[AuditEntry](ctx, o.pool, "list audit", auditPage, stalledAfter.Seconds(), before, cmp.Or(limit, 50))
}

// A bulkOrder is what the audit says of a replay or a discard.
type bulkOrder struct {
	At          time.Time
	Actor       string
	Origin      Origin
	Destination string   // empty: any
	Statuses    []string // empty: failed
	Named       bool     // it names the event
	Reason      string   // the last reason that its deliveries had; empty: any
	Limited     bool     // it changed only so many
}

// The audit has no index but its id, so that this looks at the newest 10,000 entries. A delivery
// keeps only its last reason: the reason of an order is compared with the attempts that are logged,
// if any are.
const selectOrders = `
SELECT at, actor, origin, coalesce(destination, ''), ARRAY (SELECT jsonb_array_elements_text(selection->'statuses')), coalesce(selection ? 'event_ids', false),
       coalesce(selection->>'reason', ''), coalesce(selection ? 'limit', false)
FROM (SELECT * FROM outbox_audit ORDER BY id DESC LIMIT 10000) a
WHERE action = $5 AND done > 0 AND updated_at >= $2
  AND coalesce(NOT selection ? 'event_ids' OR selection->'event_ids' ? $1::bigint::text, true)
  AND coalesce(selection->>'ordering_key' = coalesce($3::text, ''), true)
  AND coalesce($4::text LIKE replace(replace(replace(replace(selection->>'type', '\', '\\'), '%', '\%'), '_', '\_'), '*', '%'), true)
  AND (NOT coalesce(selection ? 'reason', false) OR NOT EXISTS (SELECT FROM outbox_attempt t WHERE t.event_id = $1 AND t.started_at < a.updated_at)
       OR EXISTS (SELECT FROM outbox_attempt t WHERE t.event_id = $1 AND t.started_at < a.updated_at AND t.reason = selection->>'reason'))
  AND coalesce((selection->>'since')::timestamptz <= $2, true) AND coalesce((selection->>'until')::timestamptz > $2, true)
ORDER BY id`

// orders returns the replays or discards (action) that name an event or include it by their
// conditions, the oldest first.
func (o *Outbox) orders(ctx context.Context, e Event, action string) ([]bulkOrder, error) {
	return rows.Structs[bulkOrder](ctx, o.pool, "look for "+action+"s", selectOrders, e.ID, e.CreatedAt, e.OrderingKey, e.Type, action)
}

const auditByID = selectAudit + `WHERE id = $2`

// ErrNoAuditEntry says that the audit has no entry of a number.
var ErrNoAuditEntry = errors.New("no such operation")

// AuditEntry returns one entry. The error wraps [ErrNoAuditEntry] if there is none.
func (o *Outbox) AuditEntry(ctx context.Context, id int64) (AuditEntry, error) {
	list, err := rows.Structs[AuditEntry](ctx, o.pool, "read audit", auditByID, stalledAfter.Seconds(), id)
	switch {
	case err != nil:
		return AuditEntry{}, err
	case len(list) == 0:
		return AuditEntry{}, fmt.Errorf("%w: %d", ErrNoAuditEntry, id)
	}
	return list[0], nil
}
