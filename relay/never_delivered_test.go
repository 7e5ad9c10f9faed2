package relay

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A new destination with a wrong secret or path is alerted after its second failure, and not when its deliveries fail for good, half a
// day later. One that has accepted something before is not: what is retried may be over soon.
func TestDestinationThatNeverDeliveredIsAlerted(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, c := range map[string]struct {
		status    int
		delivered bool // an event before
		alerted   bool
	}{
		"401":                        {http.StatusUnauthorized, false, true},
		"403":                        {http.StatusForbidden, false, true},
		"404":                        {http.StatusNotFound, false, true},
		"500":                        {http.StatusInternalServerError, false, false},
		"401 where one was accepted": {http.StatusUnauthorized, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			refusing := newReceiver(t, func(w http.ResponseWriter, r request) {
				if !strings.HasPrefix(r.key, "accepted") {
					w.WriteHeader(c.status)
				}
			})
			cfg := db.config(to(refusing.URL))
			cfg.Destinations[0].Retry.Schedule = []time.Duration{10 * time.Millisecond, time.Hour}
			r := start(t, cfg)
			if c.delivered {
				db.insert(1, "accepted")
				r.settles(t, policy.Delivered, 1)
			}
			db.insert(1, "refused")
			becomes(db, 2, `SELECT max(attempts) FROM outbox_delivery WHERE status = 'pending'`)
			watcher := looking(t, cfg)
			must(t, watcher.watcher.Look(t.Context()))
			const found = `SELECT count(*) FROM outbox_alert WHERE rule = $1 AND resolved_at IS NULL`
			if got := row[int](db, found, alert.RuleNeverDelivered); (got == 1) != c.alerted {
				t.Fatalf("%d alerts", got)
			}
			if !c.alerted {
				return
			}
			if detail := row[string](db, `SELECT detail FROM outbox_alert`); !strings.HasPrefix(detail, "2 attempts that failed, the first of event ") || !strings.Contains(detail, http.StatusText(c.status)) {
				t.Errorf("the alert says %q", detail)
			}
			db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE status = 'pending'`)
			must(t, watcher.watcher.Look(t.Context()))
			if got := row[int](db, found, alert.RuleNeverDelivered); got != 0 {
				t.Error("the alert goes on after the first delivery")
			}
		})
	}
}
