package relay

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A receiver that answers 429 and says when to come back gets nothing more until then: what waits spends no
// attempt, and neither does what was claimed already. Then it gets one request at once.
func TestRetryAfterClosesTheLane(t *testing.T) {
	t.Parallel()
	const waiting, most = 100, 2 // so few failures hold no destination
	db := relaytest.Covered(t, "default", "other")
	var refusing atomic.Bool
	refusing.Store(true)
	g := relaytest.NewGate(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if refusing.Load() {
			w.Header().Set("Retry-After", "30")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		g.Pass(r)
	})
	db.Insert(waiting, "key")
	d := post.Destination{Name: "default", URL: rc.URL, MaxInFlight: most}
	r := start(t, config(db, d, named("other", to(relaytest.NewReceiver(t, nil).URL))))
	r.await(t, "a refusal", func(o *observer) bool { return o.outcomes[policy.Retry] > 0 })
	relaytest.Eventually(t, "the answers to all requests", func() bool {
		return rc.Total() == relaytest.Row[int](db, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'default' AND attempts > 0`)
	})
	refused := rc.Total()
	if refused > most {
		t.Errorf("%d requests, though the first was refused", refused)
	}
	refusing.Store(false)
	db.Insert(waiting, "new")
	r.settles(t, policy.Delivered, 2*waiting) // to the other destination, by claims for both
	if n := rc.Total(); n != refused {
		t.Errorf("%d requests before their time", n-refused)
	}
	l := r.lane("default")
	l.mu.Lock()
	if wait := time.Until(l.flow.Reopens); wait <= 0 || wait > 30*time.Second {
		t.Errorf("the lane reopens in %s", wait)
	}
	l.flow.Reopens = time.Now()
	l.flow.Ramped = l.flow.Reopens
	l.mu.Unlock()
	r.mailbox.post(agenda.CauseSweep)
	<-g.Arrived
	select {
	case <-g.Arrived:
		t.Error("two requests at once, when it reopened")
	default:
	}
	g.Open()
	relaytest.Becomes(db, 2*waiting-refused, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'default' AND status = 'delivered' AND attempts = 1`)
}

// A refusal among answers asks for one event's sake, and keeps no other.
func TestRetryAfterOfOneEventClosesNoLane(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	unavailable := policy.Result{Reason: policy.ReasonUnavailable, StatusCode: 503, Posted: true, RetryAfter: time.Minute}
	limited := policy.Result{Reason: policy.ReasonRateLimited, StatusCode: 429, Posted: true, RetryAfter: time.Minute}
	for name, c := range map[string]struct {
		policy.Result
		refusals int // one every half second
		closes   bool
	}{
		"503 among answers":   {unavailable, 1, false},
		"429 among answers":   {limited, 1, false},
		"503 for two seconds": {unavailable, 4, true},
		"429 for two seconds": {limited, 4, true},
	} {
		l := laneOf(8)
		l.Destination.Retry.RetryAfterMax = time.Hour
		v := policy.Result{Reason: policy.ReasonOK, StatusCode: 204, Posted: true}
		l.recordResult(now, 1, &v, time.Millisecond, time.Millisecond)
		for i := range c.refusals {
			v := c.Result
			l.recordResult(now.Add(time.Duration(i+1)*time.Second/2), int64(i+2), &v, time.Millisecond, time.Millisecond)
		}
		if closed := !l.earliestClaim(now.Add(10*time.Second), time.Hour).IsZero(); closed != c.closes {
			t.Errorf("%s closes the lane: %t", name, closed)
		}
	}
}

// A receiver refuses every 16th request, and asks to come back after an hour. Each refused event waits that long, and no other waits with
// it: all others are delivered at the first attempt.
func TestShareOfRefusalsClosesNoLane(t *testing.T) {
	t.Parallel()
	const events, every = 400, 16
	db := relaytest.Covered(t)
	var requests atomic.Int64
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		if requests.Add(1)%every == 0 {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
		}
	})
	d := post.Destination{Name: "default", URL: rc.URL}
	r := start(t, config(db, d))
	db.Insert(1, "first") // a refusal that is the first answer of all is a stop
	r.settles(t, policy.Delivered, 1)
	db.Insert(events-1, "key")
	r.settles(t, policy.Delivered, events-events/every)
	r.settles(t, policy.Retry, events/every)
	l := r.lane("default")
	l.mu.Lock()
	if l.flow.Paced() != 0 || !l.flow.Reopens.IsZero() {
		t.Errorf("paced to %g a second, closed until %s", l.flow.Paced(), l.flow.Reopens)
	}
	l.mu.Unlock()
	if !relaytest.Row[bool](db, `SELECT bool_and(next_attempt_at > now() + interval '50 minutes') AND count(*) = $1 FROM outbox_delivery WHERE status = 'pending'`, events/every) {
		t.Error("a refused event does not wait as its receiver asked")
	}
}

// A relay that was asked to wait takes no turn with a held destination: it could send nothing, and would take that for
// nothing to send.
func TestTrialWaitsAsAsked(t *testing.T) {
	t.Parallel()
	r := prepared(t, Config{Pool: settings(t, "postgres://nowhere.test/"), Destinations: []post.Destination{to("http://receiver.test/")}})
	r.settling = t.Context()
	c := r.newClaimer()
	l := r.lane("default")
	now := time.Now()
	l.flow.Close(now, 30*time.Second)
	l.breaker.Enter(now, policy.BreakerOpen)
	if next, _, err := c.breakers.Tend(t.Context(), l, now, 1); err != nil || !next.Equal(l.flow.Reopens) {
		t.Errorf("tries again in %s, %v", next.Sub(now), err)
	}
}
