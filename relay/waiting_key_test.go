package relay

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// keyedBehind adds an event that waits, and n due ones of its key behind it, due for that long.
func (db *database) keyedBehind(key string, until string, n int, due time.Duration) (head int64) {
	db.Helper()
	head = row[int64](db, `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		VALUES ('t', '{}', $1 || '-head', $1, now() + interval '1 day') RETURNING id`, key)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 't', '{}', $1 || '-' || i, $1 FROM generate_series(1, $2) i`, key, n)
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - make_interval(secs => $2) WHERE event_id > $1`, head, due.Seconds())
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = $2::text::timestamptz WHERE event_id = $1`, head, until)
	return head
}

// An event that is scheduled for the year 9998, as one from before the table refused it, holds up its key and says so: which
// destination, which key, which event, until when. What waits behind it is no lag of the destination.
func TestSecurityKeyBlockedFromTheFutureIsAlerted(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	ops := &pager{name: "ops"}
	cfg := db.config(to(rc.URL))
	cfg.Alerts = alert.Config{Channels: []alert.Channel{ops}, LagOver: time.Second}
	cfg.Watching.Interval = 100 * time.Millisecond
	db.unruled()
	head := row[int64](db, `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		VALUES ('t', '{}', 'head', 'customer-7', '9998-12-31 12:00:00+00') RETURNING id`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'behind', 'customer-7')`)
	start(t, cfg)

	ops.await(t, alert.RuleWaitingKeys, "firing")
	want := fmt.Sprintf(`key "customer-7" behind event %d, until 9998-12-31 12:00:00 UTC. Look further: outbox-relay events show %d`, head, head)
	if text := ops.of(alert.RuleWaitingKeys)[0].Text(); !strings.HasPrefix(text, `Ordering keys of "default" wait: 1 key waits behind a delivery that was not due`) || !strings.HasSuffix(text, want) {
		t.Errorf("told: %s", text)
	}
	if got := ops.heard(); !slices.Equal(got, []string{"waiting_keys firing"}) {
		t.Errorf("told: %q", got)
	}
	db.exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE event_id = $1`, head)
	becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = 'waiting_keys' AND resolved_at IS NOT NULL`)
}

// What a look says of keys that wait: only of those whose waiting is too long and is not the fault of a delivery that itself
// waits for too long.
func TestWaitingKeysAreTold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(*database)
		waiting int
		lags    bool
		about   string // key and until
	}{
		"nothing behind the head": {prepare: func(db *database) { db.keyedBehind("k", "2098-01-01", 0, 0) }},
		"not for long":            {prepare: func(db *database) { db.keyedBehind("k", "2098-01-01", 2, time.Minute) }},
		"for long":                {func(db *database) { db.keyedBehind("k", "2098-01-01", 2, time.Hour) }, 1, false, "k 2098-01-01 00:00:00"},
		"a year beyond 9999":      {func(db *database) { db.keyedBehind("k", "12098-01-01", 2, time.Hour) }, 1, false, "k 12098-01-01 00:00:00"},
		"two keys, the oldest is named": {func(db *database) {
			db.keyedBehind("b", "2098-01-01", 900, time.Hour)
			db.keyedBehind("a", "2099-01-01", 2, 2*time.Hour)
		}, 2, false, "a 2099-01-01 00:00:00"},
		"more behind it than are looked through": {func(db *database) {
			db.keyedBehind("k", "2098-01-01", 1200, time.Hour)
		}, 1, true, "k 2098-01-01 00:00:00"},
		"a head that is being retried": {func(db *database) {
			head := db.keyedBehind("k", "2098-01-01", 2, time.Hour)
			db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute', attempts = 4 WHERE event_id = $1`, head)
		}, 1, false, "k "},
		"a head that lags itself": {prepare: func(db *database) {
			head := db.keyedBehind("k", "2098-01-01", 2, time.Hour)
			db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '2 hours' WHERE event_id = $1`, head)
		}, lags: true},
		"a replay of the head": {func(db *database) {
			head := db.keyedBehind("k", "2098-01-01", 2, time.Hour)
			db.exec(`UPDATE outbox_delivery SET replay = true WHERE event_id = $1`, head)
		}, 1, false, "k 2098-01-01 00:00:00"},
		"behind several, the last of which is named": {func(db *database) {
			db.keyedBehind("k", "2097-01-01", 0, 0)
			db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'next', 'k')`)
			db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'last', 'k')`)
			db.exec(`UPDATE outbox_delivery SET next_attempt_at = '2098-01-01' WHERE event_id = 2`)
			db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour' WHERE event_id = 3`)
		}, 1, false, "k 2098-01-01 00:00:00"},
		"another destination's head": {prepare: func(db *database) {
			head := db.keyedBehind("k", "2098-01-01", 2, time.Hour)
			db.exec(`UPDATE outbox_delivery SET destination = 'other' WHERE event_id = $1`, head)
		}, lags: true},
		"behind a failed one": {prepare: func(db *database) {
			head := db.keyedBehind("k", "2098-01-01", 2, time.Hour)
			db.exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = $1`, head)
		}},
		"thousands of scheduled ones without anything behind them": {func(db *database) {
			db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
				SELECT 't', '{}', 'scheduled-' || i, i % 100, now() + interval '300 days' FROM generate_series(1, 3000) i`)
			db.keyedBehind("k", "2098-01-01", 2, time.Hour)
		}, 1, false, "k 2098-01-01 00:00:00"},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 4)
			t.Parallel()
			db := newDatabase(t)
			c.prepare(db)
			r := looking(t, db.config(to("http://receiver.test/")))
			must(t, r.watcher.Look(t.Context()))
			open := rows[string](db, `SELECT rule FROM outbox_alert ORDER BY rule`)
			if slices.Contains(open, alert.RuleLag) != c.lags || slices.Contains(open, alert.RuleWaitingKeys) != (c.waiting > 0) {
				t.Errorf("alerts: %q", open)
			}
			w, _ := r.watcher.Recent()
			var lane watch.LaneWatch
			for _, l := range w.Lanes {
				if l.Destination == "default" {
					lane = l
				}
			}
			about := row[string](db, `SELECT coalesce(string_agg((l ->> 'waiting_key') || ' ' || (l ->> 'waiting_until'), ''), '')
				FROM outbox_watch, jsonb_array_elements(sample -> 'lanes') l WHERE (l ->> 'waiting')::int > 0`)
			if lane.WaitingKeys != c.waiting || about != c.about || (lane.WaitingFor > 0) != (c.waiting > 0) {
				t.Errorf("%+v, of %q; want %d, of %q", lane, about, c.waiting, c.about)
			}
		})
	}
}
