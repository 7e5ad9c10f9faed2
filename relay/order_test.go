package relay

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// The events of one ordering key arrive in order, however many relays send and however often the receiver fails: a
// later one is never sent before the earlier one was taken.
func TestOrderWithinAKey(t *testing.T) {
	t.Parallel()
	const keys, each = 12, 15
	db := newDatabase(t)
	var mu sync.Mutex
	inFlight := map[string]bool{}
	var taken []string
	random := rand.New(rand.NewPCG(1, 2))
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		ordering := r.header.Get(webhook.OrderingKey)
		mu.Lock()
		if inFlight[ordering] {
			t.Errorf("%s comes while an earlier event of its key is in flight", r.key)
		}
		inFlight[ordering] = true
		fail := random.IntN(4) == 0
		if !fail {
			taken = append(taken, r.key)
		}
		mu.Unlock()
		defer func() {
			mu.Lock()
			defer mu.Unlock()
			inFlight[ordering] = false
		}()
		if fail {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Retry.MaxAttempts, d.Retry.RetryAfterMax = 100, time.Minute
	cfg := db.config(d)
	start(t, cfg)
	start(t, cfg)
	for n := range each { // in several transactions, some of many keys, while the relays work
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 't', '{}', 'key-' || k || '-' || lpad($1::text, 3, '0'), 'key-' || k FROM generate_series(1, $2) k`, fmt.Sprint(n), keys)
	}
	becomes(db, keys*each, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	last := map[string]string{}
	for _, key := range taken {
		ordering := key[:strings.LastIndex(key, "-")]
		if key <= last[ordering] {
			t.Errorf("%s was taken after %s", key, last[ordering])
		}
		last[ordering] = key
	}
	if len(taken) != keys*each {
		t.Errorf("%d were taken", len(taken))
	}
}

// While a key waits for its head, the lane goes on, and its position moves past what follows in the key. That must not
// wait, event by event, for the next routine sweep, which here is an hour away.
func TestOrderedKeysGoOnBehindThePosition(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, 30) i`)
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute'`)
	db.insert(10, "free")
	cfg := db.config(to(rc.URL))
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 40)
}

// A failed head blocks its key until an operator decides, and nothing else: other keys, and events without one, flow.
func TestFailedHeadBlocksItsKeyOnly(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.key == "a-1" {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	for _, key := range []string{"a", "b"} {
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 't', '{}', $1 || '-' || i, $1 FROM generate_series(1, 5) i`, key)
	}
	db.insert(5, "free")
	cfg := db.config(to(rc.URL))
	r := start(t, cfg)
	r.settles(t, policy.Fail, 1)
	r.settles(t, policy.Delivered, 10)
	idle := sees(r.observer, func(o *observer) int { return o.idle })
	db.insert(1, "then") // it may have been idle already
	r.settles(t, policy.Delivered, 11)
	r.await(t, "a look at the blocked ones", func(o *observer) bool { return o.idle > idle })
	for _, key := range rc.keys() {
		if strings.HasPrefix(key, "a-") && key != "a-1" {
			t.Errorf("%s was sent behind the failed head", key)
		}
	}
	db.exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE status = 'failed'`)
	r.settles(t, policy.Delivered, 15)
}

// The same key of another destination, and a head whose retry is hours away: only the one lane waits.
func TestOrderIsPerDestination(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "slow", "fast")
	slow, fast := newReceiver(t, status(http.StatusServiceUnavailable)), newReceiver(t, nil)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, 20) i`)
	a, b := to(slow.URL), to(fast.URL)
	a.Name, b.Name = "slow", "fast"
	a.Retry.Schedule = []time.Duration{time.Hour}
	r := start(t, db.config(a, b))
	r.settles(t, policy.Delivered, 20)
	if slow.total() != 1 {
		t.Errorf("%d requests behind a head that waits", slow.total())
	}
	want := make([]string, 20)
	for i := range want {
		want[i] = fmt.Sprint(i + 1)
	}
	if got := fast.keys(); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%v", got)
	}
}
