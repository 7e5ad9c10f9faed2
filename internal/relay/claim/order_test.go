package claim

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Rows that no notification tells of are found by the search of the next poll, and none of a
// destination that is held.
func TestSearchFindsWhatIsDue(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'k')`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, replay, next_attempt_at, status)
		SELECT (SELECT max(id) FROM outbox), name, replay, now() + due, status
		FROM (VALUES ('due', false, interval '-1 s', 'pending'), ('replayed', true, '-1 s', 'pending'), ('later', false, '1 h', 'pending'), ('', false, '-1 s', 'pending'),
			('done', false, '-1 s', 'delivered'), ('held', false, '-1 s', 'pending'), ('open', false, '-1 s', 'pending'), ('z', true, '-1 s', 'pending')) d (name, replay, due, status)`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, replay, next_attempt_at) SELECT max(id), 'z', false, now() + interval '1 h' FROM outbox ON CONFLICT DO NOTHING`)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('held', true, now()), ('due', false, NULL)`)
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until) VALUES ('open', 'open', now(), now())`)
	// default has what the fixture's route made.
	found, err := (&Rows{DB: db.Pool}).readDue(t.Context(), 1)
	relaytest.Must(t, err)
	testkit.Equal(t, "found", strings.Join(found, " "), "default due replayed z")
}

// claimAll claims for one lane what a scan over all of its live deliveries finds, and then the
// ordering keys that it found.
func claimAll(db *relaytest.Database, s claims, relayID int32, free, run int) []lane.Delivery {
	db.Helper()
	request := Request{Destination: "default", Run: run, Promise: policy.DefaultNotAfter, Scans: []lane.Scan{{Free: free}}}
	first, err := s.Claim(db.Context(), relayID, time.Minute, []Request{request})
	relaytest.Must(db, err)
	request.Scans = nil
	for _, found := range first.scans[0].Keys {
		request.Keys = append(request.Keys, lane.ReadyKey{Key: found.Key, Floor: math.MinInt64})
	}
	then, err := s.Claim(db.Context(), relayID, time.Minute, []Request{request})
	relaytest.Must(db, err)
	return append(first.Deliveries, then.Deliveries...)
}

// claimRuns claims for one lane and returns the events of each run, by ordering key.
func claimRuns(db *relaytest.Database, free, run int) map[string][]int64 {
	db.Helper()
	s, relayID := registered(db)
	all, broken := lane.Runs(claimAll(db, s, relayID, free, run))
	if len(broken) > 0 {
		db.Errorf("broken: %v", broken)
	}
	of := map[string][]int64{}
	for _, run := range all {
		for _, d := range run {
			key := "none"
			if d.Event.OrderingKey != nil {
				key = *d.Event.OrderingKey
			}
			of[key] = append(of[key], d.EventID)
		}
	}
	return of
}

// What a claim brings behind the heads of ordering keys is bounded for each key, and for all of
// them.
func TestClaimBoundsRuns(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ run, want int }{
		"by the run":                   {16, 16},
		"one at a time":                {1, 1},
		"more than there are in a key": {60, 50},
		"a run is never less than one": {0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			for key := range 10 {
				db.InsertKeyed(string(rune('a'+key)), 1, 50)
			}
			db.Insert(5, "free")
			of := claimRuns(db, 600, c.run)
			if len(of) != 11 || len(of["none"]) != 5 {
				t.Errorf("%d keys, and %d without one; want all", len(of)-1, len(of["none"]))
			}
			delete(of, "none")
			for key, run := range of {
				if len(run) != c.want || run[len(run)-1]-run[0] != int64(c.want-1) {
					t.Errorf("%s: %v, want the first %d", key, run, c.want)
				}
			}
		})
	}
}

// A head that may have killed relays comes alone, or its followers would be suspected with it and
// fail for it.
func TestSuspectedHeadComesAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("suspect", 1, 10)
	db.InsertKeyed("unlucky", 1, 10)
	db.Exec(`UPDATE outbox_delivery SET rescues = CASE ordering_key WHEN 'suspect' THEN 3 ELSE 2 END WHERE event_id IN (1, 11)`)
	of := claimRuns(db, 10, 16)
	if len(of["suspect"]) != 1 || len(of["unlucky"]) != 10 {
		t.Errorf("claimed %v", of)
	}
}

// What was parked before a route was added goes before what the route sends on at once.
func TestParkedGoBeforeLaterOnesOfTheirKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`DELETE FROM outbox_route; UPDATE outbox_destination SET parked_after = NULL`)
	db.InsertKeyed("k", 1, 3)     // parked
	db.InsertKeyed("other", 1, 1) // parked too
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('unrouted', '{}', 'never', 'k')`)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'default')`)
	db.InsertKeyed("k", 4, 20)
	db.InsertKeyed("free", 1, 20)
	of := claimRuns(db, 10, 16)
	if len(of["k"]) != 0 || len(of["free"]) != 16 {
		t.Errorf("claimed %v while earlier ones are parked", of)
	}
	latest := relaytest.Row[int64](db, `SELECT max(id) FROM outbox`)
	passed, err := routes.ReleaseParked(t.Context(), db.Pool, 2, latest)
	relaytest.Must(t, err)
	testkit.Equal(t, "the first step", passed, (routes.ParkedRange{After: 0, Reached: 2, Released: 2}))
	if of = claimRuns(db, 10, 16); len(of["k"]) != 2 {
		t.Errorf("claimed %v while the third is parked", of)
	}
	for passed.Reached < latest {
		passed, err = routes.ReleaseParked(t.Context(), db.Pool, 2, latest)
		relaytest.Must(t, err)
	}
	// One that has no route is parked still, and holds up no other.
	if of = claimRuns(db, 10, 16); len(of["other"]) != 1 {
		t.Errorf("claimed %v after the release", of)
	}
	relaytest.Becomes(db, "4 unrouted", `SELECT count(*) FILTER (WHERE reordered > 0) * 4 || ' ' || (SELECT event_type FROM outbox_delivery JOIN outbox ON id = event_id WHERE destination = '') FROM outbox_destination`)
}

// A relay whose row is gone claims nothing, and must not move past what it cannot claim: a cursor
// that did would rest a hundred times as long as it lasted before it looked again.
func TestClaimOfARemovedRelayMovesNowhere(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "key")
	s, relayID := registered(db)
	request := Request{Destination: "default", Scans: []lane.Scan{{Free: 1}, {Class: lane.Backlog, Free: 10}}}
	db.Exec(`DELETE FROM outbox_relay WHERE id = $1`, relayID)
	result, err := s.Claim(t.Context(), relayID, time.Minute, []Request{request})
	relaytest.Must(t, err)
	for i, read := range result.scans {
		if read.Last != (lane.Keyset{}) || read.More || len(read.Keys) > 0 {
			t.Errorf("scan %d: %+v", i, read)
		}
	}
	if len(result.Deliveries) > 0 || result.at.IsZero() {
		t.Errorf("%d deliveries at %v", len(result.Deliveries), result.at)
	}
}

// Constants of Go cannot stand in those of SQL, so the numbers are there once more.
func TestSuspectNumbersInSQL(t *testing.T) {
	t.Parallel()
	for number, sql := range map[string]string{
		fmt.Sprintf("least(d.rescues + 1, %d)", capacity.AloneFrom):   rescuesAfterClaim,
		fmt.Sprintf("bool_and(x.rescues < %d)", capacity.SuspectFrom): claimKeys,
	} {
		if !strings.Contains(sql, number) {
			t.Errorf("%q is not in %s", number, sql)
		}
	}
}

// Each claim releases the next delivery of the key, so that a relay that takes over finds it.
func TestTakenOverInTheMiddleOfAKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("k", 1, 100)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 1`)
	for n := 1; n < 100; n += 16 {
		of := claimRuns(db, 10, 16)
		if due := relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status = 'pending' AND blocked_by IS NULL ORDER BY event_id`); len(of["k"]) == 0 ||
			n+16 <= 100 && (len(due) != 17 || due[0] != int64(n) || due[16] != int64(n+16)) {
			t.Fatalf("claimed %v; due: %v", of["k"], due)
		}
		db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now(), claimed_by = NULL, lease_expires_at = NULL WHERE claimed_by IS NOT NULL`)
	}
}

