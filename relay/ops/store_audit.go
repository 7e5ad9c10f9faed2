package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// StalledAfter is for how long a bulk operation that lives may change nothing: one batch ends within the timeout of a statement.
const StalledAfter = 45 * time.Second

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
func (o *Outbox) beginAudit(ctx context.Context, action string, selection Selection, matched int64) (id int64, err error) {
	row := auditRow{action: action, state: "running", destination: selection.Destination, selection: &selection, matched: matched}
	if n := len(selection.EventIDs); n > auditedIDs {
		row.selection, row.detail = nil, fmt.Sprintf("%d events by id", n)
	}
	err = o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		id, err = o.insertAudit(ctx, tx, row)
		return err
	})
	return id, err
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
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pg.StatementTimeout)
	defer cancel()
	if _, err := o.pool.Exec(ctx, endAudit, id, state, detail); err != nil {
		return fmt.Errorf("write audit: %w", err)
	}
	return nil
}

// Two operators may press the button at the same time: one of them finds the row changed.
const resumeAudit = `
UPDATE outbox_audit SET state = 'running', detail = NULL, updated_at = clock_timestamp()
WHERE id = $1 AND (state IN ('interrupted', 'failed') OR state = 'running' AND updated_at < clock_timestamp() - make_interval(secs => $2))`

func (o *Outbox) resumeAudit(ctx context.Context, id int64) error {
	return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, resumeAudit, id, StalledAfter.Seconds())
		switch {
		case err != nil:
			return fmt.Errorf("write audit: %w", err)
		case tag.RowsAffected() == 0:
			return fmt.Errorf("%w: another process goes on with operation %d", ErrNotResumable, id)
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

// Audit lists what operators did, the newest first: the entries with numbers below before (0: all), limit of them at most (0: 50).
func (o *Outbox) Audit(ctx context.Context, before int64, limit int) ([]AuditEntry, error) {
	return collect[AuditEntry](ctx, o.pool, "list audit", auditPage, StalledAfter.Seconds(), before, cmp.Or(limit, 50))
}

const auditByID = selectAudit + `WHERE id = $2`

// ErrNoAuditEntry says that the audit has no entry of a number.
var ErrNoAuditEntry = errors.New("no such operation")

// AuditEntry returns one entry. The error wraps [ErrNoAuditEntry] if there is none.
func (o *Outbox) AuditEntry(ctx context.Context, id int64) (AuditEntry, error) {
	list, err := collect[AuditEntry](ctx, o.pool, "read audit", auditByID, StalledAfter.Seconds(), id)
	switch {
	case err != nil:
		return AuditEntry{}, err
	case len(list) == 0:
		return AuditEntry{}, fmt.Errorf("%w: %d", ErrNoAuditEntry, id)
	}
	return list[0], nil
}
