package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// The lock of a relay is the pair (oid of outbox_relay, instance): one number space per schema. It is taken before the
// row becomes visible, so that no other relay sees the row with its lock free.
const insertRelay = `INSERT INTO outbox_relay (name, version) VALUES ($1, $2) RETURNING instance`

const lockInstance = `SELECT pg_advisory_lock('outbox_relay'::regclass::oid::int, $1)`

// register enters a new relay and takes its lock, which the connection holds for as long as it lives.
func register(ctx context.Context, conn *pgx.Conn, name, version string) (instance int32, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, insertRelay, name, version).Scan(&instance); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, lockInstance, instance)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("register relay: %w", err)
	}
	return instance, nil
}

const resumeRelay = `
SELECT pg_try_advisory_lock('outbox_relay'::regclass::oid::int, instance) FROM outbox_relay WHERE instance = $1`

// resume takes the lock of an instance again on a new connection. It returns false if the relay was taken for dead
// meanwhile, or its lock is still held: then it must register anew.
func resume(ctx context.Context, conn *pgx.Conn, instance int32) (resumed bool, err error) {
	rows, err := conn.Query(ctx, resumeRelay, instance)
	if err != nil {
		return false, fmt.Errorf("resume relay: %w", err)
	}
	locks, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return false, fmt.Errorf("resume relay: %w", err)
	}
	return len(locks) == 1 && locks[0], nil
}

// A relay is dead when its lock is free. Not so in the first seconds of a server, when no relay had time to take its
// lock again. The CASE keeps the lock function away from this relay's own row, whose lock it would take a second time.
const beat = `
WITH alive AS (
    UPDATE outbox_relay SET heartbeat_at = now() WHERE instance = $1 RETURNING instance
)
SELECT instance, true FROM alive
UNION ALL
SELECT instance, false FROM outbox_relay
WHERE CASE WHEN instance = $1 OR NOT $2 OR pg_postmaster_start_time() > now() - interval '3 seconds' THEN false
           ELSE pg_try_advisory_lock('outbox_relay'::regclass::oid::int, instance) END`

// heartbeat says that this relay lives and, when asked to, finds the dead, whose locks the connection then holds: each
// must be given to rescue. registered is false if the relay's own row is gone.
func heartbeat(ctx context.Context, conn *pgx.Conn, instance int32, findDead bool) (registered bool, dead []int32, err error) {
	rows, err := conn.Query(ctx, beat, instance, findDead)
	if err != nil {
		return false, nil, fmt.Errorf("beat: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var number int32
		var self bool
		if err := rows.Scan(&number, &self); err != nil {
			return false, nil, fmt.Errorf("beat: %w", err)
		}
		if self {
			registered = true
		} else {
			dead = append(dead, number)
		}
	}
	if err := rows.Err(); err != nil {
		return false, nil, fmt.Errorf("beat: %w", err)
	}
	return registered, dead, nil
}

// Rows that somebody has locked are left to their lease. No index names the owner, because the claim would have to
// maintain it; this walks the due part of the hot index once per death.
const rescueClaims = `
UPDATE outbox_delivery SET claimed_by = NULL, lease_expires_at = NULL, rescues = least(rescues + 1, 32767)
WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM outbox_delivery
    WHERE status = 'pending' AND next_attempt_at <= now() AND claimed_by = $1
    FOR UPDATE SKIP LOCKED))`

const deleteRelay = `DELETE FROM outbox_relay WHERE instance = $1`

const unlockInstance = `SELECT pg_advisory_unlock('outbox_relay'::regclass::oid::int, $1)`

// rescue gives back what a dead relay had claimed and removes it from the living. The connection must hold its lock.
func rescue(ctx context.Context, conn *pgx.Conn, instance int32) (deliveries int, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		// First, since it waits for a claim that the dead relay's backend may still be executing.
		if _, err := tx.Exec(ctx, deleteRelay, instance); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, rescueClaims, instance)
		deliveries = int(tag.RowsAffected())
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("rescue claims of relay %d: %w", instance, err)
	}
	if _, err := conn.Exec(ctx, unlockInstance, instance); err != nil {
		return deliveries, fmt.Errorf("unlock relay %d: %w", instance, err)
	}
	return deliveries, nil
}

// The others look at once for what this relay gives back, instead of at their next sweep.
const sayGoodbye = `SELECT pg_notify('outbox_wake', 'sweep ' || current_schema())`

// What a relay that leaves did not know to be its own, or could not write: claims whose acknowledgement was lost, and
// outcomes that the database did not take. It did not die of them, so they are no rescues.
const giveBackClaims = `
UPDATE outbox_delivery SET claimed_by = NULL, lease_expires_at = NULL
WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM outbox_delivery
    WHERE status = 'pending' AND next_attempt_at <= now() AND claimed_by = $1
    FOR UPDATE SKIP LOCKED))`

// deregister removes a relay that leaves, and gives back what is still claimed in its name.
func deregister(ctx context.Context, conn *pgx.Conn, instance int32) error {
	// First, as in rescue: a claim that was cut off may still be running.
	if _, err := conn.Exec(ctx, deleteRelay, instance); err != nil {
		return fmt.Errorf("deregister relay: %w", err)
	}
	if _, err := conn.Exec(ctx, giveBackClaims, instance); err != nil {
		return fmt.Errorf("give back claims: %w", err)
	}
	if _, err := conn.Exec(ctx, sayGoodbye); err != nil {
		return fmt.Errorf("deregister relay: %w", err)
	}
	return nil
}

const setIdle = `UPDATE outbox_relay SET idle = $2 WHERE instance = $1`

// declareIdle tells producers whether this relay wants to be notified.
func (s *store) declareIdle(ctx context.Context, instance int32, idle bool) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, setIdle, instance, idle); err != nil {
		return fmt.Errorf("declare idle: %w", err)
	}
	return nil
}

const listen = `LISTEN outbox_wake`

const currentSchema = `SELECT current_schema()`

// destinationState is what all relays share about one destination that is not simply open for business.
type destinationState struct {
	destination string
	paused      bool
	breaker     string        // closed, open or half_open
	remaining   time.Duration // until breaker_until; negative: it has passed. 0 when closed
	owner       int32         // of the half-open breaker; 0: nobody
	probes      int           // that failed since it opened
}
