package watch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Only one of many relays looks; the others know what it saw, and all stand down for the same
// reason.
func TestOneRelayLooksForAll(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	pool := enginePool(t, db.DSN)
	var relays []*Watcher
	for range 3 {
		w := newWatcher(t, pool, alert.Config{})
		w.Config = func() Config { return Config{Interval: time.Hour, DeadTuples: 1}.WithDefaults() }
		relays = append(relays, w)
	}
	db.Exec(`CREATE TABLE looks (n int); CREATE FUNCTION note_look() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS
		$$ BEGIN INSERT INTO looks VALUES (1); RETURN NEW; END $$;
		CREATE TRIGGER note_look BEFORE UPDATE ON outbox_watch FOR EACH ROW EXECUTE FUNCTION note_look()`)
	var looking sync.WaitGroup
	for _, w := range relays {
		testkit.Equal(t, "pressure before the first sample", w.Pressure(), "")
		looking.Go(func() {
			for range 10 {
				if err := w.Look(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	looking.Wait()
	testkit.Equal(t, "looks", relaytest.Row[int](db, `SELECT count(*) FROM looks`), 1)
	db.Exec(`UPDATE outbox_watch SET sample = jsonb_set(sample, '{dead}', '{"outbox_delivery": 2}')`)
	for _, w := range relays {
		look(t, w)
		testkit.Equal(t, "pressure", w.Pressure(), "table outbox_delivery has 2 dead rows, which VACUUM has yet to remove")
	}
}

// Each condition that a look finds in the database opens one alert, and ends it.
func TestEachRuleOpensAndEnds(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	db.Insert(1, "lags")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'head', 'k'), ('t', '{}', 'blocked', 'k')`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 h', status = CASE event_id WHEN 2 THEN 'failed' ELSE 'pending' END`)
	db.Exec(`UPDATE outbox_route SET destination = 'old'`)
	db.Insert(1, "unserved")
	db.Exec(`DELETE FROM outbox_route`)
	db.Insert(1, "parked")
	db.Exec(`INSERT INTO outbox_rescue (relay_id) VALUES (1), (2), (3)`)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('forgotten', 'forgotten')`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('forgotten', '{}', 'forgotten'); DELETE FROM outbox_route`)
	db.Exec(`INSERT INTO outbox_relay_destination (relay_id, destination) SELECT id, 'forgotten' FROM outbox_relay`)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at, paused_reason) VALUES ('forgotten', true, now() - interval '5 hours', 'maintenance')
		ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = excluded.paused_at, paused_reason = excluded.paused_reason`)
	blocker := db.Begin()
	_, err := blocker.Exec(t.Context(), `SELECT pg_current_xact_id()`)
	relaytest.Must(t, err)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{VacuumBlockedOver: time.Nanosecond})
	rules := []string{alert.RuleBlockedKeys, alert.RuleLag, alert.RuleParked, alert.RulePaused, alert.RuleRescueStorm, alert.RuleUnserved, alert.RuleVacuumBlocked}
	for range 2 {
		look(t, w)
		wantAlerts(db, rules...)
	}
	if got := relaytest.Row[string](db, `SELECT detail || ', ' || date_trunc('hour', now() - opened_at) FROM outbox_alert WHERE rule = 'paused'`); got != "for 5h0m (maintenance), 05:00:00" {
		t.Error(got)
	}
	if later := relaytest.Rows[string](db, `SELECT rule FROM outbox_alert WHERE began_at > opened_at`); len(later) > 0 {
		t.Errorf("%q are said to have begun after they were open", later)
	}
	relaytest.Must(t, blocker.Rollback(t.Context()))
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded'; DELETE FROM outbox_rescue`)
	look(t, w)
	wantAlerts(db)
	testkit.Equal(t, "alerts", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert`), len(rules))
}

// Relays of one name that could not read their configuration have an alert each.
func TestRelaysOfOneNameHaveAnAlertEach(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (id, name, version, reload_error, reload_failed_at) OVERRIDING SYSTEM VALUE
		VALUES (1, 'vm', '1', 'no url', now()), (2, 'vm', '1', 'no url', now())`)
	look(t, newWatcher(t, enginePool(t, db.DSN), alert.Config{}))
	testkit.Equal(t, "alerts of", relaytest.Row[string](db, `SELECT string_agg(subject, ', ' ORDER BY subject) FROM outbox_alert WHERE rule = 'reload_refused'`), "vm (id 1), vm (id 2)")
}