// Each claim releases the next delivery of each of its keys, however many keys there are, without
// going through the others.
func TestReleaseOfManyKeys(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	const n = 500
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' || i % 500 FROM generate_series(0, 999) i`)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = event_id - 500 WHERE event_id > 500`)
	_, relayID := registered(db)
	conn := engineConn(db)
	_, err := conn.Exec(t.Context(), `PREPARE claim (`+hotStatements["claim keys"].types+`) AS `+claimKeys, pgx.QueryExecModeSimpleProtocol)
	relaytest.Must(t, err)
	keys, floors := relaytest.Row[string](db, `SELECT array_agg('k' || i)::text FROM generate_series(0, 499) i`), relaytest.Row[string](db, `SELECT array_agg(0)::text FROM generate_series(0, 499)`)
	result, err := conn.Query(t.Context(), fmt.Sprintf(`EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) EXECUTE claim (%d, 60, 8192, '{default}', '{1}', '{f}', '{600}', '{0}', '{1}', '{%d}', '%s', '%s', 1)`,
		relayID, n, keys, floors), pgx.QueryExecModeSimpleProtocol)
	relaytest.Must(t, err)
	plan, err := pgx.CollectRows(result, pgx.RowTo[string])
	relaytest.Must(t, err)
	for _, line := range plan {
		if _, removed, is := strings.Cut(line, "Removed by Join Filter: "); is {
			if rows, err := strconv.Atoi(removed); err != nil || rows > 10*n {
				t.Errorf("%s rows are compared in vain: %s", removed, strings.Join(plan, "\n"))
			}
		}
	}
	if free := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE blocked_by IS NULL`); free != 2*n {
		t.Errorf("%d of %d deliveries wait for nothing", free, 2*n)
	}
}
