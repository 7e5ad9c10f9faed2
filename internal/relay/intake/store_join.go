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

// KeysInHand is the part of a WITH that finds the hashes of the ordering keys of open ranges, as
// hand (seq, hash).
const KeysInHand = `hand AS MATERIALIZED (
    SELECT r.seq, unnest(r.keys) AS hash FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l CROSS JOIN LATERAL (
        SELECT o.seq, o.keys FROM outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL AND o.keys IS NOT NULL OFFSET 0) r
)`

// The place of what joins is behind the range before $4, or behind the last range. The first due
// row of a key is its lock: were two relays to number the rows of a key at the same time, their
// numbers would be the same. What is behind a row that another session has locked waits: it would
// pass that.
const joinKeys = `
WITH ` + KeysInHand + `, last AS MATERIALIZED (
    SELECT CASE WHEN $4::bigint > 0 THEN $4 - 1 ELSE r.seq END AS seq,
           CASE WHEN r.more OR r.new_above IS NOT NULL THEN $6::timestamptz ELSE greatest(r.taken_at, $6) END AS complete
    FROM outbox_range r ORDER BY r.seq DESC LIMIT 1
), key AS MATERIALIZED (
    SELECT w.destination, w.ordering_key, w.number, CASE WHEN $4 > 0 THEN w.due ELSE least(now(), l.complete) END AS due,
           $4 = 0 AND (hashtext(w.ordering_key) IN (SELECT h.hash FROM hand h)) IS TRUE AS in_hand
    FROM last l CROSS JOIN unnest($1::text[], $2::text[], $5::timestamptz[]) WITH ORDINALITY AS w (destination, ordering_key, due, number)
), due AS MATERIALIZED (
    SELECT k.number, u.* FROM key k CROSS JOIN LATERAL (
        SELECT x.*, row_number() OVER (ORDER BY x.next_attempt_at, x.event_id) AS nth FROM (
            SELECT d.ctid AS place, d.next_attempt_at, d.event_id FROM outbox_delivery d
            WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND ` + pg.HasNotJoined + ` AND d.next_attempt_at <= k.due
            ORDER BY d.next_attempt_at, d.event_id LIMIT $3::int) x) u
    WHERE NOT k.in_hand
), free AS MATERIALIZED (
    SELECT d.ctid AS place, u.number, u.nth FROM due u, outbox_delivery d
    WHERE d.ctid = u.place AND CASE WHEN d.event_id = u.event_id THEN d.status NOT IN ('delivered', 'failed', 'discarded') AND d.joined IS NULL END
    FOR NO KEY UPDATE OF d SKIP LOCKED
), locked AS MATERIALIZED (
    SELECT f.place, f.number, f.nth FROM (SELECT *, row_number() OVER (PARTITION BY number ORDER BY nth) AS rank FROM free) f WHERE f.nth = f.rank
), place AS MATERIALIZED (
    SELECT f.number, (l.seq + 1) << 22 AS most, greatest(l.seq << 22, p.joined, b.joined) AS after
    FROM (SELECT number FROM locked WHERE nth = 1) f CROSS JOIN last l
    CROSS JOIN LATERAL (SELECT * FROM key WHERE key.number = f.number LIMIT 1) k
    LEFT JOIN LATERAL (
        SELECT d.joined FROM outbox_delivery d
        WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND d.status = 'pending' AND d.joined < (l.seq + 1) << 22
        ORDER BY d.joined DESC, d.event_id DESC LIMIT 1) p ON true
    LEFT JOIN LATERAL (
        SELECT d.joined FROM outbox_delivery d
        WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND d.status = 'failed' AND d.joined < (l.seq + 1) << 22
        ORDER BY d.joined DESC, d.event_id DESC LIMIT 1) b ON true
), joined AS (
    UPDATE outbox_delivery d SET joined = p.after + l.nth
    FROM locked l, place p WHERE p.number = l.number AND d.ctid = l.place AND p.after + l.nth < p.most
    RETURNING l.number, d.joined, d.event_id
)
SELECT k.number, k.in_hand OR $4 = 0 AND f.rows = 0 AND EXISTS (SELECT FROM due u WHERE u.number = k.number), $4 = 0 AND EXISTS (
    SELECT FROM outbox_delivery d
    WHERE d.destination = k.destination AND d.ordering_key = k.ordering_key AND ` + pg.HasNotJoined + ` AND d.next_attempt_at > k.due AND d.next_attempt_at <= now()
    ORDER BY d.next_attempt_at, d.event_id LIMIT 1), f.rows, coalesce(f.joined, 0), coalesce(f.event_id, 0)
FROM key k CROSS JOIN LATERAL (
    SELECT count(*) AS rows, min(j.joined) AS joined, (array_agg(j.event_id ORDER BY j.joined))[1] AS event_id FROM joined j WHERE j.number = k.number) f`