// A session that waits for a lock on the outbox is a reason to stand down.
func TestLockWaitsAreSeen(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "locked")
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	locker := db.Begin()
	_, err := locker.Exec(t.Context(), `SELECT FROM outbox_delivery FOR UPDATE`)
	relaytest.Must(t, err)
	var waiting sync.WaitGroup
	waiting.Go(func() { db.Exec(`UPDATE outbox_delivery SET last_error = 'x'`) })
	relaytest.Eventually(t, "the session that waits", func() bool {
		look(t, w)
		return w.Pressure() == "1 session waits for locks on the outbox's tables"
	})
	relaytest.Must(t, locker.Rollback(t.Context()))
	waiting.Wait()
	look(t, w)
	testkit.Equal(t, "pressure", w.Pressure(), "")
}

// Events that a load left without deliveries are found by a watcher that runs, and alerted until
// they have deliveries.
func TestRunFindsEventsWithoutDeliveries(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "before")
	ids := db.Load(2, "loaded")
	db.Insert(3, "after")
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now()`)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	w.Config = func() Config { return Config{Interval: 10 * time.Millisecond}.WithDefaults() }
	due := make(chan struct{}, 1)
	w.Due = func() {
		select {
		case due <- struct{}{}:
		default:
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { w.Run(ctx) })

	<-due
	if seen, ok := w.Recent(); !ok || seen.Undelivered != 2 {
		t.Errorf("%d events without deliveries were seen", seen.Undelivered)
	}
	want := fmt.Sprintf("%d 2 events have no delivery, the first of them event %[1]d: no relay takes them for new, as their rows were loaded from another server or their deliveries deleted; "+
		"create what is missing: outbox-relay events create-deliveries", ids[0])
	testkit.Equal(t, "the alert", relaytest.Row[string](db, `SELECT first_event_id || ' ' || detail FROM outbox_alert WHERE rule = 'undelivered'`), want)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, status) SELECT unnest($1::bigint[]), 'default', 'discarded'`, ids)
	relaytest.Becomes(db, true, `SELECT resolved_at IS NOT NULL FROM outbox_alert`)
}

