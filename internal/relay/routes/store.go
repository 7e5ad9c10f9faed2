package routes

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// A routing is what one relay records of its configuration.
type routing struct {
	relayID      int32
	destinations []string
	routes       map[Row]bool // empty: the relay is stopping and withdraws them
}

// equal reports whether both record the same. A routing that was never recorded is nil.
func (r *routing) equal(other *routing) bool {
	return r != nil && other != nil && r.relayID == other.relayID && slices.Equal(r.destinations, other.destinations) && maps.Equal(r.routes, other.routes)
}

// A state tells whether the stored routes may differ from those of all registered relays together.
// A synchronisation leaves them equal, and only two things change that: other stored routes, which
// a trigger counts, and relays that are registered no longer.
type state struct {
	changes *int64  // of outbox_route; nil: the row that counts them is lost
	relays  []int32 // sorted
}

func (s state) equal(other state) bool {
	return s.changes != nil && other.changes != nil && *s.changes == *other.changes && slices.Equal(s.relays, other.relays)
}

const selectState = `SELECT (SELECT routes FROM outbox_intake), ARRAY(SELECT id FROM outbox_relay ORDER BY id)`

func queryState(ctx context.Context, q pg.DB) (s state, err error) {
	return s, q.QueryRow(ctx, selectState).Scan(&s.changes, &s.relays)
}

// isSynchronised reports whether nothing has changed since the last synchronisation left this
// state.
func isSynchronised(ctx context.Context, q pg.DB, last state) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	now, err := queryState(ctx, q)
	if err != nil {
		return false, fmt.Errorf("compare routes: %w", err)
	}
	return now.equal(last), nil
}

// A Change is what one synchronisation found and left in outbox_route.
type Change struct {
	before, after map[Row]bool
	state         state // that it left
	// kept are stored routes that no registered relay has any more, by the last range that may have
	// taken one.
	kept map[Row]int64

	Added, Removed []Row
}

const waitForLocks = `SET LOCAL lock_timeout = 0`

const waitBriefly = `SET LOCAL lock_timeout = 2000`

const lockRoutes = `LOCK TABLE outbox_route IN SHARE ROW EXCLUSIVE MODE`

// syncRoutes records what this relay is configured for, unless own is nil, and makes the stored
// routes those of all registered relays together. While no relay has recorded any, they stay:
// producers continue while all relays are away. last is the change before, whose routes it does not
// read again if they are the same. describe words the alert about the change for the relays that
// did not make it. Producers never wait: the lock only orders relays that do the same.
func syncRoutes(ctx context.Context, db pg.Pool, own *routing, last Change, describe func(Change) string) (change Change, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	withdraws := own != nil && len(own.routes) == 0
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		wait := waitBriefly
		if own != nil && !withdraws {
			if err := keepRegistered(ctx, tx, own.relayID); err != nil {
				return err
			}
			wait = waitForLocks
		}
		// Durably: without its routes, every new event would be parked.
		for _, statement := range []string{pg.CommitDurably, wait, lockRoutes} {
			if _, err := tx.Exec(ctx, statement); err != nil {
				return err
			}
		}
		// First: a relay that is removed after this is missing in the state the next time.
		found, err := queryState(ctx, tx)
		if err != nil {
			return err
		}
		var dropped []Row
		if own != nil {
			if dropped, err = recordRouting(ctx, tx, own); err != nil {
				return err
			}
		}
		change, err = uniteRoutes(ctx, tx, found, last, dropped)
		if err != nil {
			return err
		}
		if len(change.Added)+len(change.Removed) == 0 {
			if withdraws && len(change.kept) > 0 {
				_, err = tx.Exec(ctx, notifyRoutes)
			}
			return err
		}
		return announceRoutes(ctx, tx, describe(change), own == nil && len(change.Added) > 0)
	})
	if err != nil {
		return Change{}, fmt.Errorf("synchronise routes: %w", err)
	}
	return change, nil
}

const lockOwnRelay = `SELECT FROM outbox_relay WHERE id = $1 FOR KEY SHARE`

// keepRegistered keeps this relay's row until the transaction ends. It comes before the lock on the
// routes, or a rescue that removes the row could wait for this transaction and this transaction for
// the rescue.
func keepRegistered(ctx context.Context, tx pgx.Tx, relayID int32) error {
	tag, err := tx.Exec(ctx, lockOwnRelay, relayID)
	if err == nil && tag.RowsAffected() == 0 {
		err = pg.ErrTakenForDead
	}
	return err
}

const selectOwnDestinations = `SELECT destination FROM outbox_relay_destination WHERE relay_id = $1`

const dropOwnDestinations = `DELETE FROM outbox_relay_destination WHERE relay_id = $1 AND destination = ANY ($2::text[])`

const addOwnDestinations = `
INSERT INTO outbox_relay_destination (relay_id, destination) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING`

const selectOwnRoutes = `SELECT pattern, destination FROM outbox_relay_route WHERE relay_id = $1`

