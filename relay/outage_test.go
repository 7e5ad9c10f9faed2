package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The database has committed the outcomes, and the acknowledgement is lost. They are written again,
// and must count once.
func TestLostAcknowledgementCountsOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer    int
		statement string
		want      string
	}{
		"delivered": {204, settle.WriteDelivered, "delivered 1 0"},
		"retry":     {500, settle.WriteRetry, "pending 1 1"},
		"failed":    {422, settle.WriteFailed, "failed 1 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			l := newLink(t, db.DSN)
			g := relaytest.NewGate(t)
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
				g.Pass(r)
				w.WriteHeader(c.answer)
			})
			db.Insert(1, "key")
			cfg := config(db, post.Destination{Name: "default", URL: rc.URL, Retry: policy.RetryPolicy{Schedule: []time.Duration{time.Hour}}})
			cfg.Pool = settings(t, l.dsn)
			r := start(t, cfg)
			<-g.Arrived
			l.holdFrom(c.statement)
			g.Open()
			relaytest.Becomes(db, 1, `SELECT attempts FROM outbox_delivery`)
			due := relaytest.Row[time.Time](db, `SELECT next_attempt_at FROM outbox_delivery`)
			l.block(true) // so that the answer is not merely late
			l.pass()
			r.await(t, "the failed settle", func(o *observer) bool { return o.failures["settle"] > 0 })
			l.block(false)
			r.await(t, "the settle", func(o *observer) bool {
				return o.outcomes[policy.Delivered]+o.outcomes[policy.Retry]+o.outcomes[policy.Fail] == 1
			})

			got := relaytest.Row[string](db, `SELECT concat_ws(' ', status, attempts, (SELECT count(*) FROM outbox_attempt)) FROM outbox_delivery`)
			if got != c.want || rc.Total() != 1 {
				t.Errorf("%s after %d requests, want %s", got, rc.Total(), c.want)
			}
			if again := relaytest.Row[time.Time](db, `SELECT next_attempt_at FROM outbox_delivery`); !again.Equal(due) {
				t.Errorf("the next attempt moved from %s to %s", due, again)
			}
			testkit.Equal(t, "failures alerted", relaytest.Row[int](db, `SELECT coalesce(sum(count), 0) FROM outbox_alert`), map[int]int{422: 1}[c.answer])
			// No other relay was there: nothing came too late.
			testkit.Equal(t, "outcomes are said to have come too late", sees(r.observer, func(o *observer) int { return o.stale }), 0)
		})
	}
}

// The database is out of reach, the relay lives on, finishes what it has, and
// continues by itself.
func TestRelayOutlivesItsDatabase(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	l := newLink(t, db.DSN)
	g, rc := relaytest.NewGated(t)
	db.Insert(10, "before")
	cfg := config(db, to(rc.URL))
	cfg.Pool = settings(t, l.dsn)
	r := start(t, cfg)
	for range 10 {
		<-g.Arrived
	}
	relayID := r.relayID()
	l.block(true)
	g.Open()
	r.await(t, "attempts during the outage", func(o *observer) bool { return len(o.attempts) == 10 })
	for _, operation := range []string{"settle", "session"} {
		r.await(t, "failures of "+operation, func(o *observer) bool { return o.failures[operation] >= 3 })
	}
	db.Insert(10, "meanwhile")
	l.block(false)
	back := time.Now()
	relaytest.Eventually(t, "a new request", func() bool { return rc.Total() > 10 })
	t.Logf("the first new request came %s after the database", time.Since(back).Round(time.Millisecond))
	r.settles(t, policy.Delivered, 20)
	if got := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`); got != 20 || rc.Total() != 20 {
		t.Errorf("%d delivered at once, %d requests", got, rc.Total())
	}
	if again := r.relayID(); again != relayID {
		t.Errorf("relay %d became %d although no relay took it for dead", relayID, again)
	}
}