// The alert of a breaker ends when its destination was removed, and says so, and not while anything
// leads there or a relay may be replaced; or when the breaker has been closed for a while, as an
// operator's reset leaves it.
func TestAlertOfARemovedDestinationIsResolved(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "stays", "goes")
	db.Insert(1, "k")
	db.Serve("stays", "goes")
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until) SELECT d, 'open', now(), now() FROM unnest(ARRAY['stays', 'goes']) d`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('breaker_open', 'stays'), ('breaker_open', 'goes')`)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	for _, step := range []struct{ change, open string }{
		{`SELECT 1`, "goes stays"},
		{`DELETE FROM outbox_route WHERE destination = 'goes'`, "goes stays"},
		{`DELETE FROM outbox_relay_destination WHERE destination = 'goes'`, "goes goes stays"}, // unserved, too
		{`UPDATE outbox_alert SET opened_at = opened_at - interval '11 seconds' WHERE rule = 'unserved'`, "goes stays"},
		{`UPDATE outbox_delivery SET status = 'discarded' WHERE destination = 'goes'`, "stays"},
		{`UPDATE outbox_destination SET breaker = 'closed', breaker_opened_at = NULL, breaker_until = NULL, breaker_failures = 1`, "stays"},
		{`UPDATE outbox_alert SET last_at = now() - interval '11 seconds'`, "stays"}, // what waits may be under way
		{`UPDATE outbox_alert SET opened_at = now() - interval '2 minutes', last_at = now() - interval '61 seconds'`, ""},
	} {
		db.Exec(step.change)
		look(t, w)
		if got := relaytest.Row[string](db, `SELECT coalesce(string_agg(subject, ' ' ORDER BY subject), '') FROM outbox_alert WHERE resolved_at IS NULL`); got != step.open {
			t.Errorf("after %s: open are %s, want %s", step.change, got, step.open)
		}
	}
	testkit.Equal(t, "why it ended", relaytest.Row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'breaker_open' AND subject = 'goes'`), "it was removed, no running relay has it")
	// The hold has lasted until the reset.
	testkit.Equal(t, "seconds", relaytest.Row[int](db, `SELECT extract(epoch FROM resolved_at - opened_at)::int FROM outbox_alert WHERE subject = 'stays'`), 59)
}

// A destination with a wrong secret or path is alerted after its second failure, or after the third
// of one event where others arrived before; and not when its deliveries fail for good, half a day
// later. One that accepts others meanwhile is not.
func TestMisconfiguredDestinationIsAlerted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason    string
		attempts  int
		delivered string // when an event before was; empty: not
		alerted   bool
	}{
		"401":                              {"unauthorized", 2, "", true},
		"404":                              {"not_found", 2, "", true},
		"500":                              {"server_error", 2, "", false},
		"401 where one was accepted":       {"unauthorized", 2, "-1 h", false},
		"401 for long, after one accepted": {"unauthorized", 3, "-1 h", true},
		"401 for long, and one accepted":   {"unauthorized", 3, "1 s", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Serve("default")
			db.Insert(2, "k")
			if c.delivered != "" {
				db.Settled("delivered", "event_id = 1")
				db.Exec(`UPDATE outbox_delivery SET delivered_at = now() + $1::text::interval WHERE event_id = 1`, c.delivered)
			}
			db.Exec(`UPDATE outbox_delivery SET attempts = $2, last_reason = $1, last_error = 'refused', last_attempt_at = now(), next_attempt_at = now() + interval '1 h' WHERE event_id = 2`, c.reason, c.attempts)
			db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason)
				SELECT 2, i, now() - make_interval(secs => 60 * ($2 - i)), 1, i, 1, 'default', 'retry', $1 FROM generate_series(1, $2) i`, c.reason, c.attempts)
			w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
			look(t, w)
			if !c.alerted {
				wantAlerts(db)
				return
			}
			wantAlerts(db, alert.RuleMisconfigured)
			testkit.Equal(t, "the alert", relaytest.Row[string](db, `SELECT detail FROM outbox_alert`), fmt.Sprintf("%d attempts that failed, the first of event 2; last: refused", c.attempts))
			testkit.Equal(t, "minutes since its beginning", relaytest.Row[int](db, `SELECT floor(extract(epoch FROM now() - opened_at) / 60)::int FROM outbox_alert`), c.attempts-1)
			db.Settled("delivered", "event_id = 2")
			look(t, w)
			wantAlerts(db)
		})
	}
}