const dropOwnRoutes = `
DELETE FROM outbox_relay_route r USING unnest($2::text[], $3::text[]) AS o (pattern, destination)
WHERE r.relay_id = $1 AND r.pattern = o.pattern AND r.destination = o.destination`

const addOwnRoutes = `
INSERT INTO outbox_relay_route (relay_id, pattern, destination)
SELECT $1, pattern, destination FROM unnest($2::text[], $3::text[]) AS o (pattern, destination) ON CONFLICT DO NOTHING`

// recordRouting writes what a relay serves and where it routes, instead of what it wrote before.
// The sets are compared here: a statement that compared 100,000 rows with an array would compare
// each with each. dropped are the routes that its configuration had and has no longer.
func recordRouting(ctx context.Context, tx pgx.Tx, own *routing) (dropped []Row, err error) {
	if len(own.routes) > 0 {
		if err := recordDestinations(ctx, tx, own); err != nil {
			return nil, err
		}
	}
	list, err := queryRoutes(ctx, tx, selectOwnRoutes, own.relayID)
	if err != nil {
		return nil, err
	}
	recorded := setOf(list)
	gone := missingRoutes(recorded, own.routes)
	if err := execRoutes(ctx, tx, dropOwnRoutes, gone, own.relayID); err != nil {
		return nil, err
	}
	if len(own.routes) > 0 {
		dropped = gone
	}
	return dropped, execRoutes(ctx, tx, addOwnRoutes, missingRoutes(own.routes, recorded), own.relayID)
}

func setOf(list []Row) map[Row]bool {
	set := make(map[Row]bool, len(list))
	for _, route := range list {
		set[route] = true
	}
	return set
}

func recordDestinations(ctx context.Context, tx pgx.Tx, own *routing) error {
	recorded, err := rows.Values[string](ctx, tx, "read own destinations", selectOwnDestinations, own.relayID)
	if err != nil {
		return err
	}
	if dropped := without(recorded, own.destinations); len(dropped) > 0 {
		if _, err := tx.Exec(ctx, dropOwnDestinations, own.relayID, dropped); err != nil {
			return err
		}
	}
	if added := without(own.destinations, recorded); len(added) > 0 {
		_, err = tx.Exec(ctx, addOwnDestinations, own.relayID, added)
	}
	return err
}

// without returns the names that others do not have.
func without(names, others []string) (rest []string) {
	has := make(map[string]bool, len(others))
	for _, name := range others {
		has[name] = true
	}
	for _, name := range names {
		if !has[name] {
			rest = append(rest, name)
		}
	}
	return rest
}

const selectRoutes = `SELECT pattern, destination FROM outbox_route`

// Over both primary keys, in one pass. The relay's sessions have them off, because they need
// statistics to be cheap elsewhere.
const allowMerges = `SET LOCAL enable_mergejoin = on`

const selectStale = `
SELECT t.pattern, t.destination FROM outbox_route t
WHERE EXISTS (SELECT FROM outbox_relay_route)
  AND NOT EXISTS (SELECT FROM outbox_relay_route o WHERE o.pattern = t.pattern AND o.destination = t.destination)`

// The last range, the oldest open one, and the last open one of a relay that is not registered.
const selectRanges = `
SELECT coalesce(l.seq, 0), coalesce(r.oldest_open_seq, l.seq + 1, 1), coalesce(r.strange, 0)
FROM (SELECT 1) one LEFT JOIN (SELECT seq, oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l ON true
CROSS JOIN LATERAL (
    SELECT min(o.seq) AS oldest_open_seq, max(o.seq) FILTER (WHERE NOT EXISTS (SELECT FROM outbox_relay a WHERE a.id = o.relay_id)) AS strange
    FROM outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL) r`

// keepUsed divides stale routes into those to remove and those to keep: a dead or stopping relay
// may have sent events of an open range by them, without a delivery. Whoever rescues the range has
// to find the routes. A relay that was taken for dead may even take one more by them: it does not
// know yet. known are the routes that were kept before. Only dropped routes go at once.
func keepUsed(ctx context.Context, tx pgx.Tx, stale, dropped []Row, known map[Row]int64) (removed []Row, kept map[Row]int64, err error) {
	if len(stale) == 0 {
		return nil, nil, nil
	}
	var last, oldestOpen, strange int64
	if err := tx.QueryRow(ctx, selectRanges).Scan(&last, &oldestOpen, &strange); err != nil {
		return nil, nil, err
	}
	goes := make(map[Row]bool, len(dropped))
	for _, route := range dropped {
		goes[route] = true
	}
	kept = map[Row]int64{}
	for _, route := range stale {
		upto, was := known[route]
		if !was {
			upto = last
		}
		upto = max(upto, strange)
		if goes[route] || upto < oldestOpen {
			removed = append(removed, route)
		} else {
			kept[route] = upto
		}
	}
	return removed, kept, nil
}

