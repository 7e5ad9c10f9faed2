package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// store runs the engine's statements. It is safe for concurrent use.
type store struct {
	pool *pgxpool.Pool
}

// statementTimeout bounds each statement, so that a half-open connection cannot hold a goroutine for ever.
const statementTimeout = 30 * time.Second

// sessionSettings are what the engine's statements rest on, whatever role and database say.
var sessionSettings = map[string]string{
	"application_name": "outbox-relay",
	// What leaves is UTF-8, also from a database in another encoding.
	"client_encoding": "UTF8",
	// A statement's own snapshot, always fresh: FOR UPDATE SKIP LOCKED would fail under stricter levels.
	"default_transaction_isolation": "read committed",
	// Losing a claim, a delivered or a retry in a crash of the server only costs a duplicate; what must not be lost
	// switches it on again.
	"synchronous_commit": "off",
	// Plans are prepared once, often on an empty table, where a sequential scan looks cheap; it would stay for ever.
	"plan_cache_mode":   "force_generic_plan",
	"enable_seqscan":    "off",
	"enable_hashjoin":   "off",
	"enable_mergejoin":  "off",
	"enable_bitmapscan": "off",
	"enable_memoize":    "off",
	"jit":               "off",
	"statement_timeout": "30000",
	// A row that somebody keeps locked must not keep a settle, and with it all destinations.
	"lock_timeout": "200",
	// The server notices a relay's host that vanished without closing its connections.
	"tcp_keepalives_idle":     "2",
	"tcp_keepalives_interval": "1",
	"tcp_keepalives_count":    "3",
}

// ErrPooler says that the connection does not reach the server itself. A pooler in transaction mode hands every
// transaction to another server connection: session locks are lost or kept by strangers, LISTEN never fires, and the
// settings on which the plans rest do not arrive.
var ErrPooler = errors.New("the database URL leads through a connection pooler that does not keep sessions (PgBouncer?); give the relay a direct connection")

const selectSettingsKept = `
SELECT bool_and(current_setting(wanted.name) = wanted.value)
FROM (VALUES ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'), ('synchronous_commit', 'off')) wanted (name, value)`

// checkSession returns ErrPooler if a session is not what it seems: PgBouncer refuses unknown settings at the start of a
// connection or, told to ignore them, drops them.
func (s *store) checkSession(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	var kept bool
	err := s.pool.QueryRow(ctx, selectSettingsKept, pgx.QueryExecModeExec).Scan(&kept)
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && pgErr.Code == "08P01" && strings.Contains(pgErr.Message, "startup parameter"):
		return fmt.Errorf("%w: %s", ErrPooler, pgErr.Message)
	case err != nil:
		return fmt.Errorf("check session: %w", err)
	case !kept:
		return ErrPooler
	}
	return nil
}

// keyset is a place in the order in which a lane is claimed.
type keyset struct {
	at time.Time
	id int64
}

// ask is what a claim wants of one lane.
type ask struct {
	destination string
	free        int
	after       keyset // zero: from the very front
	until       keyset // zero: to the end
	// unblocked are ordering keys whose next delivery may lie before after: the one before it has just been delivered.
	unblocked []string
	sweep     bool // looks at what lies before the lane's position
}

// delivery is a claimed row with its event.
type delivery struct {
	eventID       int64
	destination   string
	fence         int64
	attempts      int
	rescues       int
	nextAttemptAt pgtype.Timestamptz
	payloadBytes  int
	leaseEnds     time.Time // on this process's clock, never later than what the database holds

	event event
}

// event is the immutable half of a delivery. Nullable columns are pointers: the row may be gone from outbox.
type event struct {
	eventType        *string
	version          *int
	key              *string
	orderingKey      *string
	relatedReference *string
	headers          []byte // JSON object; nil when empty
	createdAt        pgtype.Timestamptz
	payload          []byte // nil when larger than inlinePayload: loaded when its turn comes
}

// inlinePayload is up to which size a claim brings the payload along, in bytes. It bounds what a claim can hold in
// memory.
const inlinePayload = 16 << 10

