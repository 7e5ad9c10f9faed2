package consumer

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// applyIfNewerSQL records a version if it is the newest. The row's lock keeps a second transaction waiting until the first
// has ended, and its version is then compared with what that one left. A version of the other kind leaves both kinds in
// the row, which its CHECK refuses: so mixing costs no statement to find out, and cannot be done by hand either.
const applyIfNewerSQL = `
INSERT INTO inbox_freshness AS f (scope, entity, sequence, at, tiebreak)
VALUES ($1::text, $2::text, $3::bigint, $4::timestamptz, $5::bigint)
ON CONFLICT ON CONSTRAINT inbox_freshness_pkey DO UPDATE
SET sequence   = coalesce(excluded.sequence, f.sequence),
    at         = coalesce(excluded.at, f.at),
    tiebreak   = coalesce(excluded.tiebreak, f.tiebreak),
    updated_at = now()
WHERE excluded.sequence > f.sequence
   OR (excluded.at, excluded.tiebreak) > (f.at, f.tiebreak)
   OR (excluded.sequence IS NULL) <> (f.sequence IS NULL)`

func applyIfNewer(ctx context.Context, scope, entity string, v Version, exec func(ctx context.Context, query string, args ...any) (int64, error)) (bool, error) {
	if err := cmp.Or(checkName("scope", scope), checkName("entity", entity), v.check()); err != nil {
		return false, fmt.Errorf("compare versions: %w", err)
	}
	var sequence, tiebreak *int64
	var at *time.Time
	if v.kind == bySequence {
		sequence = &v.number
	} else {
		at, tiebreak = &v.at, &v.number
	}
	rows, err := exec(ctx, applyIfNewerSQL, scope, entity, sequence, at, tiebreak)
	switch {
	case sqlState(err) == stateCheckViolation:
		return false, fmt.Errorf("compare versions: earlier versions of this entity in scope %q are of the other kind, and %v cannot be compared with them; use one of BySequence and ByTime for a scope: %w",
			scope, v, err)
	case err != nil:
		return false, fmt.Errorf("compare versions: %w", err)
	}
	return rows > 0, nil
}

// ApplyIfNewer records v as the newest version of an entity, inside the transaction of the handler, if it is newer than all
// earlier ones. Call it before writing, and write only if applied is true. Otherwise a version as new or newer is there
// already: leave the entity as it is, the event is processed all the same.
//
//	applied, err := consumer.ApplyIfNewer(ctx, tx, "customer", customer.ID, consumer.BySequence(event.Sequence))
//	if err != nil || !applied {
//		return err // nil for a stale event
//	}
//
// So the entity ends as its newest event says, in whatever order events arrive and however many are worked at once. It is
// for events that carry the whole state; those that change it by a difference need order instead. A version that equals
// the newest is stale. What is recorded rolls back with tx, and outlives the entity: a deletion is one more version, after
// which late updates are stale.
//
// Scope says what kind of thing entity is, and whose numbering v is of: entities of two senders need two scopes. Both are
// 1 to 255 bytes of UTF-8 without control characters, compared byte by byte: bring texts that people type into one form
// first. All versions of an entity are of one kind; the other one is an error.
//
// While another transaction holds the entity, ApplyIfNewer waits until that one ends, bounded by ctx and lock_timeout. A
// handler that asks about several entities asks in one order, such as sorted, because two that ask crosswise deadlock, and
// PostgreSQL fails one of them (40P01). Above READ COMMITTED it fails (40001) when the version was changed since tx began.
// Return both errors as they are: the event is then tried again. After any error of the database tx is of no more use.
func ApplyIfNewer(ctx context.Context, tx pgx.Tx, scope, entity string, v Version) (applied bool, err error) {
	return applyIfNewer(ctx, scope, entity, v, func(ctx context.Context, query string, args ...any) (int64, error) {
		tag, err := tx.Exec(ctx, query, args...)
		return tag.RowsAffected(), err
	})
}

// ApplyIfNewerSQL is [ApplyIfNewer] for database/sql.
func ApplyIfNewerSQL(ctx context.Context, tx *sql.Tx, scope, entity string, v Version) (applied bool, err error) {
	return applyIfNewer(ctx, scope, entity, v, func(ctx context.Context, query string, args ...any) (int64, error) {
		result, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	})
}
