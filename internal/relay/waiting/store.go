package waiting

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// store writes outbox_delivery.blocked_by.
type store struct{ db pg.DB }

// A head must still hold when its followers are marked: it may have been claimed or discarded since
// it was found. Every row is found by an index: LIMIT keeps each lookup from becoming a scan. It
// bounds what is looked at, not what is marked: the next delivery of a head that is retried stands
// among what is due again, in front of all that has been marked before.
const markWaiting = `
WITH head AS MATERIALIZED (
    SELECT w.*, holds.joined FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $6::bigint[])
        WITH ORDINALITY AS w (destination, ordering_key, head, first, first_joined, number)
    CROSS JOIN LATERAL (
        SELECT d.joined FROM outbox_delivery d
        WHERE d.event_id = w.head AND d.destination IN (w.destination, '')
          AND (d.status = 'failed' OR d.status NOT IN ('delivered', 'discarded') AND ` + pg.IsFree + `
               AND (d.destination = '' OR d.next_attempt_at > now() + interval '1 second'))
        LIMIT 1) holds
), looked AS MATERIALIZED (
    SELECT head.number, head.head, f.*
    FROM head CROSS JOIN LATERAL (
        SELECT d.ctid AS place, d.event_id, d.joined, d.blocked_by FROM outbox_delivery d
        WHERE d.destination = head.destination AND d.ordering_key = head.ordering_key AND d.status = 'pending'
          AND d.joined IS NOT NULL AND (d.joined, d.event_id) > (head.joined, head.head) AND (d.joined, d.event_id) >= (head.first_joined, head.first)
        ORDER BY d.joined, d.event_id LIMIT $5) f
), follower AS MATERIALIZED (
    SELECT d.ctid AS place, l.head, l.number
    FROM (SELECT * FROM looked WHERE blocked_by IS NULL) l, outbox_delivery d
    WHERE d.ctid = l.place AND CASE WHEN d.event_id = l.event_id
        THEN d.status NOT IN ('delivered', 'failed', 'discarded') AND d.blocked_by IS NULL AND ` + pg.IsFree + ` END
    FOR UPDATE OF d SKIP LOCKED
), marked AS (
    UPDATE outbox_delivery d SET blocked_by = f.head FROM follower f WHERE d.ctid = f.place
    RETURNING f.number
)
SELECT number, sum(looked), sum(marked), (array_agg(joined ORDER BY joined DESC, event_id DESC))[1], (array_agg(event_id ORDER BY joined DESC, event_id DESC))[1]
FROM (SELECT number, joined, event_id, 1 AS looked, 0 AS marked FROM looked UNION ALL SELECT number, 0, 0, 0, 1 FROM marked) x
GROUP BY number`

// mark looks at up to limit deliveries behind each of the given heads, makes those wait that do not
// yet, and returns where there may be more to mark. Behind deliveries that all wait already there
// may be more, too: claims find them.
func (s store) mark(ctx context.Context, list []Behind, limit int) (left []Behind, marked int, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var destinations, keys []string
	var heads, firsts, joined []int64
	for _, b := range list {
		destinations, keys = append(destinations, b.Destination), append(keys, b.Key)
		heads, firsts = append(heads, b.Head), append(firsts, b.First.Event)
		joined = append(joined, b.First.Joined)
	}
	rows, err := s.db.Query(ctx, markWaiting, destinations, keys, heads, firsts, limit, joined)
	if err != nil {
		return nil, 0, fmt.Errorf("mark waiting deliveries: %w", err)
	}
	var number int64
	var last ordering.Place
	var looked, n int
	_, err = pgx.ForEachRow(rows, []any{&number, &looked, &n, &last.Joined, &last.Event}, func() error {
		marked += n
		if looked == limit && n > 0 {
			more := list[number-1]
			more.First = ordering.Place{Joined: last.Joined, Event: last.Event + 1}
			left = append(left, more)
		}
		return nil
	})
	if err != nil {
		return nil, 0, fmt.Errorf("mark waiting deliveries: %w", err)
	}
	return left, marked, nil
}

// Heads are found by skipping from one to the next in the index of what waits. A head that is
// claimed holds: its claim has released the next delivery of the key. A parked head holds while
// relays look for its destination.
const selectHeads = `
WITH RECURSIVE head AS (
    (SELECT d.destination, d.blocked_by, d.ordering_key FROM outbox_delivery d
     WHERE ` + pg.IsWaiting + ` AND (d.destination, d.blocked_by) > ($1, $2)
     ORDER BY d.destination, d.blocked_by, d.event_id LIMIT 1)
    UNION ALL
    SELECT following.* FROM head CROSS JOIN LATERAL (
        SELECT d.destination, d.blocked_by, d.ordering_key FROM outbox_delivery d
        WHERE ` + pg.IsWaiting + ` AND (d.destination, d.blocked_by) > (head.destination, head.blocked_by)
        ORDER BY d.destination, d.blocked_by, d.event_id LIMIT 1) following
)
SELECT h.destination, h.blocked_by, coalesce(h.ordering_key, ''), NOT EXISTS (
           SELECT FROM outbox_delivery d
           WHERE d.event_id = h.blocked_by AND d.destination = h.destination
             AND (d.status = 'failed' AND d.destination <> ALL ($4::text[]) OR d.status NOT IN ('delivered', 'failed', 'discarded')))
       AND NOT EXISTS (
           SELECT FROM outbox_delivery d CROSS JOIN outbox_destination s
           WHERE d.event_id = h.blocked_by AND d.destination = '' AND d.status NOT IN ('delivered', 'failed', 'discarded')
             AND s.destination = h.destination AND s.parked_after < h.blocked_by)
FROM (SELECT * FROM head LIMIT $3) h`

