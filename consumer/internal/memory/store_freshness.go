package memory

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// applyIfNewerSQL records a version if it is the newest. The row's lock keeps a second transaction
// waiting until the first has ended, and its version is then compared with what that one left. A
// version of the other kind leaves both kinds in the row, which its CHECK refuses: so mixing costs
// no statement to find out, and cannot be done by hand either.
const applyIfNewerSQL = `
INSERT INTO inbox_freshness AS f (scope, entity, sequence, at, tiebreak, receiver)
VALUES ($1::text, $2::text, $3::bigint, $4::timestamptz, $5::bigint, $6::text)
ON CONFLICT ON CONSTRAINT inbox_freshness_pkey DO UPDATE
SET sequence   = coalesce(excluded.sequence, f.sequence),
    at         = coalesce(excluded.at, f.at),
    tiebreak   = coalesce(excluded.tiebreak, f.tiebreak),
    updated_at = now()
WHERE excluded.sequence > f.sequence
   OR (excluded.at, excluded.tiebreak) > (f.at, f.tiebreak)
   OR (excluded.sequence IS NULL) <> (f.sequence IS NULL)`

// ApplyIfNewer is consumer.ApplyIfNewer.
func ApplyIfNewer(ctx context.Context, scope, entity string, v Version, exec Exec) (bool, error) {
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
	rows, err := exec(ctx, applyIfNewerSQL, scope, entity, sequence, at, tiebreak, handlerctx.From(ctx).Event.Receiver)
	switch {
	case sqlstate.Of(err) == sqlstate.CheckViolation:
		return false, fmt.Errorf("compare versions: earlier versions of this entity in scope %q are of the other kind, and %v cannot be compared with them; use one of BySequence and ByTime for a scope: %w",
			scope, v, err)
	case err != nil:
		return false, fmt.Errorf("compare versions: %w", err)
	}
	return rows > 0, nil
}