const selectLacking = `
SELECT DISTINCT o.pattern, o.destination FROM outbox_relay_route o
WHERE NOT EXISTS (SELECT FROM outbox_route t WHERE t.pattern = o.pattern AND t.destination = o.destination)`

const removeRoutes = `
DELETE FROM outbox_route t USING unnest($1::text[], $2::text[]) AS o (pattern, destination)
WHERE t.pattern = o.pattern AND t.destination = o.destination`

// The only statement that adds routes.
const addRoutes = `
INSERT INTO outbox_route (pattern, destination)
SELECT pattern, destination FROM unnest($1::text[], $2::text[]) AS o (pattern, destination)`

// uniteRoutes makes the stored routes the union of what the registered relays have recorded. It
// writes only what differs: even a statement that changes no row would count as a change, after
// which every relay reads all routes again. Of what no relay has any more, it keeps what an open
// range may need, unless it is among dropped.
func uniteRoutes(ctx context.Context, tx pgx.Tx, found state, last Change, dropped []Row) (change Change, err error) {
	change.state = found
	if last.after != nil && found.changes != nil && last.state.changes != nil && *found.changes == *last.state.changes {
		change.before = last.after
	} else {
		stored, err := queryRoutes(ctx, tx, selectRoutes)
		if err != nil {
			return Change{}, err
		}
		change.before = setOf(stored)
	}
	if _, err := tx.Exec(ctx, allowMerges); err != nil {
		return Change{}, err
	}
	stale, err := queryRoutes(ctx, tx, selectStale)
	if err != nil {
		return Change{}, err
	}
	if change.Removed, change.kept, err = keepUsed(ctx, tx, stale, dropped, last.kept); err != nil {
		return Change{}, err
	}
	if change.Added, err = queryRoutes(ctx, tx, selectLacking); err != nil {
		return Change{}, err
	}
	if len(change.Added)+len(change.Removed) == 0 {
		change.after = change.before
		return change, nil
	}
	// In this order: additions lock destinations, and removals lock the counters that pauses and
	// breakers lock behind their destination.
	if err := execRoutes(ctx, tx, addRoutes, change.Added); err != nil {
		return Change{}, err
	}
	if err := execRoutes(ctx, tx, removeRoutes, change.Removed); err != nil {
		return Change{}, err
	}
	left, err := queryState(ctx, tx)
	if err != nil {
		return Change{}, err
	}
	change.state.changes = left.changes
	change.after = maps.Clone(change.before)
	for _, route := range change.Removed {
		delete(change.after, route)
	}
	for _, route := range change.Added {
		change.after[route] = true
	}
	return change, nil
}

// execRoutes executes a statement about these routes, if there are any. Their patterns and
// destinations come after its other arguments.
func execRoutes(ctx context.Context, tx pgx.Tx, statement string, routes []Row, args ...any) error {
	if len(routes) == 0 {
		return nil
	}
	patterns, destinations := make([]string, len(routes)), make([]string, len(routes))
	for i, route := range routes {
		patterns[i], destinations[i] = route.Pattern, route.Destination
	}
	_, err := tx.Exec(ctx, statement, append(args, patterns, destinations)...)
	return err
}

func queryRoutes(ctx context.Context, q pg.DB, statement string, args ...any) ([]Row, error) {
	return rows.Structs[Row](ctx, q, "read routes", statement, args...)
}

// The alert is for the relays that did not make the change, and does not fire when all of them
// wanted it.
const fireRoutesChanged = `
INSERT INTO outbox_alert AS a (rule, subject, detail)
SELECT 'routes_changed', current_database(), $1 WHERE $2 OR ` + pg.RelaysDisagree + `
ON CONFLICT (rule, subject) DO UPDATE SET count = a.count + 1, last_at = now(), detail = excluded.detail`

// The others compare their routes at once instead of at their next look.
const notifyRoutes = `SELECT pg_notify('outbox_wake', 'routes ' || current_schema()) WHERE ` + pg.QueueHasRoom

// announceRoutes alerts of changed routes if relays disagree about them, or if always, and wakes
// the other relays.
func announceRoutes(ctx context.Context, tx pgx.Tx, detail string, always bool) error {
	if _, err := tx.Exec(ctx, fireRoutesChanged, detail, always); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, notifyRoutes)
	return err
}

// unserved returns the destinations with pending deliveries that no registered relay serves.
func unserved(ctx context.Context, q pg.DB) ([]Unserved, error) {
	return rows.Structs[Unserved](ctx, q, "find unserved destinations", pg.Unserved)
}

// An Unserved is one with pending deliveries that no registered relay serves.
type Unserved struct {
	Destination string `json:"destination"`
	Pending     int    `json:"pending"` // at most 10,001
}

// String returns the name and how many deliveries wait, at most "more than 10000".
func (u Unserved) String() string {
	return fmt.Sprintf("%s (%s)", u.Destination, plain.UpTo(u.Pending, 10_000))
}