// A waitingKey is an ordering key of which deliveries wait behind a head.
type waitingKey struct {
	destination string
	head        int64
	key         string
	ended       bool // the head holds no longer
}

// heads returns the next heads behind the given one, at most limit. lenient are the destinations
// where a failed delivery blocks nothing.
func (s store) heads(ctx context.Context, after waitingKey, limit int, lenient []string) (list []waitingKey, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if lenient == nil {
		lenient = []string{}
	}
	rows, err := s.db.Query(ctx, selectHeads, after.destination, after.head, limit, lenient)
	if err != nil {
		return nil, fmt.Errorf("find what deliveries wait for: %w", err)
	}
	var k waitingKey
	if _, err := pgx.ForEachRow(rows, []any{&k.destination, &k.head, &k.key, &k.ended}, func() error {
		list = append(list, k)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("find what deliveries wait for: %w", err)
	}
	return list, nil
}

// A row that another session has locked is left to the keeper's next round. One that waits for
// nothing is left alone: much may wait behind a head that has ended, until the deliveries before it
// are sent, and a relay may have the first of them in flight.
const releaseFirst = `
WITH first AS MATERIALIZED (
    SELECT f.* FROM unnest($1::text[], $2::text[]) AS k (destination, ordering_key)
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place, d.event_id, d.blocked_by FROM outbox_delivery d
        WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND d.status = 'pending' AND d.joined IS NOT NULL
        ORDER BY d.joined, d.event_id LIMIT 1) f
), locked AS MATERIALIZED (
    SELECT d.ctid AS place FROM (SELECT * FROM first WHERE blocked_by IS NOT NULL) f, outbox_delivery d
    WHERE d.ctid = f.place AND CASE WHEN d.event_id = f.event_id THEN d.blocked_by IS NOT NULL END
    FOR UPDATE OF d SKIP LOCKED
)
UPDATE outbox_delivery SET blocked_by = NULL WHERE ctid = ANY (ARRAY (SELECT place FROM locked))`

// release makes the first pending delivery of each key stand among what is due, and returns how
// many did not.
func (s store) release(ctx context.Context, ended []waitingKey) (released int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var destinations, keys []string
	for _, k := range ended {
		destinations, keys = append(destinations, k.destination), append(keys, k.key)
	}
	tag, err := s.db.Exec(ctx, releaseFirst, destinations, keys)
	if err != nil {
		return 0, fmt.Errorf("release waiting deliveries: %w", err)
	}
	return tag.RowsAffected(), nil
}

// The first pending delivery behind those that ended is looked for, not the first of all: while
// vacuum is blocked, everything that the key has delivered still stands before it in the index.
const releaseBehind = `
UPDATE outbox_delivery SET blocked_by = NULL WHERE ctid = ANY (ARRAY (
    SELECT first.place FROM (
        SELECT DISTINCT ON (o.destination, o.ordering_key) o.destination, o.ordering_key, o.joined, f.event_id
        FROM unnest($1::bigint[], $2::text[]) AS f (event_id, destination)
        CROSS JOIN LATERAL (
            SELECT o.destination, o.ordering_key, o.joined FROM outbox_delivery o
            WHERE o.event_id = f.event_id AND o.destination = f.destination LIMIT 1) o
        WHERE o.ordering_key IS NOT NULL AND o.joined IS NOT NULL
        ORDER BY o.destination, o.ordering_key, o.joined, f.event_id) k
    CROSS JOIN LATERAL (
        SELECT d.ctid AS place FROM outbox_delivery d
        WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND d.status = 'pending'
          AND d.joined IS NOT NULL AND (d.joined, d.event_id) > (k.joined, k.event_id)
        ORDER BY d.joined, d.event_id LIMIT 1 FOR UPDATE SKIP LOCKED) first))`

// Release makes the first pending delivery behind the given ones of each ordering key stand among
// what is due. Whoever ends deliveries calls it in the same transaction, with a statement of its
// own, and asks relays for a sweep after the commit.
func Release(ctx context.Context, db pg.DB, eventIDs []int64, destinations []string) error {
	if _, err := db.Exec(ctx, releaseBehind, eventIDs, destinations); err != nil {
		return fmt.Errorf("release waiting deliveries: %w", err)
	}
	return nil
}