// The rows are locked in a materialised step and then updated by where they lie. Locking inside "IN (SELECT … LIMIT …)"
// may run again for each row and claim more than its limit; joining back by key can flip to a scan of the table. LIMIT
// keeps the lookup of each event a lookup: a plan that was made when outbox was small may otherwise read all of it.
//
// A claim keeps its relay's row from being deleted until it has committed, so that a rescue, which deletes the row
// first, waits for a claim that its dead relay left running; and it takes nothing once the row is gone.
const claimDue = `
WITH claimant AS MATERIALIZED (
    SELECT FROM outbox_relay WHERE instance = $5 FOR KEY SHARE
), lane AS MATERIALIZED (
    SELECT l.*
    FROM unnest($1::text[], $2::int[], $3::timestamptz[], $4::bigint[], $8::timestamptz[], $9::bigint[])
        AS l (destination, free, after_at, after_id, until_at, until_id)
    WHERE EXISTS (SELECT FROM claimant)
      AND NOT EXISTS (SELECT FROM outbox_destination p WHERE p.destination = l.destination AND p.paused)
), due AS MATERIALIZED (
    SELECT d.place
    FROM lane CROSS JOIN LATERAL (
        SELECT d.ctid AS place
        FROM outbox_delivery d
        WHERE d.destination = lane.destination AND d.status = 'pending'
          AND (d.next_attempt_at, d.event_id) > (lane.after_at, lane.after_id)
          AND (d.next_attempt_at, d.event_id) <= (lane.until_at, lane.until_id)
          AND d.next_attempt_at <= now()
          AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= now())
          AND (d.ordering_key IS NULL OR NOT EXISTS (
              SELECT FROM outbox_delivery earlier
              WHERE earlier.destination = d.destination AND earlier.ordering_key = d.ordering_key
                AND earlier.status IN ('pending', 'failed') AND earlier.event_id < d.event_id))
        ORDER BY d.next_attempt_at, d.event_id
        LIMIT lane.free
        FOR UPDATE OF d SKIP LOCKED
    ) d
), successor AS MATERIALIZED (
    SELECT d.place
    FROM unnest($10::text[], $11::text[]) AS k (destination, ordering_key)
    CROSS JOIN LATERAL (
        SELECT o.event_id FROM outbox_delivery o
        WHERE o.destination = k.destination AND o.ordering_key = k.ordering_key AND o.status IN ('pending', 'failed')
        ORDER BY o.event_id LIMIT 1
    ) head
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM outbox_delivery d
        WHERE d.event_id = head.event_id AND d.destination = k.destination AND d.status NOT IN ('delivered', 'failed', 'discarded')
          AND d.next_attempt_at <= now() AND (d.lease_expires_at IS NULL OR d.lease_expires_at <= now())
        LIMIT 1
        FOR UPDATE OF d SKIP LOCKED
    ) d
    WHERE EXISTS (SELECT FROM lane WHERE lane.destination = k.destination)
), claimed AS (
    UPDATE outbox_delivery d
    SET claim = d.claim + 1, claimed_by = $5, lease_expires_at = now() + make_interval(secs => $6),
        rescues = least(d.rescues + (d.claimed_by IS NOT NULL)::int, 32767)
    WHERE d.ctid = ANY (ARRAY (SELECT place FROM due UNION SELECT place FROM successor))
    RETURNING d.event_id, d.destination, d.claim, d.attempts, d.rescues, d.next_attempt_at, d.payload_bytes
)
SELECT c.event_id, c.destination, c.claim, c.attempts, c.rescues, c.next_attempt_at, c.payload_bytes,
       e.event_type, e.event_version, e.idempotency_key, e.ordering_key, e.related_reference,
       nullif(e.headers, '{}'), e.created_at, CASE WHEN c.payload_bytes <= $7 THEN e.payload END, now()
FROM claimed c LEFT JOIN LATERAL (SELECT * FROM outbox WHERE id = c.event_id LIMIT 1) e ON true
UNION ALL
SELECT 0, '', 0, 0, 0, now(), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now()`

