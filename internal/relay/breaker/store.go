package breaker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// aliveFor is how old the heartbeat of a relay may be that counts as alive. A relay writes one
// every 4 to 6 seconds.
const aliveFor = 10 * time.Second

// store writes the row of a destination.
type store struct{ db pg.DB }

// Evidence that nothing is left of takes its events with it, also where an operator has closed the
// breaker.
const recordEvidence = `
INSERT INTO outbox_destination AS d (destination, breaker_failures, breaker_events) VALUES ($1, greatest($2, 0), $3)
ON CONFLICT (destination) DO UPDATE
SET breaker_failures = greatest(d.breaker_failures + $2, 0),
    breaker_events = CASE WHEN d.breaker_failures + $2 <= 0 THEN '{}' WHEN d.breaker_failures = 0 THEN $3
        ELSE ARRAY (SELECT DISTINCT unnest(d.breaker_events || $3) LIMIT $4) END
WHERE d.breaker = 'closed'
RETURNING breaker_failures, breaker_events`

// recordEvidence adds to the failures that all relays hold against a destination, or takes from
// them, and returns what is held against it then. It returns false if the breaker is not closed any
// more.
func (s store) recordEvidence(ctx context.Context, destination string, failures int, events []int64) (total int, all []int64, closed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = s.db.QueryRow(ctx, recordEvidence, destination, failures, eventIDs(events), policy.BreakerEvents).Scan(&total, &all)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, nil, false, nil
	case err != nil:
		return 0, nil, false, fmt.Errorf("record evidence: %w", err)
	}
	return total, all, true, nil
}

// eventIDs returns an array for a column that is never null.
func eventIDs(events []int64) []int64 {
	if events == nil {
		return []int64{}
	}
	return events
}

// While all relays hold the destination, no relay is refused alone.
const recordRefusal = `
UPDATE outbox_relay_destination SET refused_at = coalesce(refused_at, now()), refused_error = $3
WHERE destination = $1 AND relay_id = $2
  AND NOT EXISTS (SELECT FROM outbox_destination WHERE destination = $1 AND breaker <> 'closed')`

// A relay that has ended without a word counts until its heartbeat is old.
const findOthers = `
SELECT EXISTS (SELECT FROM outbox_relay_destination d JOIN outbox_relay r ON r.id = d.relay_id
               WHERE d.destination = $1 AND d.relay_id <> $2 AND d.refused_at IS NULL
                 AND r.quarantined IS NULL AND r.heartbeat_at > now() - make_interval(secs => $3)),
       EXISTS (SELECT FROM outbox_destination WHERE destination = $1 AND breaker <> 'closed')`

// recordRefusal records that the destination refuses this relay. It returns whether another relay
// may be accepted there, and whether all relays hold the destination. The question comes after the
// commit: of two relays that are refused at once, the later one must see that the other is.
func (s store) recordRefusal(ctx context.Context, destination string, relayID int32, cause string) (others, held bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := s.db.Exec(ctx, recordRefusal, destination, relayID, cause); err != nil {
		return false, false, fmt.Errorf("record refusal: %w", err)
	}
	if err := s.db.QueryRow(ctx, findOthers, destination, relayID, aliveFor.Seconds()).Scan(&others, &held); err != nil {
		return false, false, fmt.Errorf("find other relays: %w", err)
	}
	return others, held, nil
}

const clearRefusal = `
UPDATE outbox_relay_destination SET refused_at = NULL, refused_error = NULL
WHERE destination = $1 AND relay_id = $2 AND refused_at IS NOT NULL`

// clearRefusal records that the destination accepts this relay again.
func (s store) clearRefusal(ctx context.Context, destination string, relayID int32) error {
	return pg.Exec(ctx, s.db, "record acceptance", clearRefusal, destination, relayID)
}

// The alert is part of the opening: an operator who sees a held lane can find out since when and
// why. One that an operator's reset has not ended yet continues, and its new time says so to a
// relay that is about to end it. One that has told of the same status before the hold continues,
// too: it ends when the destination accepts again. A destination that was removed while it was
// held, and has come back, is alerted again.
const openBreaker = `
WITH opened AS (
    INSERT INTO outbox_destination AS d (destination, breaker, breaker_opened_at, breaker_until, breaker_error, breaker_events)
    VALUES ($1, 'open', now(), now() + make_interval(secs => $3), $5, $7)
    ON CONFLICT (destination) DO UPDATE
    SET breaker = 'open', breaker_opened_at = coalesce(d.breaker_opened_at, excluded.breaker_opened_at), breaker_relay_id = NULL,
        breaker_probes = CASE WHEN d.breaker = 'closed' OR $6 THEN 0 ELSE d.breaker_probes + 1 END,
        breaker_until = now() + make_interval(secs => CASE WHEN d.breaker = 'closed' OR $6 THEN $3::float8
            ELSE least($4, $3 * power(2, least(d.breaker_probes + 1, 30))) END),
        breaker_error = excluded.breaker_error, breaker_failures = 0, breaker_events = excluded.breaker_events
    WHERE d.breaker = 'closed' OR d.breaker = 'half_open' AND d.breaker_relay_id = $2
    RETURNING d.destination, d.breaker_probes, extract(epoch FROM d.breaker_until - now())::float8 AS wait
), together AS (
    UPDATE outbox_relay_destination SET refused_at = NULL, refused_error = NULL
    WHERE destination = $1 AND refused_at IS NOT NULL AND EXISTS (SELECT FROM opened)
), alerted AS (
    INSERT INTO outbox_alert AS a (rule, subject, first_error)
    SELECT 'breaker_open', destination, $5 FROM opened
    WHERE NOT EXISTS (SELECT FROM outbox_alert t WHERE t.subject = $1 AND t.resolved_at IS NULL
        AND t.rule IN ('misconfigured', 'failing') AND t.first_error ~ '^[0-9]{3}( |$)' AND left(t.first_error, 3) = left($5, 3))
    ON CONFLICT (rule, subject) DO UPDATE
    SET count = a.count + (a.resolved_at IS NOT NULL)::int, last_at = now(), resolved_at = NULL,
        first_error = CASE WHEN a.resolved_at IS NULL THEN a.first_error ELSE excluded.first_error END,
        detail = CASE WHEN a.resolved_at IS NULL THEN a.detail END
)
SELECT wait, breaker_probes FROM opened`

