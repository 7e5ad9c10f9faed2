package watch

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// An event that no relay takes makes the destinations lag that a route leads it to, and no others:
// for the look, for the alert and for the metrics. It is shown apart from what is pending.
func TestLagOfUnroutedEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route VALUES ('a', 'one'), ('*', 'all'), ('b', 'two')`)
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ($1, '{}', $2, now() - $3::interval, now() - $4::interval)`
	db.Exec(insert, "a", "old", "20 minutes", "20 minutes")
	db.Exec(insert, "a", "older", "30 minutes", "30 minutes")
	db.Exec(insert, "b", "not due", "1 hour", "-1 hour")
	db.Exec(insert, "c", "young", "5 minutes", "5 minutes")
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, next_attempt_at) VALUES (1, 'all', now() - interval '40 minutes'), (1, 'two', now() - interval '2 minutes'),
		(1, 'own', now() - interval '3 minutes')`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, replay) VALUES (2, 'replayed', now() - interval '2 hours', true)`)
	db.Serve("one", "all", "two", "own", "replayed")
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{LagOver: 10 * time.Minute})
	seen := look(t, w)
	if seen.Untaken != 4 || seen.UntakenFor < time.Hour || seen.UntakenFor > 2*time.Hour {
		t.Errorf("%d events are not taken, for %s", seen.Untaken, seen.UntakenFor)
	}
	lags := map[string]int{}
	for _, l := range seen.Lanes {
		lags[l.Destination] = int(l.Lag.Minutes())
	}
	want := map[string]int{"one": 30, "all": 40, "two": 2, "own": 3, "replayed": 0}
	for name, minutes := range want {
		if lags[name] < minutes || lags[name] > minutes+3 {
			t.Errorf("%q lags for %d minutes, want %d", name, lags[name], minutes)
		}
	}
	if len(lags) != len(want) {
		t.Errorf("lanes %v", lags)
	}
	testkit.Equal(t, "alerts", relaytest.Rows[string](db, `SELECT subject || ' ' || first_event_id FROM outbox_alert WHERE rule = 'lag' ORDER BY 1`), []string{"all 1", "one 2"})
	b, err := w.CountBacklog(t.Context(), []string{"one", "all", "two"}, 3)
	relaytest.Must(t, err)
	if b.Untaken != 3 || len(b.Lanes) != 3 || b.Lanes[0].Pending != 0 || b.Lanes[0].LagSeconds < 1800 || b.Lanes[1].LagSeconds < 2400 || b.Lanes[2].LagSeconds > 1800 {
		t.Errorf("%+v", b)
	}

	r, err := intake.TakeRange(t.Context(), w.DB, 1, intake.Terms{Events: 10}, false)
	relaytest.Must(t, err)
	lag := func(what string, least, most float64) {
		t.Helper()
		b, err := w.CountBacklog(t.Context(), []string{"one"}, 3)
		relaytest.Must(t, err)
		if got := b.Lanes[0].LagSeconds; got < least || got > most || b.Untaken != 0 {
			t.Errorf("%s: %+v", what, b)
		}
	}
	lag("in hand", 0, 0)
	db.Exec(`UPDATE outbox_range SET taken_at = now() - interval '11 seconds' WHERE seq = $1`, r.Seq)
	lag("both have deliveries", 0, 0)
	db.Exec(`DELETE FROM outbox_delivery WHERE event_id = 2`)
	lag("in hand for too long", 1800, 2400)
}

