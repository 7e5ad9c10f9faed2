package relay

import (
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// Beside five million settled deliveries, and with 300,000 due, a sample reads no large table as a whole, and no more than its
// limit of any index.
func TestSampleIsBounded(t *testing.T) {
	testsize.Long(t)
	settled, due := testsize.Of(5_000_000, 50_000), testsize.Of(300_000, 30_000)
	db := newDatabase(t, "a", "b", "c")
	db.exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at, status, delivered_at)
		SELECT i, chr(97 + i % 3), CASE WHEN i % 10 = 0 THEN 'key-' || i % 5000 END, now() - interval '1 day',
		       CASE WHEN i % 100 = 0 THEN 'failed' ELSE 'delivered' END, CASE WHEN i % 100 = 0 THEN NULL ELSE now() END
		FROM generate_series(1, $1::int) i`, settled)
	db.exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at)
		SELECT $1::int + i, chr(97 + i % 3), CASE WHEN i % 10 = 0 THEN 'key-' || i % 5000 END, now() - interval '1 minute' FROM generate_series(1, $2::int) i`, settled, due)
	// A sample of three destinations counts 30,000 pending and 3,000 failed deliveries. VACUUM lets it read the index alone; until
	// then it reads a page for each that failed.
	for _, c := range []struct {
		prepare string
		most    int // pages
	}{{`SELECT 1`, 25_000}, {`ANALYZE outbox_delivery`, 25_000}, {`VACUUM outbox_delivery`, 5_000}} {
		prepare, mostSampleBuffers := c.prepare, c.most
		db.exec(prepare)
		conn := engineConn(t, db)
		sample := explain(t, conn, watch.CountBacklog, []string{"a", "b", "c"}, []string{}, 10_000, alert.DefaultLagOver.Seconds())
		plan := sample.plan
		if scan := regexp.MustCompile(`Seq Scan on outbox(_delivery|_attempt)?\b[^_].*`).FindString(plan); scan != "" {
			t.Errorf("after %s: %s in\n%s", prepare, scan, plan)
		}
		if want := "Index Only Scan using outbox_delivery_aside on outbox_delivery aside"; !strings.Contains(plan, want) {
			t.Errorf("after %s: missing %q in\n%s", prepare, want, plan)
		}
		t.Logf("after %s: %d buffers, %s", prepare, sample.buffers, sample.took)
		if sample.buffers > mostSampleBuffers {
			t.Errorf("after %s: %d buffers:\n%s", prepare, sample.buffers, plan)
		}
	}
}