// A range that is taken while [joinKeys] works is not in its snapshot. Its taker has asked what
// comes first either after the rows were locked, and then waits ([FindBlockedKeys]), or before,
// and then the range is here.
const selectJoinedInHand = `WITH ` + KeysInHand + ` SELECT EXISTS (SELECT FROM unnest($1::text[]) AS k (key) WHERE (hashtext(k.key) IN (SELECT h.hash FROM hand h)) IS TRUE)`

// errTakenMeanwhile says that a range of keys that were joined was taken meanwhile.
var errTakenMeanwhile = errors.New("events of the keys were taken meanwhile")

// Joined is what became of an ordering key that [JoinKeys] was called for.
type Joined struct {
	InHand bool           // an open range has events of it, or its first row is locked, so that nothing joins it yet
	Early  bool           // rows of it have become due since everything was taken that had been committed: a take must come first
	Rows   int            // that joined it
	First  ordering.Place // of these; zero: none did
}

// JoinKeys joins to the given keys, up to limit rows each, what has become due: in the order of due
// times, behind all ranges that were taken. before is 0, or the number of a range of which the
// caller has all events of the keys in hand, and has sent none: the rows join before that range, up
// to the times of the keys. If before is 0, a key of which an open range has events is left alone:
// they were due first, and have no rows. So were events that are in no range yet: what joins was
// due at complete, when everything was in ranges that had been committed, or at the last such time
// that the database shows.
func JoinKeys(ctx context.Context, db pg.Pool, before int64, keys []Key, complete time.Time, limit int) (done []Joined, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	names, destinations, due := make([]string, len(keys)), make([]string, len(keys)), make([]*time.Time, len(keys))
	for i, k := range keys {
		names[i], destinations[i], due[i] = k.Key, k.Destination, set(k.Due)
	}
	join := func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, joinKeys, destinations, names, limit, before, due, complete)
		if err != nil {
			return err
		}
		done = make([]Joined, len(keys))
		var joined []string
		var number int
		var j Joined
		if _, err := pgx.ForEachRow(rows, []any{&number, &j.InHand, &j.Early, &j.Rows, &j.First.Joined, &j.First.Event}, func() error {
			if done[number-1] = j; j.Rows > 0 {
				joined = append(joined, names[number-1])
			}
			return nil
		}); err != nil || before > 0 || len(joined) == 0 {
			return err
		}
		taken := false
		if err := tx.QueryRow(ctx, selectJoinedInHand, joined).Scan(&taken); err != nil {
			return err
		}
		if taken {
			return errTakenMeanwhile
		}
		return nil
	}
	for range joinTries {
		if err = pgx.BeginFunc(ctx, db, join); !errors.Is(err, errTakenMeanwhile) { // if not, the next one sees that range
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("join ordering keys: %w", err)
	}
	return done, nil
}

// joinTries is how often a join is made again. Each time, another range came meanwhile.
const joinTries = 5
