package relay

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A receiver that answers 429 and says when to come back gets nothing more until then: what waits
// spends no attempt, and neither does what was claimed already.
func TestRetryAfterClosesTheLane(t *testing.T) {
	t.Parallel()
	const waiting, most = 100, 2 // so few failures hold no destination
	db := relaytest.Covered(t, "default", "other")
	var refusing atomic.Bool
	refusing.Store(true)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		if refusing.Load() {
			w.Header().Set("Retry-After", "30")
			w.WriteHeader(http.StatusTooManyRequests)
		}
	})
	db.Insert(waiting, "key")
	d := post.Destination{Name: "default", URL: rc.URL, MaxInFlight: most}
	cfg := config(db, d, named("other", to(relaytest.NewReceiver(t, nil).URL)))
	r := start(t, cfg)
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
	if wait := time.Until(r.lane("default").EarliestClaim(time.Now(), DefaultLease)); wait <= 0 || wait > 30*time.Second {
		t.Errorf("the lane reopens in %s", wait)
	}
	// What is behind another address has asked for nothing.
	cfg.Destinations = slices.Clone(cfg.Destinations)
	cfg.Destinations[0].URL = strings.Replace(d.URL, "127.0.0.1", "localhost", 1)
	r.reload(cfg)
	relaytest.Becomes(db, 2*waiting-refused, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'default' AND status = 'delivered' AND attempts = 1`)
}