// What waits behind an earlier delivery of its ordering key is no lag, also while nothing has
// marked it yet: after its insert, and after each retry of its head. A head that is due is one.
func TestLagLeavesOutWhatItsKeyBlocks(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	add := func(id int, key, status string, due time.Duration) {
		db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, status, next_attempt_at)
			VALUES ($1, 'default', nullif($2, ''), $3, now() - make_interval(secs => $4))`, id, key, status, due.Seconds())
	}
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	var lenient []string
	w.Lenient = func() []string { return lenient }
	want := func(what string, minutes float64) {
		t.Helper()
		b, err := w.CountBacklog(t.Context(), []string{"default"}, 10)
		relaytest.Must(t, err)
		if got := b.Lanes[0].LagSeconds / 60; got < minutes || got > minutes+1 {
			t.Errorf("%s: a lag of %.1f minutes, want %.0f", what, got, minutes)
		}
	}
	add(1, "retried", "pending", -time.Hour)
	add(2, "retried", "pending", 50*time.Minute)
	add(3, "retried", "pending", 45*time.Minute)
	want("behind a head that is retried later", 0)
	add(4, "failed", "failed", time.Hour)
	add(5, "failed", "pending", 40*time.Minute)
	want("behind a failed one", 0)
	add(6, "", "pending", 10*time.Minute)
	want("one without a key", 10)
	add(7, "head", "pending", 15*time.Minute)
	add(8, "head", "pending", 30*time.Minute)
	want("a head that is due", 15)
	lenient = []string{"default"}
	want("where a failed one blocks nothing", 40)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '55 minutes' WHERE event_id = 1`)
	want("the head of the oldest is due", 55)
	db.Exec(`UPDATE outbox_delivery SET replay = true WHERE event_id = 1`)
	want("the head of the oldest is a replay", 40)
}

// What held a destination for an hour has not made it lag: the alert comes when its deliveries have
// waited for long enough after that, and says so. The lag itself is that of the delivery.
func TestLagIsAlertedOfWhatNothingHolds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		hold, free string
		away       bool // the database, or every relay
	}{
		"a breaker": {
			hold: `INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until) VALUES ('default', 'open', now(), now())`,
			free: `DELETE FROM outbox_destination`,
		},
		"a pause": {
			hold: `INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now())`,
			free: `UPDATE outbox_destination SET paused = false, paused_at = NULL`,
		},
		"a database that is away": {hold: `SELECT 1`, free: `SELECT 1`, away: true},
		"no relay":                {hold: `SELECT 1`, free: `UPDATE outbox_watch SET watched_at = now() - interval '1 hour'`, away: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Serve("default")
			w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
			w.Learnt = func() map[string]Learnt { return map[string]Learnt{"default": {"r1", 1, 64}} }
			look(t, w)
			db.Exec(c.hold)
			db.Insert(1, "k")
			db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour'`)
			for range 4 {
				w.interrupted.Store(c.away)
				lookLater(db, w)
			}
			db.Exec(c.free)
			if c.away {
				look(t, w)
			} else {
				lookLater(db, w) // it was held for a part of the time
			}
			for range 2 { // eight minutes
				lookLater(db, w)
				wantAlerts(db)
			}
			lookLater(db, w)
			wantAlerts(db, alert.RuleLag)
			want := `the oldest one that is due has waited for 1h0m (event 1), for 12m of it though nothing held it, longer than 10m; relay "r1" sends at most 1 request at once there, of 64 that it may, as timeouts, 503s or slow answers have taught it: a higher max_in_flight changes nothing`
			testkit.Equal(t, "the alert", relaytest.Row[string](db, `SELECT detail FROM outbox_alert`), want)
			testkit.Equal(t, "it began", relaytest.Row[int](db, `SELECT round(extract(epoch FROM now() - opened_at) / 60)::int FROM outbox_alert`), 12)
			db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute'`)
			look(t, w)
			wantAlerts(db)
		})
	}
}

// A receiver that asks to wait again and again, and takes too little between, holds nothing.
func TestLagIsAlertedOfWhatIsAskedToWait(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	look(t, w)
	db.Insert(1, "k")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour'`)
	for range 3 {
		db.Exec(`UPDATE outbox_relay_destination SET wait_until = now() + interval '40 seconds'`)
		wantAlerts(db)
		lookLater(db, w)
	}
	wantAlerts(db, alert.RuleLag)
}