// openBreaker makes all relays hold a destination, unless another has done so before, and returns
// how long no relay may try it, and how many probes have failed in a row.
func (s store) openBreaker(ctx context.Context, destination string, relayID int32, b policy.Breaker) (wait time.Duration, probes int, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var seconds float64
	err = s.db.QueryRow(ctx, openBreaker, destination, relayID, b.Policy.ProbeAfter.Seconds(), b.Policy.ProbeMax.Seconds(), b.Cause, b.Accepted, eventIDs(b.Events)).
		Scan(&seconds, &probes)
	if errors.Is(err, pgx.ErrNoRows) {
		return b.Policy.ProbeAfter, 0, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("open breaker: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), probes, nil
}

const tryBreaker = `
UPDATE outbox_destination d
SET breaker = 'half_open', breaker_relay_id = $2, breaker_until = now() + make_interval(secs => $3)
WHERE destination = $1 AND breaker <> 'closed' AND (breaker_until <= now() OR breaker_until > now() + make_interval(secs => $4) OR breaker_relay_id = $2) AND NOT paused
  AND (EXISTS (SELECT FROM outbox_delivery d
               WHERE d.destination = $1 AND d.replay IN (false, true) AND ` + pg.IsDue + ` AND d.next_attempt_at <= now())
       OR NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.destination = $1 AND ` + pg.IsDue + `))
RETURNING breaker_events`

// tryBreaker gives a held destination to this relay alone for the given time, and returns the
// events that were answered with a failure. It returns false if another relay has it, it is not yet
// time, or nothing that waits is due. A time further away than implausible is taken to have passed.
// A trial that this relay has, since an acknowledgement was lost, is given to it again.
func (s store) tryBreaker(ctx context.Context, destination string, relayID int32, hold, implausible time.Duration) (taken bool, events []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = s.db.QueryRow(ctx, tryBreaker, destination, relayID, hold.Seconds(), implausible.Seconds()).Scan(&events)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil, nil
	case err != nil:
		return false, nil, fmt.Errorf("try breaker: %w", err)
	}
	return true, events, nil
}

const selectUntilDue = `
SELECT coalesce(extract(epoch FROM (` + pg.NextDue + `) - now()), 0)::float8 FROM (VALUES ($1::text)) lane (destination)`

// untilDue returns for how long nothing of a destination is due; not above 0: something is, or
// nothing waits.
func (s store) untilDue(ctx context.Context, destination string) (time.Duration, error) {
	seconds, err := pg.Value[float64](ctx, s.db, "find next due delivery", selectUntilDue, destination)
	return time.Duration(seconds * float64(time.Second)), err
}

const renewTrial = `
UPDATE outbox_destination SET breaker_until = now() + make_interval(secs => $3)
WHERE destination = $1 AND breaker = 'half_open' AND breaker_relay_id = $2`

// renewTrial prolongs what tryBreaker gave. It returns false if that is not this relay's any more.
func (s store) renewTrial(ctx context.Context, destination string, relayID int32, hold time.Duration) (held bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	tag, err := s.db.Exec(ctx, renewTrial, destination, relayID, hold.Seconds())
	if err != nil {
		return false, fmt.Errorf("renew trial: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}

const leaveTrial = `
UPDATE outbox_destination SET breaker = 'open', breaker_relay_id = NULL, breaker_until = now()
WHERE destination = $1 AND breaker = 'half_open' AND breaker_relay_id = $2`

// leaveTrial gives back what tryBreaker gave: any relay may try from now on.
func (s store) leaveTrial(ctx context.Context, destination string, relayID int32) error {
	return pg.Exec(ctx, s.db, "leave trial", leaveTrial, destination, relayID)
}

// The others look at once for what was held.
const closeBreaker = `
WITH closed AS (
    UPDATE outbox_destination
    SET breaker = 'closed', breaker_opened_at = NULL, breaker_until = NULL, breaker_relay_id = NULL, breaker_probes = 0,
        breaker_error = NULL, breaker_events = '{}'
    WHERE destination = $1 AND breaker = 'half_open' AND breaker_relay_id = $2
    RETURNING destination
), together AS (
    UPDATE outbox_relay_destination SET refused_at = NULL, refused_error = NULL
    WHERE destination = $1 AND refused_at IS NOT NULL AND EXISTS (SELECT FROM closed)
), resolved AS (
    UPDATE outbox_alert SET resolved_at = now()
    WHERE rule = 'breaker_open' AND subject = $1 AND resolved_at IS NULL AND EXISTS (SELECT FROM closed)
)
SELECT pg_notify('outbox_wake', 'sweep ' || current_schema()) FROM closed WHERE ` + pg.QueueHasRoom

// CloseBreaker opens a destination for business again, if the given relay is the one that tried it,
// and resolves the alert.
func CloseBreaker(ctx context.Context, db pg.DB, destination string, relayID int32) error {
	return pg.Exec(ctx, db, "close breaker", closeBreaker, destination, relayID)
}