// claim leases, for every ask, at most its free deliveries that are due and lie between its keysets, and those that are
// next in its unblocked ordering keys. It returns them in the order in which they became due, and the database's time.
func (s *store) claim(ctx context.Context, instance int32, lease time.Duration, asks []ask) (claimed []delivery, at time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	destinations := make([]string, len(asks))
	free := make([]int32, len(asks))
	afterAt, untilAt := make([]pgtype.Timestamptz, len(asks)), make([]pgtype.Timestamptz, len(asks))
	afterID, untilID := make([]int64, len(asks)), make([]int64, len(asks))
	var unblockedAt, unblocked []string
	for i, a := range asks {
		destinations[i], free[i] = a.destination, int32(a.free)
		afterAt[i], afterID[i] = a.after.bound(pgtype.NegativeInfinity), a.after.id
		untilAt[i], untilID[i] = a.until.bound(pgtype.Infinity), a.until.id
		for _, key := range a.unblocked {
			unblockedAt, unblocked = append(unblockedAt, a.destination), append(unblocked, key)
		}
	}
	// The lease is counted from before the statement, so that this clock's view of it ends before the database's.
	leaseEnds := time.Now().Add(lease)
	rows, err := s.pool.Query(ctx, claimDue, destinations, free, afterAt, afterID, instance, lease.Seconds(), inlinePayload,
		untilAt, untilID, unblockedAt, unblocked)
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("claim: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		d := delivery{leaseEnds: leaseEnds}
		e := &d.event
		if err := rows.Scan(&d.eventID, &d.destination, &d.fence, &d.attempts, &d.rescues, &d.nextAttemptAt, &d.payloadBytes,
			&e.eventType, &e.version, &e.key, &e.orderingKey, &e.relatedReference, &e.headers, &e.createdAt, &e.payload, &at); err != nil {
			return nil, time.Time{}, fmt.Errorf("claim: %w", err)
		}
		if d.destination != "" { // the row that is always there tells the time
			claimed = append(claimed, d)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, time.Time{}, fmt.Errorf("claim: %w", err)
	}
	slices.SortFunc(claimed, func(a, b delivery) int {
		if order := a.nextAttemptAt.Time.Compare(b.nextAttemptAt.Time); order != 0 {
			return order
		}
		return cmp.Compare(a.eventID, b.eventID)
	})
	return claimed, at, nil
}

// bound returns the keyset's time as the database compares it; for the zero keyset, which is a time too, the given end.
func (k keyset) bound(end pgtype.InfinityModifier) pgtype.Timestamptz {
	if k == (keyset{}) {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: k.at, Valid: true}
}

const selectChunkEnd = `
SELECT next_attempt_at, event_id FROM outbox_delivery
WHERE destination = $1 AND status = 'pending' AND (next_attempt_at, event_id) > ($2, $3) AND next_attempt_at <= now()
ORDER BY next_attempt_at, event_id OFFSET $4 LIMIT 1`

// chunkEnd returns where n due deliveries of a destination end, counted from behind after; zero if there are fewer.
func (s *store) chunkEnd(ctx context.Context, destination string, after keyset, n int) (end keyset, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	err = s.pool.QueryRow(ctx, selectChunkEnd, destination, after.bound(pgtype.NegativeInfinity), after.id, n-1).Scan(&end.at, &end.id)
	if errors.Is(err, pgx.ErrNoRows) {
		return keyset{}, nil
	}
	if err != nil {
		return keyset{}, fmt.Errorf("find end of chunk: %w", err)
	}
	return end, nil
}

const selectPayload = `SELECT payload FROM outbox WHERE id = $1`

// payload loads a payload that was too large to come with the claim.
func (s *store) payload(ctx context.Context, eventID int64) (payload []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, selectPayload, eventID).Scan(&payload); err != nil {
		return nil, fmt.Errorf("load payload: %w", err)
	}
	return payload, nil
}
