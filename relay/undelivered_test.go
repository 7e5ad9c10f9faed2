package relay

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// load adds n events without deliveries, as a load with triggers disabled does, and returns their ids.
func (db *database) load(n int, prefix string) (ids []int64) {
	db.Helper()
	db.exec(`ALTER TABLE outbox DISABLE TRIGGER outbox_fan_out`)
	defer db.exec(`ALTER TABLE outbox ENABLE TRIGGER outbox_fan_out`)
	db.insert(n, prefix)
	return rows[int64](db, `SELECT id FROM outbox WHERE idempotency_key LIKE $1 || '-%' ORDER BY id`, prefix)
}

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
	ids := db.load(2, "loaded")
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

// A search looks at a bounded number of events, the new ones first, goes on where any relay has stopped, and comes by all
// of them again and again.
func TestSearchOfUndeliveredGoesOn(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, func(w http.ResponseWriter, _ request) { w.WriteHeader(http.StatusNoContent) })
	relays := []*Relay{looking(t, db.config(to(rc.URL))), looking(t, db.config(to(rc.URL)))}
	db.insert(30, "old")
	old := db.load(2, "lost")
	db.insert(30, "newer")
	recent := db.load(1, "fresh")
	db.insert(5, "newest")
	search := func(i int) []int64 {
		t.Helper()
		_, err := relays[i%2].store.searchUndelivered(t.Context(), 0, 10)
		must(t, err)
		return rows[int64](db, `SELECT unnest(missing) FROM outbox_undelivered`)
	}
	if got := search(0); !slices.Equal(got, recent) {
		t.Errorf("the first search found %d, want the newest, %d", got, recent)
	}
	i := 1
	for ; len(search(i)) < 3; i++ {
		if i > 7 {
			t.Fatal("the walk through all events does not go on")
		}
	}
	if got, want := search(i), slices.Concat(old, recent); !slices.Equal(got, want) {
		t.Errorf("found %d, want %d", got, want)
	}

	db.exec(`DELETE FROM outbox WHERE id = $1`, old[0]) // of an operator
	db.exec(`INSERT INTO outbox_delivery (event_id, destination) VALUES ($1, 'default')`, old[1])
	if got := search(i); !slices.Equal(got, recent) {
		t.Errorf("still found: %d, want %d", got, recent)
	}
	many := db.load(watch.MaxUndelivered+50, "many")
	for range 1 + len(many)/10 {
		search(0)
	}
	got := rows[int](db, `SELECT cardinality(missing) FROM outbox_undelivered`)
	text := (&watch.UndeliveredSample{Count: got[0], Event: recent[0]}).String()
	if got[0] != watch.MaxUndelivered+1 || !strings.HasPrefix(text, "more than 1000 events have no delivery") {
		t.Errorf("%d remembered: %s", got, text)
	}
}
