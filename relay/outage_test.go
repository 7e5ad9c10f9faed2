package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// The database has committed the outcomes, and the acknowledgement is lost. They are written again, and
// must count once.
func TestLostAcknowledgementCountsOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer    int
		statement string
		want      string
	}{
		"delivered": {204, settleDelivered, "delivered 1 0"},
		"retry":     {500, settleRetry, "pending 1 1"},
		"failed":    {422, settleFailed, "failed 1 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			l := newLink(t, db.dsn)
			g := newGate(t)
			rc := newReceiver(t, func(w http.ResponseWriter, r request) {
				g.pass(r)
				w.WriteHeader(c.answer)
			})
			db.insert(1, "key")
			cfg := db.config(post.Destination{Name: "default", URL: rc.URL, Retry: policy.RetryPolicy{Schedule: []time.Duration{time.Hour}}})
			cfg.Pool = settings(t, l.dsn)
			r := start(t, cfg)
			<-g.arrived
			l.holdFrom(c.statement)
			g.open()
			becomes(db, 1, `SELECT attempts FROM outbox_delivery`)
			due := row[time.Time](db, `SELECT next_attempt_at FROM outbox_delivery`)
			l.block(true) // so that the answer is not merely late
			l.pass()
			r.await(t, "the failed settle", func(o *observer) bool { return o.failures["settle"] > 0 })
			l.block(false)
			r.await(t, "the settle", func(o *observer) bool {
				return o.outcomes[policy.Delivered]+o.outcomes[policy.Retry]+o.outcomes[policy.Fail] == 1
			})

			got := row[string](db, `SELECT concat_ws(' ', status, attempts, (SELECT count(*) FROM outbox_attempt)) FROM outbox_delivery`)
			if got != c.want || rc.total() != 1 {
				t.Errorf("%s after %d requests, want %s", got, rc.total(), c.want)
			}
			if again := row[time.Time](db, `SELECT next_attempt_at FROM outbox_delivery`); !again.Equal(due) {
				t.Errorf("the next attempt moved from %s to %s", due, again)
			}
			if n := row[int](db, `SELECT coalesce(sum(count), 0) FROM outbox_alert`); n != map[int]int{422: 1}[c.answer] {
				t.Errorf("%d failures alerted", n)
			}
			// No other relay was there: nothing came too late.
			if n := sees(r.observer, func(o *observer) int { return o.stale }); n != 0 {
				t.Errorf("%d outcomes are said to have come too late", n)
			}
		})
	}
}

// The acknowledgement of a claim is lost: the rows are this relay's, and it does not know. They are not lost.
func TestLostClaimIsFoundAgain(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	l := newLink(t, db.dsn)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.Pool = settings(t, l.dsn)
	db.insert(10, "key")
	l.holdFrom(claimDue)
	r := start(t, cfg)
	becomes(db, 10, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	l.block(true)
	l.pass()
	l.block(false)
	r.await(t, "the failed claim", func(o *observer) bool { return o.failures["claim"] > 0 })
	db.exec(`UPDATE outbox_delivery SET lease_expires_at = now() WHERE claimed_by IS NOT NULL`)
	r.settles(t, policy.Delivered, 10)
	if rc.total() != 10 {
		t.Errorf("%d requests", rc.total())
	}
}

// The database is out of reach, the relay lives on, finishes what it has, and
// goes on by itself.
func TestRelayOutlivesItsDatabase(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	l := newLink(t, db.dsn)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(10, "before")
	cfg := db.config(to(rc.URL))
	cfg.Pool = settings(t, l.dsn)
	r := start(t, cfg)
	for range 10 {
		<-g.arrived
	}
	instance := r.instance()
	l.block(true)
	g.open()
	r.await(t, "attempts during the outage", func(o *observer) bool { return len(o.attempts) == 10 })
	for _, operation := range []string{"settle", "session"} {
		r.await(t, "failures of "+operation, func(o *observer) bool { return o.failures[operation] >= 3 })
	}
	db.insert(10, "meanwhile")
	l.block(false)
	r.settles(t, policy.Delivered, 20)
	if got := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`); got != 20 || rc.total() != 20 {
		t.Errorf("%d delivered at once, %d requests", got, rc.total())
	}
	if again := r.instance(); again != instance {
		t.Errorf("instance %d became %d although no relay took it for dead", instance, again)
	}
}
