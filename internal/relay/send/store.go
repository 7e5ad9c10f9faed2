package send

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
)

const SelectPayload = `SELECT CASE WHEN octet_length(payload::text) <= 1048576 THEN payload END FROM outbox WHERE id = $1`

// payload loads a payload that was too large to come with the claim; nil: it breaks
// [intake.RulePayload].
func (s *Senders) payload(ctx context.Context, eventID int64) (payload []byte, err error) {
	return pg.Value[[]byte](ctx, s.DB, "load payload", SelectPayload, eventID)
}

const postponeSuspect = `
UPDATE outbox_delivery
SET next_attempt_at = now() + make_interval(secs => $4), claimed_by = NULL, lease_expires_at = NULL
WHERE event_id = $1 AND destination = $2 AND claim = $3 AND status NOT IN ('delivered', 'failed', 'discarded')`

// postponeClaimed gives a claim back, to be made again after the given time.
func (s *Senders) postponeClaimed(ctx context.Context, d *lane.Delivery, wait time.Duration) error {
	return s.changeClaimed(ctx, "postpone suspect", postponeSuspect, d, wait.Seconds())
}

const countSuspect = `
UPDATE outbox_delivery SET rescues = least(rescues + $4::int, 32767)
WHERE event_id = $1 AND destination = $2 AND claim = $3 AND status NOT IN ('delivered', 'failed', 'discarded')`

// countAlone counts a request that is about to be sent alone, or takes that back if requests is -1.
// A settle sets the count back.
func (s *Senders) countAlone(ctx context.Context, d *lane.Delivery, requests int) error {
	return s.changeClaimed(ctx, "count suspect", countSuspect, d, requests)
}

// changeClaimed runs a statement on the row of a delivery that this relay has claimed.
func (s *Senders) changeClaimed(ctx context.Context, operation, statement string, d *lane.Delivery, others ...any) error {
	return pg.Exec(ctx, s.DB, operation, statement, append([]any{d.EventID, d.Destination, d.Fence}, others...)...)
}
