package claim

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// histories are states of one ordering key, "hot", that leave n entries before its 1,000 due
// deliveries. Each returns the floor that a relay would have learnt.
var histories = map[string]func(db *relaytest.Database, n int) (floor int64){
	"failed and skipped": func(db *relaytest.Database, n int) int64 {
		db.InsertKeyed("hot", 1, n)
		db.Exec(`UPDATE outbox_delivery SET status = 'failed'`)
		db.Exec(`VACUUM outbox_delivery`)
		return math.MinInt64
	},
	"delivered while vacuum is blocked": func(db *relaytest.Database, n int) int64 {
		db.InsertKeyed("hot", 1, n)
		db.BlockVacuum()
		db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now()`)
		return relaytest.Row[int64](db, `SELECT max(event_id) FROM outbox_delivery`)
	},
	"parked": func(db *relaytest.Database, n int) int64 {
		db.Exec(`DELETE FROM outbox_route`)
		db.InsertKeyed("hot", 1, n)
		db.Route()
		return math.MinInt64
	},
	"none": func(*relaytest.Database, int) int64 { return math.MinInt64 },
}

// jam leaves n due deliveries of the key "jam" behind its first one, which has failed.
func jam(db *relaytest.Database, n int) (floor int64) {
	db.InsertKeyed("jam", 0, n)
	db.Exec(`UPDATE outbox_delivery SET status = CASE event_id WHEN 1 THEN 'failed' ELSE 'pending' END, blocked_by = CASE WHEN event_id > 1 THEN 1 END`)
	db.Exec(`VACUUM outbox_delivery`)
	return math.MinInt64
}

// However many deliveries wait behind a failed head, a claim that begins at the front reads as much
// as if there were few, also if it asks about their key.
func TestClaimReadsNothingBehindAFailedHead(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	few := 0
	for _, n := range []int{1000, 1_000_000} {
		db := relaytest.Covered(t)
		buffers, took, claimed := claimAfter(db, jam, n, 1000, 0, true)
		t.Logf("%d wait: claimed %d with %d buffers in %s", n, claimed, buffers, took)
		few = cmp.Or(few, buffers)
		if claimed != lane.MaxRun || buffers > few+few/5 { // an index has one level more
			t.Errorf("it read %d before", few)
		}
	}
}

// A claim of a key with 1,000 due deliveries reads what it takes and what it may read, whatever
// became of the key's earlier ones, whatever the statistics say, and however many deliveries of
// other keys are parked.
func TestClaimReadsNoHistory(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, history := range histories {
		for _, keys := range []int{1, 3, 10_000} {
			t.Run(fmt.Sprintf("%s, %d keys", name, keys), func(t *testing.T) {
				t.Parallel()
				db := relaytest.Covered(t)
				buffers, took, claimed := claimAfter(db, history, 10_000, keys, 10_000, false)
				if claimed != lane.MaxRun || buffers > 20*(100+lane.ScanExtra) {
					t.Errorf("claimed %d with %d buffers in %s", claimed, buffers, took)
				}
			})
		}
	}
}

// claimAfter returns how many buffers one claim reads, how long it takes and what it brings, after
// a history of the key and with statistics of as many keys as given. jammed says that the claim
// begins at the front, where the key "jam" waits, and asks about that, too.
func claimAfter(db *relaytest.Database, history func(*relaytest.Database, int) int64, n, keys, parked int, jammed bool) (buffers int, took time.Duration, claimed int) {
	db.Helper()
	db.Exec(`ALTER TABLE outbox SET (autovacuum_enabled = off); ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	floor := history(db, n)
	position := lane.Keyset{At: relaytest.Row[time.Time](db, `SELECT clock_timestamp()`)} // a relay has looked at what came before
	db.Exec(`DELETE FROM outbox_route`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'parked-' || i, 'parked-' || i % 1000 FROM generate_series(1, $1) i`, parked)
	db.Route()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 't', '{}', 'due-' || i, CASE WHEN i % $1 < 1000 THEN 'other-' || i % $1 ELSE 'once-' || i END FROM generate_series(1, $1 - 1) i`, keys)
	db.InsertKeyed("hot", n+1, n+1000)
	db.Exec(`ANALYZE outbox_delivery`)

	conn := engineConn(db)
	_, relayID := registered(db)
	request := Request{
		Destination: "default", Run: lane.MaxRun, skipFailed: true, Promise: time.Hour,
		Scans: []lane.Scan{{Free: 100, After: position}}, Keys: []lane.ReadyKey{{Key: "hot", Floor: floor}},
	}
	if jammed {
		request.skipFailed, request.Scans[0].After, request.Keys = false, lane.Keyset{}, append(request.Keys, lane.ReadyKey{Key: "jam", Floor: floor})
	}
	reader := claimReader{requests: []Request{request}, lease: time.Minute, after: relaytest.Row[int64](db, `SELECT max(seq) FROM outbox_range`)}
	var queries pgx.Batch
	reader.queueKeys(&queries, relayID)
	reader.queueDue(&queries, relayID)
	took = time.Hour
	for range 5 { // each is rolled back: the quickest shows what the claim costs
		tx, err := conn.Begin(db.Context())
		relaytest.Must(db, err)
		var all time.Duration
		buffers, claimed = 0, 0
		for _, query := range queries.QueuedQueries {
			e := relaytest.Explain(db, tx, query.SQL, query.Arguments...)
			buffers += e.Buffers
			all += e.Took
			if updated := regexp.MustCompile(`CTE Scan on claimed c .*actual rows=(\d+)`).FindStringSubmatch(e.Plan); updated != nil {
				count, _ := strconv.Atoi(updated[1])
				claimed += count
			}
		}
		relaytest.Must(db, tx.Rollback(db.Context()))
		took = min(took, all)
	}
	return buffers, took, claimed
}
