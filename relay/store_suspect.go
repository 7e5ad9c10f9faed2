package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// rescuesAfterClaim counts the claim that this claim of d replaces, if a relay died with it or let its lease end. Above
// capacity.AloneFrom only requests that were sent alone count.
const rescuesAfterClaim = `
    CASE WHEN d.claimed_by IS NULL OR EXISTS (
             SELECT FROM outbox_void v
             WHERE v.instance = d.claimed_by AND NOT v.died AND d.lease_expires_at > v.after AND d.lease_expires_at <= v.until)
         THEN d.rescues ELSE greatest(d.rescues, least(d.rescues + 1, 6)) END`

const postponeSuspect = `
UPDATE outbox_delivery
SET next_attempt_at = now() + make_interval(secs => $4), claimed_by = NULL, lease_expires_at = NULL
WHERE event_id = $1 AND destination = $2 AND claim = $3 AND status NOT IN ('delivered', 'failed', 'discarded')`

// postpone gives a claim back, to be made again after the given time.
func (s *store) postpone(ctx context.Context, d *delivery, wait time.Duration) error {
	return s.changeClaimed(ctx, "postpone suspect", postponeSuspect, d, wait.Seconds())
}

const countSuspect = `
UPDATE outbox_delivery SET rescues = least(rescues + 1, 32767)
WHERE event_id = $1 AND destination = $2 AND claim = $3 AND status NOT IN ('delivered', 'failed', 'discarded')`

// countAlone counts a request that is about to be sent alone. A settle sets the count back.
func (s *store) countAlone(ctx context.Context, d *delivery) error {
	return s.changeClaimed(ctx, "count suspect", countSuspect, d)
}

// changeClaimed runs a statement on the row of a delivery that this relay has claimed.
func (s *store) changeClaimed(ctx context.Context, operation, statement string, d *delivery, others ...any) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, statement, append([]any{d.eventID, d.destination, d.fence}, others...)...); err != nil {
		return fmt.Errorf("%s: %w", operation, err)
	}
	return nil
}
