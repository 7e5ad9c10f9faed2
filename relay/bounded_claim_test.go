package relay

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// histories are states of one ordering key, "hot", that leave n entries before its 1,000 due deliveries. Each returns the floor
// that a relay would have learnt.
var histories = map[string]func(db *database, n int) (floor int64){
	"failed and skipped": func(db *database, n int) int64 {
		db.keyed("hot", 1, n)
		db.exec(`UPDATE outbox_delivery SET status = 'failed'`)
		db.exec(`VACUUM outbox_delivery`)
		return math.MinInt64
	},
	"delivered while vacuum is blocked": func(db *database, n int) int64 {
		db.keyed("hot", 1, n)
		db.blockVacuum()
		db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now()`)
		return row[int64](db, `SELECT max(event_id) FROM outbox_delivery`)
	},
	"parked": func(db *database, n int) int64 {
		db.exec(`DELETE FROM outbox_route`)
		db.keyed("hot", 1, n)
		db.route()
		return math.MinInt64
	},
	"none": func(*database, int) int64 { return math.MinInt64 },
}

// A claim of a key with 1,000 due deliveries reads what it takes and what it may look at, whatever became of the key's earlier
// ones, whatever the statistics say, and however many deliveries of other keys are parked.
func TestClaimReadsNoHistory(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, history := range histories {
		for _, keys := range []int{1, 3, 10_000} {
			t.Run(fmt.Sprintf("%s, %d keys", name, keys), func(t *testing.T) {
				t.Parallel()
				db := newDatabase(t)
				buffers, took, claimed := db.claimAfter(history, 10_000, keys, 10_000)
				if claimed != maxRun || buffers > 20*(100+scanExtra) {
					t.Errorf("claimed %d with %d buffers in %s", claimed, buffers, took)
				}
			})
		}
	}
}

// BenchmarkClaimHistory measures one claim of a key with 1,000 due deliveries after different histories of the key, beside a
// million deliveries of other keys that are parked, with -full; ratio is the time over that without a history.
func BenchmarkClaimHistory(b *testing.B) {
	sizes, parked := []int{10_000}, 10_000
	if *full {
		sizes, parked = []int{10_000, 100_000}, 1_000_000
	}
	empty := map[int]time.Duration{}
	for _, name := range []string{"none", "failed and skipped", "delivered while vacuum is blocked", "parked"} {
		for _, n := range sizes {
			for _, keys := range []int{1, 3, 10_000} {
				b.Run(fmt.Sprintf("%s/%d/%dkeys", strings.ReplaceAll(name, " ", "_"), n, keys), func(b *testing.B) {
					for b.Loop() {
						db := newDatabase(b)
						buffers, took, _ := db.claimAfter(histories[name], n, keys, parked)
						if name == "none" {
							empty[keys] = took
						}
						b.ReportMetric(float64(took.Microseconds())/1000, "ms/claim")
						b.ReportMetric(float64(buffers)/1000, "buffers/row")
						b.ReportMetric(float64(took)/float64(empty[keys]), "ratio")
					}
					b.ReportMetric(0, "ns/op")
				})
			}
		}
	}
}

// claimAfter returns how many buffers one claim reads, how long it takes and what it brings, after a history of the key and with
// statistics of as many keys as given.
func (db *database) claimAfter(history func(*database, int) int64, n, keys, parked int) (buffers int, took time.Duration, claimed int) {
	db.Helper()
	db.exec(`ALTER TABLE outbox SET (autovacuum_enabled = off); ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	floor := history(db, n)
	position := keyset{at: row[time.Time](db, `SELECT clock_timestamp()`)} // a relay has looked at what came before
	db.exec(`DELETE FROM outbox_route`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'parked-' || i, 'parked-' || i % 1000 FROM generate_series(1, $1) i`, parked)
	db.route()
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 't', '{}', 'due-' || i, CASE WHEN i % $1 < 1000 THEN 'other-' || i % $1 ELSE 'once-' || i END FROM generate_series(1, $1 - 1) i`, keys)
	db.keyed("hot", n+1, n+1000)
	db.exec(`ANALYZE outbox_delivery`)

	conn := engineConn(db, db)
	_, instance := db.registered()
	request := claimRequest{
		destination: "default", run: maxRun, skipFailed: true, promise: time.Hour,
		scans: []scan{{free: 100, after: position}}, keys: []readyKey{{key: "hot", floor: floor}},
	}
	reader := claimReader{requests: []claimRequest{request}, lease: time.Minute}
	var queries pgx.Batch
	reader.queueKeys(&queries, instance)
	reader.queueDue(&queries, instance)
	took = time.Hour
	for range 5 { // each is rolled back: the quickest shows what the claim costs
		tx, err := conn.Begin(db.Context())
		must(db, err)
		var all time.Duration
		buffers, claimed = 0, 0
		for _, query := range queries.QueuedQueries {
			e := explain(db, tx, query.SQL, query.Arguments...)
			buffers += e.buffers
			all += e.took
			if updated := regexp.MustCompile(`CTE Scan on claimed c .*actual rows=(\d+)`).FindStringSubmatch(e.plan); updated != nil {
				count, _ := strconv.Atoi(updated[1])
				claimed += count
			}
		}
		must(db, tx.Rollback(db.Context()))
		took = min(took, all)
	}
	return buffers, took, claimed
}