// A destination that accepts nothing for ten minutes is alerted, also if what it answers never
// counts as an outage. One that accepts others meanwhile is not, whether that is known from the
// history or from the events themselves.
func TestDestinationThatAcceptsNothingIsAlerted(t *testing.T) {
	t.Parallel()
	const none = time.Duration(0)
	for name, c := range map[string]struct {
		events             int           // that are retried
		began              time.Duration // ago, of their attempts
		delivered, history time.Duration // ago, of another event, and by the history
		lasted             int           // minutes; 0: no alert
	}{
		"one event":                               {1, 11 * time.Minute, none, none, 11},
		"not for long":                            {3, 9 * time.Minute, none, none, 0},
		"after others were accepted":              {1, 11 * time.Minute, time.Hour, time.Hour, 11},
		"one fails, others are accepted":          {1, time.Hour, 15 * time.Minute, none, 0},
		"and the history knows it":                {1, time.Hour, none, 15 * time.Minute, 0},
		"one was accepted lately":                 {3, time.Hour, time.Minute, none, 0},
		"several were attempted since the latest": {3, time.Hour, 15 * time.Minute, none, 15},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Serve("default")
			db.Insert(1+c.events, "")
			db.Settled("delivered", "event_id = 1")
			db.Exec(`UPDATE outbox_delivery SET delivered_at = now() - make_interval(secs => $1) WHERE event_id = 1 AND $1::float8 > 0`, c.delivered.Seconds())
			db.Exec(`DELETE FROM outbox_delivery WHERE event_id = 1 AND $1::float8 = 0`, c.delivered.Seconds())
			db.Exec(`INSERT INTO outbox_history (step, destination, at, event_type, delivered, failed, retried, probes, took, latency) SELECT 1, 'default', now() - make_interval(secs => $1 + 60), '', 5, 0, 0, 0, '{}', '{}' WHERE $1::float8 > 0`, c.history.Seconds())
			db.Exec(`UPDATE outbox_delivery SET attempts = 4, last_reason = 'rate_limited', last_error = '429 Too Many Requests', last_attempt_at = now() - interval '1 minute',
				next_attempt_at = now() + interval '1 h' WHERE event_id > 1`)
			db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason)
				SELECT e, i, now() - make_interval(secs => $2), 1, i, 1, 'default', 'retry', 'rate_limited' FROM generate_series(2, 1 + $1::int) e, generate_series(1, 4) i`, c.events, c.began.Seconds())
			w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
			look(t, w)
			if c.lasted == 0 {
				wantAlerts(db)
				return
			}
			wantAlerts(db, alert.RuleFailing)
			testkit.Equal(t, "the alert", relaytest.Row[string](db, `SELECT detail FROM outbox_alert`),
				fmt.Sprintf("for %dm, and %d attempts failed, the first of event 2; last: 429 Too Many Requests", c.lasted, 4*c.events))
			testkit.Equal(t, "minutes since its beginning", relaytest.Row[int](db, `SELECT floor(extract(epoch FROM now() - opened_at) / 60)::int FROM outbox_alert`), c.lasted)
			db.Settled("delivered", "event_id > 1")
			look(t, w)
			wantAlerts(db)
		})
	}
}

// keyedBehind adds an event that waits until a time, and n due ones of its key behind it, due for
// that long and marked as a relay does.
func keyedBehind(db *relaytest.Database, key string, until string, n int, due time.Duration) (head int64) {
	db.Helper()
	head = relaytest.Row[int64](db, `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		VALUES ('t', '{}', $1 || '-head', $1, now() + interval '1 day') RETURNING id`, key)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 't', '{}', $1 || '-' || i, $1 FROM generate_series(1, $2) i`, key, n)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - make_interval(secs => $2), blocked_by = $1 WHERE event_id > $1`, head, due.Seconds())
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = $2::text::timestamptz WHERE event_id = $1`, head, until)
	return head
}

// An event that is scheduled for the year 9998, as one from before the table refused it, holds up
// its key and says so: which destination, which key, which event, until when. What waits behind it
// is no lag of the destination.
func TestSecurityKeyBlockedFromTheFutureIsAlerted(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	head := keyedBehind(db, "customer-7", "9998-12-31 12:00:00+00", 1, time.Hour)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	look(t, w)
	wantAlerts(db, alert.RuleWaitingKeys)
	detail := relaytest.Row[string](db, `SELECT detail FROM outbox_alert WHERE subject = 'default' AND first_event_id = $1`, head)
	want := fmt.Sprintf(`: key "customer-7" behind event %d, until 9998-12-31 12:00:00 UTC`, head)
	if !strings.HasPrefix(detail, "1 key waits behind a delivery that was not due, the oldest for ") || !strings.HasSuffix(detail, want) {
		t.Errorf("the alert says %q", detail)
	}
	db.Exec(`UPDATE outbox_delivery SET status = CASE event_id WHEN $1 THEN 'discarded' ELSE status END, blocked_by = NULL`, head)
	look(t, w)
	wantAlerts(db) // nothing has lagged so far
	for range 3 {
		lookLater(db, w)
	}
	wantAlerts(db, alert.RuleLag)
}

