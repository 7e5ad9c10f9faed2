package chaos

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// Whether an event without a row is routed takes a millisecond to find out. It is asked of such
// alone.
const selectOpen = `
SELECT format('delivery of event %s: attempt %s, due in %s, claimed by %s, blocked by %s, %s', event_id, attempts, next_attempt_at - now(), claimed_by, blocked_by, last_reason)
FROM outbox_delivery WHERE status = 'pending' AND event_id > (SELECT upto FROM chaos_aged)
UNION ALL SELECT format('range %s of relay %s, taken %s ago', seq, relay_id, now() - taken_at) FROM outbox_range WHERE ended_at IS NULL
UNION ALL SELECT format('event %s is not routed', id)
FROM (SELECT id FROM outbox o WHERE id > (SELECT upto FROM chaos_aged) AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id) OFFSET 0) o
WHERE NOT outbox_is_routed(id)`

// A replay counts its attempts from the beginning.
const selectEvents = `
SELECT o.id, o.idempotency_key, coalesce(o.ordering_key, ''), coalesce(d.status, ''), coalesce(format('%s-%s-%s', d.event_id, d.destination, d.claim), ''),
       CASE WHEN d.replay THEN (SELECT 1 + count(DISTINCT a.claim)::int FROM outbox_attempt a WHERE a.event_id = o.id AND outcome NOT IN ('delivered', 'hold')) ELSE coalesce(d.attempts, 0) END,
       coalesce((extract(epoch FROM d.delivered_at - $1) * 1000000)::bigint * 1000, 0), (extract(epoch FROM o.available_at - $1) * 1000000)::bigint * 1000
FROM outbox o LEFT JOIN outbox_delivery d ON d.event_id = o.id WHERE o.id > (SELECT upto FROM chaos_aged)`

const selectFailures = `
SELECT DISTINCT ON (event_id, destination, claim) idempotency_key, format('%s-%s-%s', event_id, destination, claim), coalesce(r.name, ''),
       (extract(epoch FROM started_at - $1) * 1000000)::bigint * 1000, (extract(epoch FROM started_at - $1) * 1000000)::bigint * 1000 + duration_ms * 1000000::bigint,
       coalesce(http_status, 0)::int, outcome = 'hold', outcome = 'retry'
FROM outbox_attempt a JOIN outbox o ON o.id = event_id LEFT JOIN chaos_relay r USING (relay_id)
WHERE outcome <> 'delivered' AND event_id > (SELECT upto FROM chaos_aged)
ORDER BY event_id, destination, claim, a.id DESC`

// selectTold selects what relays have noted as sent to the webhook.
const selectTold = `
SELECT rule, state, (extract(epoch FROM at - $1) * 1000000)::bigint * 1000
FROM (SELECT rule, subject, channel, first_sent_at AS sent_at, ended_sent_at AS ended_at FROM outbox_alert_notice
      UNION ALL
      SELECT rule, subject, n.channel, n.sent_at, n.ended_at
      FROM outbox_alert_past, jsonb_to_recordset(notices) AS n (channel text, sent_at timestamptz, ended_at timestamptz)) t,
     LATERAL (VALUES ('firing', sent_at), ('resolved', ended_at)) AS v (state, at)
WHERE subject = 'default' AND channel = 'webhook' AND at IS NOT NULL`

const selectEffects = `SELECT id, key, (extract(epoch FROM pg_xact_commit_timestamp(xmin) - $1) * 1000000)::bigint FROM effects WHERE key NOT LIKE '` + aged + `%'`

// selectWorked selects the effects of receivers that record events, with the commit of the record:
// that is what such a receiver answers for.
const selectWorked = `
SELECT id, key, coalesce((extract(epoch FROM pg_xact_commit_timestamp(p.xmin) - $1) * 1000000)::bigint, 0)
FROM effects LEFT JOIN processed_events p ON idempotency_key = key`

// selectUnworked selects the events that such receivers have recorded and not worked.
const selectUnworked = `
SELECT format('%s is %s after %s attempts, due in %s: %s', idempotency_key, processing_state, attempts, next_attempt_at - now(), last_error)
FROM inbox_events WHERE processing_state NOT IN ('succeeded', 'ignored')`

// slow is after how long a backlog that does not drain is shown.
const slow = 5 * time.Second

// drained waits until nothing is in flight.
func (s *stage) drained() {
	s.t.Helper()
	done := func(ctx context.Context) (bool, error) {
		sent, err := process.One[bool](ctx, s.outbox, `SELECT NOT EXISTS (`+selectOpen+`)`)
		if !sent || err != nil || !s.record {
			return sent, err
		}
		return process.One[bool](ctx, s.inbox, `SELECT NOT EXISTS (`+selectUnworked+`)`)
	}
	err := s.Poll(slow, "the backlog to drain", done)
	if err != nil {
		left := slices.Concat(all(s, s.outbox, selectOpen+` LIMIT 5`, pgx.RowTo[string]), all(s, s.inbox, selectUnworked+` LIMIT 5`, pgx.RowTo[string]))
		s.t.Logf("after %s there is still: %s", slow, strings.Join(left, "; "))
		err = s.Poll(drainPatience, "the backlog to drain", done)
	}
	if err != nil {
		s.t.Errorf("after %s: %v", drainPatience, s.Reason(err)) // the checker says what is left
	}
}

// tables reads what both databases hold.
func (s *stage) tables() history.Tables {
	began, begun, schedule := s.history.Began, s.history.Began, schedule
	if s.clockMoves { // times of the database say nothing then: effects are early enough, and deliveries late enough
		began, begun, schedule = began.Add(2*year), begun.Add(-2*year), nil
	}
	effects, worked := selectEffects, []history.Work(nil)
	if s.record {
		effects, worked = selectWorked, s.worked()
	}
	return history.Tables{
		Timeout: timeout, Schedule: schedule, RetryAfter: retryAfter, Repeats: s.repeats, Torn: s.torn, Worked: worked,
		Business:  all(s, s.outbox, `SELECT key FROM sales`, pgx.RowTo[string]),
		Told:      all(s, s.outbox, selectTold, pgx.RowToStructByPos[history.Told], began),
		Events:    all(s, s.outbox, selectEvents, pgx.RowToStructByPos[history.Event], begun),
		Failures:  all(s, s.outbox, selectFailures, pgx.RowToStructByPos[history.Failure], began),
		Reopened:  all(s, s.outbox, `SELECT what FROM chaos_reopened`, pgx.RowTo[string]),
		Open:      all(s, s.outbox, selectOpen+` LIMIT 20`, pgx.RowTo[string]),
		Processed: all(s, s.inbox, `SELECT idempotency_key FROM processed_events WHERE idempotency_key NOT LIKE '`+aged+`%'`, pgx.RowTo[string]),
		Effects: all(s, s.inbox, effects, func(row pgx.CollectableRow) (e history.Effect, err error) {
			var micros int64
			err = row.Scan(&e.Number, &e.Key, &micros)
			e.At = time.Duration(micros) * time.Microsecond
			return e, err
		}, began),
	}
}

func all[T any](s *stage, db *pgxpool.Pool, query string, row pgx.RowToFunc[T], args ...any) []T {
	s.t.Helper()
	rows, _ := db.Query(s.t.Context(), query, args...) // its error comes with the rows
	found, err := pgx.CollectRows(rows, row)
	s.must(err)
	return found
}
