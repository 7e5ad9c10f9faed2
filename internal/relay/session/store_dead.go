package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// A claim holds until its lease ends or until a row of outbox_void ends it earlier. So a rescue
// writes one row, whatever the dead relay had claimed and however much is pending, and nothing is
// left to finish if the rescuer dies too.
//
// outbox_void names the claims that have ended. The opposite, the relays whose claims hold, would
// be wrong: a statement does not see a relay that registered after its snapshot, but it does see
// that relay's claim on a row that it locks.

// What ends with the relays in gone. Trials whose row is locked end at breaker_until.
const endWithRelay = `, trials AS (
    UPDATE outbox_destination SET breaker = 'open', breaker_relay_id = NULL, breaker_until = now()
    WHERE ctid = ANY (ARRAY (
        SELECT ctid FROM outbox_destination WHERE breaker_relay_id IN (SELECT id FROM gone)
        FOR NO KEY UPDATE SKIP LOCKED))
), expired AS (
    DELETE FROM outbox_void WHERE until < now()
), forgotten AS (
    DELETE FROM outbox_rescue WHERE at < now() - interval '24 hours'
)`

// RescueRelay is the statement of [Rescue]. It locks the row first, which waits for a claim that
// the dead relay's backend still runs: that claim has committed when the clock is read. Only then
// does it look for the relay's session, which may have come back meanwhile.
const RescueRelay = `
WITH relay AS MATERIALIZED (
    SELECT * FROM outbox_relay WHERE id = $1 FOR UPDATE
), gone AS (
    DELETE FROM outbox_relay WHERE id = ANY (ARRAY (SELECT id FROM relay r WHERE ` + isDead + `))
    RETURNING id, lease, session_pid
)` + endWithRelay + `, remembered AS (
    INSERT INTO outbox_rescue (relay_id) SELECT id FROM gone
), void AS (
    INSERT INTO outbox_void (relay_id, after, until, died) SELECT id, '-infinity', clock_timestamp() + lease, true FROM gone
)
SELECT coalesce(session_pid, 0) FROM gone`

// Rescue removes a dead relay and ends its claims and trials. It returns false if another relay was
// faster, or the relay lives after all, and otherwise the pid of the dead relay's session, for
// endSession.
func Rescue(ctx context.Context, db pg.DB, relayID int32) (dead bool, session int32, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err = db.QueryRow(ctx, RescueRelay, relayID).Scan(&session)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, 0, nil
	}
	if err != nil {
		return false, 0, fmt.Errorf("rescue claims of relay %d: %w", relayID, err)
	}
	return true, session, nil
}

// DeregisterRelay is the statement of [Deregister]. What a relay that leaves did not know to be its
// own, or could not write, does not count as a rescue. The others look for it at once, instead of
// at their next sweep.
const DeregisterRelay = `
WITH gone AS (
    DELETE FROM outbox_relay WHERE id = $1 RETURNING id, lease
)` + endWithRelay + `, void AS (
    INSERT INTO outbox_void (relay_id, after, until, died) SELECT id, '-infinity', clock_timestamp() + lease, false FROM gone
)
` + pg.RequestSweep

// Deregister removes a relay that leaves, and ends what is still claimed in its name.
func Deregister(ctx context.Context, db pg.DB, relayID int32) error {
	return pg.Exec(ctx, db, "deregister relay", DeregisterRelay, relayID)
}

// VoidUnacknowledged is the statement of [GiveBackUnacknowledged]. A claim locks its relay's row
// until it has committed, so that this waits for one whose connection was lost. A claim of later
// ends its lease later than the clock shows here.
const VoidUnacknowledged = `
WITH claimant AS MATERIALIZED (
    SELECT id, lease FROM outbox_relay WHERE id = $1 FOR UPDATE
), expired AS (
    DELETE FROM outbox_void WHERE until < now()
)
INSERT INTO outbox_void (relay_id, after, until, died)
SELECT id, coalesce($2::timestamptz, to_timestamp(0)), clock_timestamp() + lease, false FROM claimant`

// GiveBackUnacknowledged ends the claims of a relay whose lease ends after the given time of the
// database; zero: all.
func GiveBackUnacknowledged(ctx context.Context, db pg.DB, relayID int32, after time.Time) error {
	var from *time.Time
	if !after.IsZero() {
		from = &after
	}
	return pg.Exec(ctx, db, "give back claims that were not acknowledged", VoidUnacknowledged, relayID, from)
}

// Only a server that lets this role do so ends it.
const terminateSession = `
SELECT count(pg_terminate_backend(a.pid))
FROM (SELECT $1::int AS id) r, pg_stat_get_activity($2) a
WHERE a.application_name = ` + pg.NameOfSession + ` AND a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())`

// endSession cuts off the session of a relay that was taken for dead, if it lasts: a frozen process
// reads no notifications, and what it does not read fills the server's queue, which would make
// producers fail in the end.
func endSession(ctx context.Context, db pg.DB, relayID, session int32) error {
	return pg.Exec(ctx, db, fmt.Sprintf("end session of relay %d", relayID), terminateSession, relayID, session)
}

// A statement that sends is ended by no timeout, and keepalives of a frozen process are answered.
const terminateUnread = `
SELECT count(pg_terminate_backend(a.pid))
FROM pg_stat_get_activity(NULL) a
WHERE a.application_name = current_setting('application_name') AND a.wait_event = 'ClientWrite' AND a.query_start < now() - interval '15 seconds'
  AND a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())`

// endUnread ends the statements of relays that have not read their answer for long, and returns how
// many. Such a claim keeps its deliveries locked, and its relay from being rescued, for as long as
// the process is frozen.
func endUnread(ctx context.Context, db pg.DB) (ended int, err error) {
	return pg.Value[int](ctx, db, "end statements whose answer is not read", terminateUnread)
}
