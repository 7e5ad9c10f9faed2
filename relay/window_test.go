package relay

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A receiver that answers 429 or 503 and says when to come back gets nothing more until then: what waits spends no
// attempt, and neither does what was claimed already. Then it gets one request at once.
func TestRetryAfterClosesTheLane(t *testing.T) {
	t.Parallel()
	for _, code := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		t.Run(http.StatusText(code), func(t *testing.T) {
			t.Parallel()
			const waiting, most = 100, 2 // so few failures hold no destination
			db := newDatabase(t, "default", "other")
			var refusing atomic.Bool
			refusing.Store(true)
			g := newGate(t)
			rc := newReceiver(t, func(w http.ResponseWriter, r request) {
				if refusing.Load() {
					w.Header().Set("Retry-After", "30")
					w.WriteHeader(code)
					return
				}
				g.pass(r)
			})
			db.insert(waiting, "key")
			d := post.Destination{Name: "default", URL: rc.URL, MaxInFlight: most}
			other := to(newReceiver(t, nil).URL)
			other.Name = "other"
			r := start(t, db.config(d, other))
			r.await(t, "a refusal", func(o *observer) bool { return o.outcomes[policy.Retry] > 0 })
			eventually(t, "the answers to all requests", func() bool {
				return rc.total() == row[int](db, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'default' AND attempts > 0`)
			})
			refused := rc.total()
			if refused > most {
				t.Errorf("%d requests, though the first was refused", refused)
			}
			refusing.Store(false)
			db.insert(waiting, "new")
			r.settles(t, policy.Delivered, 2*waiting) // to the other destination, by claims for both
			if n := rc.total(); n != refused {
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
			r.wake.notify(true)
			<-g.arrived
			select {
			case <-g.arrived:
				t.Error("two requests at once, when it reopened")
			default:
			}
			g.open()
			becomes(db, 2*waiting-refused, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'default' AND status = 'delivered' AND attempts = 1`)
		})
	}
}

// A 503 beside requests that are accepted asks for one event's sake, and keeps no other.
func TestRetryAfterOfOneEventClosesNoLane(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	unavailable := policy.Result{Reason: policy.ReasonUnavailable, StatusCode: 503, Posted: true, RetryAfter: time.Minute}
	limited := policy.Result{Reason: policy.ReasonRateLimited, StatusCode: 429, Posted: true, RetryAfter: time.Minute}
	for name, c := range map[string]struct {
		policy.Result
		after  time.Duration // the last answer
		closes bool
	}{
		"503 among answers": {unavailable, time.Millisecond, false},
		"503 alone":         {unavailable, 2 * time.Second, true},
		"429 among answers": {limited, time.Millisecond, true},
	} {
		l := laneOf(8)
		l.Destination.Retry.RetryAfterMax = time.Hour
		v := policy.Result{Reason: policy.ReasonOK, StatusCode: 204, Posted: true}
		l.recordResult(now, 1, &v, time.Millisecond, time.Millisecond)
		l.recordResult(now.Add(c.after), 2, &c.Result, time.Millisecond, time.Millisecond)
		if closed := !l.earliestClaim(now.Add(10*time.Second), time.Hour).IsZero(); closed != c.closes {
			t.Errorf("%s closes the lane: %t", name, closed)
		}
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
