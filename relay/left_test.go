package relay

import (
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A destination is removed from the configuration while its breaker is open. It is not tried any more, and its alert is
// resolved nevertheless; when it is back and still down, that is told.
func TestAlertOfARemovedDestinationIsResolved(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	db.exec(`DELETE FROM outbox_route`)
	down := newReceiver(t, status(http.StatusServiceUnavailable))
	stays, goes := to(newReceiver(t, nil).URL), to(down.URL)
	stays.Name, goes.Name = "stays", "goes"
	goes.Breaker.ProbeMax = time.Second
	ops := &pager{name: "ops"}
	with := db.config(stays, goes)
	with.Alerts = alert.Config{Channels: []alert.Channel{ops}, Window: time.Second}
	with.Watching.Interval = 100 * time.Millisecond
	without := with
	without.Destinations = []post.Destination{stays}
	without.Pool, with.Pool = settings(t, db.dsn), settings(t, db.dsn)

	r := start(t, with)
	r.instance()
	db.insert(30, "first")
	ops.await(t, alert.RuleBreakerOpen, "firing")
	db.exec(`UPDATE outbox_delivery SET status = 'discarded', claimed_by = NULL, lease_expires_at = NULL WHERE destination = 'goes' AND status <> 'delivered'`)
	if _, err := r.Reload(without); err != nil {
		t.Fatal(err)
	}
	ops.await(t, alert.RuleBreakerOpen, "resolved")
	if _, err := r.Reload(with); err != nil {
		t.Fatal(err)
	}
	db.insert(30, "second")
	eventually(t, "an alert again", func() bool {
		return slices.Equal(ops.states(alert.RuleBreakerOpen), []string{"firing", "resolved", "firing"})
	})
}
