package chaos

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// aged begins the idempotency keys of events that were there before a run. The wire accepts those
// that are due, or a receiver does in a batch, and the judge leaves them out. Others are not to be
// sent: their requests are recorded, and the judge knows no such event.
const aged = "aged-"

// isAgedAndDue reports whether a key is that of an event that was there before a run, and may be
// sent in it.
func isAgedAndDue(key string) bool {
	number, found := strings.CutPrefix(key, aged)
	id, err := strconv.Atoi(number)
	if !found || err != nil || *age < 1 {
		return false
	}
	group := 1 + (id-1)/(*age)
	return 350_000 < group && group <= 365_000 || 380_000 < group && group <= 400_000
}

// ageOutbox writes what a database holds after a long time, as command_test.go's settled does for a
// few events: 430,000 groups of $1 events. By group:
//
//	     1 to 300000  delivered, the last third with one of two ordering keys of producer 1
//	300001 to 320000  failed; the second half are heads of ordering keys
//	320001 to 350000  wait behind these heads, half of them behind one
//	350001 to 365000  due within an hour, 365001 to 380000 within a year
//	380001 to 400000  parked, until relays add their route
//	400001 to 430000  wait for a paused destination
var ageOutbox = []string{
	`SET LOCAL session_replication_role = replica`,
	`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, created_at, available_at, xid)
	SELECT 'sale.made', json_build_object('key', 'aged-' || id), 'aged-' || id,
	       CASE WHEN n BETWEEN 200001 AND 300000 THEN 'customer-1-' || n % 2 WHEN n BETWEEN 310001 AND 335000 THEN 'aged-' || n % 10000 WHEN n BETWEEN 335001 AND 350000 THEN 'aged-9999' END,
	       now() - interval '20 days', now() - interval '20 days', '2'
	FROM generate_series(1, 430000 * $1::int) id, LATERAL (SELECT 1 + (id - 1) / $1::int AS n) g`,
	`INSERT INTO outbox_delivery (event_id, destination, ordering_key, status, attempts, claim, last_attempt_at, delivered_at, next_attempt_at, last_http_status, last_reason, blocked_by)
	SELECT id, CASE WHEN n > 400000 THEN 'paused' WHEN n > 380000 THEN '' ELSE 'default' END, ordering_key,
	       CASE WHEN n <= 300000 THEN 'delivered' WHEN n <= 320000 THEN 'failed' ELSE 'pending' END,
	       CASE WHEN n <= 300000 THEN 1 WHEN n <= 320000 THEN 8 ELSE 0 END, 1,
	       CASE WHEN n <= 320000 THEN created_at END, CASE WHEN n <= 300000 THEN created_at END,
	       CASE WHEN n BETWEEN 350001 AND 365000 THEN now() + (n - 350000) * interval '240 ms' WHEN n BETWEEN 365001 AND 380000 THEN now() + interval '300 days' ELSE created_at END,
	       CASE WHEN n <= 300000 THEN 200 WHEN n <= 320000 THEN 500 END, CASE WHEN n BETWEEN 300001 AND 320000 THEN 'server_error' END,
	       CASE WHEN n BETWEEN 335001 AND 350000 THEN 319998 * $1::int + 1 WHEN n BETWEEN 320001 AND 335000 THEN (309999 + coalesce(nullif(n % 10000, 0), 10000)) * $1::int + 1 END
	FROM outbox, LATERAL (SELECT 1 + (id - 1) / $1::int AS n) g`,
	`INSERT INTO outbox_destination (destination, paused, paused_reason, paused_at) VALUES ('paused', true, 'aged', now())`,
	`UPDATE chaos_aged SET upto = 430000 * $1::int`,
	`DELETE FROM pg_statistic WHERE starelid IN (SELECT oid FROM pg_class WHERE relname LIKE 'outbox%')`,
	`UPDATE pg_class SET reltuples = -1, relpages = 0 WHERE relname LIKE 'outbox%' AND relkind IN ('r', 'i')`,
}

// makeOld leaves much behind in the outbox, no statistics of it, and a snapshot that no version of
// a row can be removed under, until the test ends.
func (s *stage) makeOld() {
	s.must(pgx.BeginFunc(s.Ctx, s.outbox, func(tx pgx.Tx) error {
		for _, statement := range ageOutbox {
			var arguments []any
			if strings.Contains(statement, "$1") {
				arguments = []any{*age}
			}
			if _, err := tx.Exec(s.Ctx, statement, arguments...); err != nil {
				return err
			}
		}
		return nil
	}))
	s.Go(func(ctx context.Context) error {
		for ctx.Err() == nil {
			s.blockVacuum(ctx)
			select {
			case <-time.After(100 * time.Millisecond): // its connection is ended, or the database is down
			case <-ctx.Done():
			}
		}
		return nil
	})
}

// selectWrong selects aged deliveries that are neither as they were nor, if they were due, sent
// with success and the attempts that were made.
const selectWrong = `
SELECT format('event %s of group %s: %s', e.id, n, coalesce(format('%s, attempt %s, claim %s, due in %s', d.status, attempts, claim, next_attempt_at - now()), 'gone'))
FROM generate_series(1, (SELECT upto FROM chaos_aged)) e (id) LEFT JOIN outbox_delivery d ON d.event_id = e.id, LATERAL (SELECT 1 + (e.id - 1) / $1::int AS n) g
WHERE NOT coalesce(CASE
    WHEN n <= 300000 THEN (status, attempts, claim) = ('delivered', 1, 1)
    WHEN n <= 320000 THEN (status, attempts, claim) = ('failed', 8, 1)
    WHEN n BETWEEN 350001 AND 365000 AND status = 'pending' THEN next_attempt_at > now() - interval '15 s'
    WHEN n BETWEEN 350001 AND 365000 OR n BETWEEN 380001 AND 400000 THEN
        status = 'delivered' AND attempts BETWEEN 1 AND 1 + (SELECT count(DISTINCT claim) FROM outbox_attempt a WHERE a.event_id = e.id AND outcome NOT IN ('delivered', 'hold'))
    ELSE (status, attempts, claim) = ('pending', 0, 1) END, false) LIMIT 10`

// agedWell waits until the aged events that are due are delivered, and all others as they were.
func (s *stage) agedWell() {
	s.t.Helper()
	var wrong []string
	if err := s.Poll(drainPatience, "aged events", func(context.Context) (bool, error) {
		wrong = all(s, s.outbox, selectWrong, pgx.RowTo[string], *age)
		return len(wrong) == 0, nil
	}); err != nil {
		s.t.Errorf("%v: %s", err, strings.Join(wrong, "; "))
	}
}

// blockVacuum holds a snapshot, and no lock of a table, until its connection ends.
func (s *stage) blockVacuum(ctx context.Context) {
	conn, err := pgx.Connect(ctx, s.Server.DSN(outboxName))
	if err != nil {
		return
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1`); err == nil {
		_, _ = conn.WaitForNotification(ctx)
	}
}
