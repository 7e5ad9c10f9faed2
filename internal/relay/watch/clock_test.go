package watch

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A database whose clock was set back is watched at once, and not when the clock has caught up: new
// conditions are alerted, and what was opened before is ended.
func TestClockIsSetBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	w.Config = func() Config { return Config{Interval: time.Hour}.WithDefaults() }
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')`)
	db.Exec(`UPDATE outbox_alert SET last_at = now() + interval '1 hour'`)
	db.Exec(`UPDATE outbox_watch SET watched_at = now() + interval '1 hour', sample = '{}'`)
	db.Exec(`DELETE FROM outbox_route`)
	db.Insert(1, "parked")
	look(t, w)
	wantAlerts(db, alert.RuleParked)
	if !relaytest.Row[bool](db, `SELECT watched_at <= now() FROM outbox_watch`) {
		t.Error("the next look waits for the clock")
	}
}

// A failure is noted at the time at which its transaction began. One that commits after a look is
// no part of that look, even if it began before: its alert stays.
func TestAlertThatIsNotedDuringALookStays(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	db.Exec(`INSERT INTO outbox_alert (rule, subject, last_at) VALUES ('failed', 'default', now() - interval '1 minute')`)
	settles := db.Begin()
	_, err := settles.Exec(t.Context(), `SELECT now()`)
	relaytest.Must(t, err)
	seen, err := w.take(t.Context(), 0, nil, terms{})
	relaytest.Must(t, err)
	hold, ended := seen.conditions(w.Alerts(), nil)
	if len(ended) != 1 {
		t.Fatalf("ended: %+v", ended)
	}
	_, err = settles.Exec(t.Context(), `UPDATE outbox_alert SET last_at = now(), count = count + 1`)
	relaytest.Must(t, err)
	relaytest.Must(t, settles.Commit(t.Context()))
	relaytest.Must(t, w.applyConditions(t.Context(), hold, ended))
	wantAlerts(db, alert.RuleFailed)
	look(t, w) // there is no failed delivery in this test
	wantAlerts(db)
}

// What all relays hold refuses no relay alone, whatever a relay notes at the same moment.
func TestHeldDestinationRefusesNoRelayAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	db.Exec(`UPDATE outbox_relay_destination SET refused_at = now() - interval '1 hour', refused_error = '401 Unauthorized'`)
	db.Serve("default")
	refusals := func() int {
		list, err := Refusals(t.Context(), db.Pool)
		relaytest.Must(t, err)
		return len(list)
	}
	testkit.Equal(t, "refusals", refusals(), 1)
	db.Exec(`INSERT INTO outbox_destination (destination) VALUES ('default') ON CONFLICT DO NOTHING`)
	db.Exec(`UPDATE outbox_destination SET breaker = 'open', breaker_opened_at = now(), breaker_until = now()`)
	testkit.Equal(t, "refusals of a held destination", refusals(), 0)
}
