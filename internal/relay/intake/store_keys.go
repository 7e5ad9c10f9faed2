package intake

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// IS TRUE keeps IN from becoming a join, for which the relay's sessions allow nested loops alone:
// the hashes of all open ranges are put into a table in memory once.
const selectKeysInHand = `
SELECT 0, 'lost', NULL::timestamptz WHERE NOT EXISTS (SELECT FROM outbox_range r WHERE r.seq = $2::bigint AND r.fence = $3::bigint AND r.relay_id = $1::int)
UNION ALL
SELECT k.number, 'hand', NULL FROM (
    SELECT w.number, hashtext(w.key) AS hash FROM unnest($5::text[]) WITH ORDINALITY AS w (key, number)) k
WHERE (k.hash IN (
    SELECT unnest(o.keys) FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l CROSS JOIN LATERAL (
        SELECT r.keys FROM outbox_range r
        WHERE r.seq >= l.oldest_open_seq AND r.seq < $2 AND r.ended_at IS NULL AND (r.relay_id <> $1 OR r.fence <> ALL ($4::bigint[])) AND r.keys IS NOT NULL
        OFFSET 0) o)) IS TRUE`

const selectBlockedKeys = selectKeysInHand + `
UNION ALL
SELECT w.number, 'row', NULL FROM unnest($5, $6::text[], $7::bool[]) WITH ORDINALITY AS w (key, destination, skips, number)
CROSS JOIN LATERAL (
    (SELECT FROM outbox_delivery d WHERE d.destination = w.destination AND d.ordering_key = w.key AND d.status = 'pending' AND d.joined IS NOT NULL
     ORDER BY d.joined, d.event_id LIMIT 1)
    UNION ALL
    (SELECT FROM outbox_delivery d WHERE NOT w.skips AND d.destination = w.destination AND d.ordering_key = w.key AND d.status = 'failed'
     ORDER BY d.joined, d.event_id LIMIT 1)
    UNION ALL
    (SELECT FROM outbox_destination s CROSS JOIN LATERAL (
        SELECT FROM outbox_delivery d WHERE d.destination = (SELECT '') AND d.ordering_key = w.key AND d.status = 'pending' AND d.joined = 0 AND d.event_id > s.parked_after
        ORDER BY d.joined, d.event_id LIMIT 1) p
     WHERE s.destination = w.destination AND s.parked_after IS NOT NULL)
    LIMIT 1) d
UNION ALL
SELECT w.number, CASE WHEN d.next_attempt_at <= least(now(), w.due) THEN 'due' ELSE 'joins' END, d.next_attempt_at
FROM unnest($5, $6, $8::timestamptz[]) WITH ORDINALITY AS w (key, destination, due, number)
CROSS JOIN LATERAL (
    SELECT d.ctid AS place, d.next_attempt_at FROM outbox_delivery d
    WHERE d.destination = w.destination AND d.ordering_key = w.key AND ` + pg.HasNotJoined + ` AND d.next_attempt_at <= now()
    ORDER BY d.next_attempt_at, d.event_id LIMIT 1) d
WHERE d.next_attempt_at <= least(now(), w.due) OR NOT EXISTS (SELECT FROM outbox_delivery x WHERE x.ctid = d.place FOR SHARE SKIP LOCKED)`

// ErrLost says that a range is not this relay's any more: a crash of the server has undone the
// take, or another relay has taken it over.
var ErrLost = errors.New("the range is not this relay's any more")

// FindBlockedKeys says of each key of a range why it may not be sent now. A key that is in hand
// elsewhere must be asked about again before it is sent: its range may end with a pending row. The
// error is [ErrLost] if a crash of the server has undone the take: it may have undone those before
// it too, and then nothing shows what comes first.
//
// A key counts as in hand elsewhere, too, while another session has its first due row locked that
// has not joined it: that session may be joining the key without knowing of this range.
//
// inHand are the fences of the ranges that the relay knows to have. Another one that is its own
// counts as elsewhere: the take whose answer was lost may have committed late.
func FindBlockedKeys(ctx context.Context, db pg.DB, relay int32, of RangeRef, inHand []int64, keys []Key) (blocked []Blocked, err error) {
	names, destinations, skips, due := make([]string, len(keys)), make([]string, len(keys)), make([]bool, len(keys)), make([]*time.Time, len(keys))
	for i, k := range keys {
		names[i], destinations[i], skips[i], due[i] = k.Key, k.Destination, k.SkipsFailed, set(k.Due)
	}
	return findBlocked(ctx, db, selectBlockedKeys, relay, of, inHand, names, destinations, skips, due)
}

// FindKeysInHand is [FindBlockedKeys] for keys whose rows cannot be read: it reads ranges alone,
// and sets InHand and Unknown.
func FindKeysInHand(ctx context.Context, db pg.DB, relay int32, of RangeRef, inHand []int64, keys []string) (blocked []Blocked, err error) {
	blocked, err = findBlocked(ctx, db, selectKeysInHand, relay, of, inHand, keys)
	for i := range blocked {
		blocked[i].Unknown = true
	}
	return blocked, err
}

func findBlocked(ctx context.Context, db pg.DB, statement string, relay int32, of RangeRef, inHand []int64, keys []string, more ...any) (blocked []Blocked, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if inHand == nil {
		inHand = []int64{}
	}
	rows, err := db.Query(ctx, statement, append([]any{relay, of.Seq, of.Fence, inHand, keys}, more...)...)
	if err != nil {
		return nil, fmt.Errorf("find blocked keys: %w", err)
	}
	blocked = make([]Blocked, len(keys))
	lost := false
	var number int
	var why string
	var at *time.Time
	if _, err := pgx.ForEachRow(rows, []any{&number, &why, &at}, func() error {
		switch why {
		case "lost":
			lost = true
		case "hand", "joins":
			blocked[number-1].InHand = true
		case "due":
			blocked[number-1].Due = *at
		default:
			blocked[number-1].ByRow = true
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("find blocked keys: %w", err)
	}
	if lost {
		return nil, fmt.Errorf("find blocked keys: %w", ErrLost)
	}
	return blocked, nil
}

// A Key is an ordering key at one destination.
type Key struct {
	Key, Destination string
	// SkipsFailed says that at this destination a failed delivery blocks nothing.
	SkipsFailed bool
	// Due bounds the rows that have not joined the key: those that became due later do not count.
	// Zero: all do.
	Due time.Time
}

// OrderingKey returns the key without what a caller asks about it.
func (k Key) OrderingKey() ordering.Key {
	return ordering.Key{Destination: k.Destination, Key: k.Key}
}

// Blocked says why a key has to wait.
type Blocked struct {
	// InHand says that an open range before this one has an event of it, or one of another key with
	// the same hash. The range is another relay's, or this one does not know it.
	InHand bool
	ByRow  bool      // a pending or failed row of it comes first: what follows becomes pending too
	Due    time.Time // when the first row of it became due that has not joined it: see [JoinKeys]; zero: there is none
	// Unknown says that the database cannot read its rows.
	Unknown bool
}
