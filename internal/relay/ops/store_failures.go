package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// failuresRead bounds how many deliveries of each kind a summary of failures reads.
const failuresRead = 10_000

// A FailureGroup counts the deliveries of one destination that failed, or are retried, for one
// reason.
type FailureGroup struct {
	Status string `json:"status"` // failed, or pending: it is retried
	Reason string `json:"reason"`
	Count  int64  `json:"count"`
	// LastEventID is the newest of them, LastAt when one was last attempted, and LastError what was
	// answered then.
	LastEventID int64  `json:"last_event_id,string"`
	LastAt      string `json:"last_at"`
	LastError   string `json:"last_error"`
}

const selectFailures = `
SELECT f.status, coalesce(f.last_reason, ''), count(*), max(f.event_id),
       coalesce(to_char(max(f.last_attempt_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), ''),
       coalesce((array_agg(f.last_error ORDER BY f.last_attempt_at DESC NULLS LAST))[1], '')
FROM (
    (SELECT status, last_reason, event_id, last_attempt_at, last_error FROM outbox_delivery
     WHERE destination = $1 AND status = 'failed' ORDER BY event_id DESC LIMIT $2)
    UNION ALL
    (SELECT * FROM (
         SELECT status, last_reason, event_id, last_attempt_at, last_error FROM outbox_delivery
         WHERE destination = $1 AND status = 'pending' AND blocked_by IS NULL AND NOT replay ORDER BY next_attempt_at, event_id LIMIT $2) p
     WHERE p.last_reason IS NOT NULL)
) f
GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2`

// Failures groups what failed at a destination, or is retried there, by its reason. It reads at
// most 10,000 deliveries of each kind: the newest that failed, and the first that are due.
func (o *Outbox) Failures(ctx context.Context, destination string) ([]FailureGroup, error) {
	return rows.Structs[FailureGroup](ctx, o.pool, "group failures", selectFailures, destination, failuresRead)
}
