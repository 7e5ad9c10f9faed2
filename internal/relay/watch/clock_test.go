package watch

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
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