// What a look says of keys that wait: only of those whose waiting is too long and is not caused by
// a delivery that itself waits for too long.
func TestWaitingKeysAreAlerted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(*relaytest.Database)
		waiting int
		lags    bool
		about   string // key and until
	}{
		"nothing behind the head": {prepare: func(db *relaytest.Database) { keyedBehind(db, "k", "2098-01-01", 0, 0) }},
		"not for long":            {prepare: func(db *relaytest.Database) { keyedBehind(db, "k", "2098-01-01", 2, time.Minute) }},
		"for long":                {func(db *relaytest.Database) { keyedBehind(db, "k", "2098-01-01", 2, time.Hour) }, 1, false, "k 2098-01-01 00:00:00"},
		"a year beyond 9999":      {func(db *relaytest.Database) { keyedBehind(db, "k", "12098-01-01", 2, time.Hour) }, 1, false, "k 12098-01-01 00:00:00"},
		"two keys, the oldest is named": {func(db *relaytest.Database) {
			keyedBehind(db, "b", "2098-01-01", 900, time.Hour)
			keyedBehind(db, "a", "2099-01-01", 2, 2*time.Hour)
		}, 2, false, "a 2099-01-01 00:00:00"},
		"many behind it": {func(db *relaytest.Database) {
			keyedBehind(db, "k", "2098-01-01", 1200, time.Hour)
		}, 1, false, "k 2098-01-01 00:00:00"},
		"a head that is being retried": {func(db *relaytest.Database) {
			head := keyedBehind(db, "k", "2098-01-01", 2, time.Hour)
			db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute', attempts = 4 WHERE event_id = $1`, head)
		}, 1, false, "k "},
		"a head that lags itself": {prepare: func(db *relaytest.Database) {
			head := keyedBehind(db, "k", "2098-01-01", 2, time.Hour)
			db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '2 hours' WHERE event_id = $1`, head)
		}, lags: true},
		"a replay of the head": {func(db *relaytest.Database) {
			head := keyedBehind(db, "k", "2098-01-01", 2, time.Hour)
			db.Exec(`UPDATE outbox_delivery SET replay = true WHERE event_id = $1`, head)
		}, 1, false, "k 2098-01-01 00:00:00"},
		"behind several, the first of which is named": {func(db *relaytest.Database) {
			keyedBehind(db, "k", "2097-01-01", 2, time.Hour)
			db.Exec(`UPDATE outbox_delivery SET next_attempt_at = '2098-01-01' WHERE event_id = 2`)
		}, 1, false, "k 2097-01-01 00:00:00"},
		"another destination's head": {prepare: func(db *relaytest.Database) {
			head := keyedBehind(db, "k", "2098-01-01", 2, time.Hour)
			db.Exec(`UPDATE outbox_delivery SET destination = CASE event_id WHEN $1 THEN 'other' ELSE destination END, blocked_by = NULL`, head)
		}, lags: true},
		"behind a failed one": {prepare: func(db *relaytest.Database) {
			head := keyedBehind(db, "k", "2098-01-01", 2, time.Hour)
			db.Exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = $1`, head)
		}},
		"thousands of scheduled ones without anything behind them": {func(db *relaytest.Database) {
			db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
				SELECT 't', '{}', 'scheduled-' || i, i % 100, now() + interval '300 days' FROM generate_series(1, 3000) i`)
			keyedBehind(db, "k", "2098-01-01", 2, time.Hour)
		}, 1, false, "k 2098-01-01 00:00:00"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			c.prepare(db)
			db.Serve("default", "other")
			w := look(t, newWatcher(t, enginePool(t, db.DSN), alert.Config{}))
			open := relaytest.Rows[string](db, `SELECT rule FROM outbox_alert`)
			if slices.Contains(open, alert.RuleLag) != c.lags || slices.Contains(open, alert.RuleWaitingKeys) != (c.waiting > 0) {
				t.Errorf("alerts: %q", open)
			}
			var lane LaneWatch
			for _, l := range w.Lanes {
				if l.Destination == "default" {
					lane = l
				}
			}
			about := relaytest.Row[string](db, `SELECT coalesce(string_agg((l ->> 'waiting_key') || ' ' || (l ->> 'waiting_until'), ''), '')
				FROM outbox_watch, jsonb_array_elements(sample -> 'lanes') l WHERE (l ->> 'waiting')::int > 0`)
			if lane.WaitingKeys != c.waiting || about != c.about || (lane.WaitingFor > 0) != (c.waiting > 0) {
				t.Errorf("%+v, of %q; want %d, of %q", lane, about, c.waiting, c.about)
			}
		})
	}
}
