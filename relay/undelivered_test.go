package relay

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Events that a load left without deliveries are alerted; once they have been given them they arrive, and the alert ends.
func TestEventsWithoutDeliveriesAreToldAndRepaired(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	channel := &pager{name: "ops"}
	cfg := db.config(to(rc.URL))
	cfg.Routes = []Route{{Event: "t", To: []string{"default"}}}
	cfg.Alerts.Channels = []alert.Channel{channel}
	cfg.Watching.Interval = 100 * time.Millisecond
	db.insert(3, "before")
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 3)
	ids := db.plain().Load(2, "loaded")
	db.insert(3, "after")

	eventually(t, "the alert", func() bool { return len(channel.of(alert.RuleUndelivered)) == 1 })
	told := channel.of(alert.RuleUndelivered)[0]
	want := fmt.Sprintf("2 events have no delivery, the first of them event %d: the trigger of outbox did not run at the insert; "+
		"create what is missing: outbox-relay events create-deliveries", ids[0])
	if told.Detail != want || told.FirstEventID != ids[0] || !strings.Contains(told.Text(), want) {
		t.Errorf("%+v\n%s", told, told.Text())
	}
	found, err := ops.New(db.pool).Undelivered(t.Context())
	if err != nil || found != (ops.Undelivered{Events: 2, FirstEventID: ids[0]}) {
		t.Errorf("%+v, %v", found, err)
	}

	for _, want := range []ops.CreatedDeliveries{{Events: 2, Deliveries: 2}, {}} {
		if created, err := ops.New(db.pool).CreateDeliveries(t.Context()); err != nil || created != want {
			t.Errorf("created %+v, %v; want %+v", created, err, want)
		}
	}
	r.settles(t, policy.Delivered, 8)
	if keys := rc.keys(); len(keys) != 8 || !slices.Contains(keys, "loaded-1") || !slices.Contains(keys, "loaded-2") {
		t.Errorf("%q", keys)
	}
	becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = 'undelivered_events' AND resolved_at IS NOT NULL`)
}
