package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// A claim holds until its lease ends or until a row of outbox_void ends it earlier. So a rescue writes one row, whatever
// the dead relay had claimed and however much is pending, and nothing is left to finish if the rescuer dies too.
//
// outbox_void names the claims that have ended. The opposite, the relays whose claims hold, would be wrong: a statement
// does not see a relay that registered after its snapshot, but it does see that relay's claim on a row that it locks.

// rescuesAfterClaim counts the claim that this claim of d replaces, if a relay died with it or let its lease end. Above
// aloneFrom only requests that were sent alone count.
const rescuesAfterClaim = `
    CASE WHEN d.claimed_by IS NULL OR EXISTS (
             SELECT FROM outbox_void v
             WHERE v.instance = d.claimed_by AND NOT v.died AND d.lease_expires_at > v.after AND d.lease_expires_at <= v.until)
         THEN d.rescues ELSE greatest(d.rescues, least(d.rescues + 1, 6)) END`

// A claim locks its relay's row until it has committed, so that this waits for one whose connection was lost. A claim of
// later ends its lease later than the clock shows here.
const voidUnacknowledged = `
WITH claimant AS MATERIALIZED (
    SELECT instance, lease FROM outbox_relay WHERE instance = $1 FOR UPDATE
), expired AS (
    DELETE FROM outbox_void WHERE until < now()
)
INSERT INTO outbox_void (instance, after, until, died)
SELECT instance, coalesce($2::timestamptz, '-infinity'), clock_timestamp() + lease, false FROM claimant`

// giveBackUnacknowledged ends the claims of a relay whose lease ends after the given time of the database; zero: all.
func (s *store) giveBackUnacknowledged(ctx context.Context, instance int32, after time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var from *time.Time
	if !after.IsZero() {
		from = &after
	}
	if _, err := s.pool.Exec(ctx, voidUnacknowledged, instance, from); err != nil {
		return fmt.Errorf("give back claims that were not acknowledged: %w", err)
	}
	return nil
}
