package relay

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The events of one ordering key arrive in order and once, however many relays send and however
// often the receiver fails: a later one is never sent before the earlier one was accepted.
func TestOrderWithinAKey(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		open   func(testing.TB, ...string) *relaytest.Database
		relays int
	}{
		"rows, two relays":     {relaytest.Covered, 2},
		"ranges, one relay":    {relaytest.New, 1},
		"ranges, three relays": {relaytest.New, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := c.open(t)
			var mu sync.Mutex
			inFlight, accepted := map[string]bool{}, map[string][]string{}
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
				key := r.Header.Get(webhook.OrderingKey)
				mu.Lock()
				if inFlight[key] {
					t.Errorf("%s comes while an earlier event of its key is in flight", r.Key)
				}
				fail := rand.IntN(4) == 0
				if inFlight[key] = true; !fail {
					accepted[key] = append(accepted[key], r.Key)
				}
				mu.Unlock()
				if fail {
					w.WriteHeader(http.StatusInternalServerError)
				}
				mu.Lock()
				inFlight[key] = false
				mu.Unlock()
			})
			d := to(rc.URL)
			d.MaxInFlight, d.Retry.MaxAttempts, d.Retry.RetryAfterMax = 8, 100, time.Minute
			for range c.relays {
				start(t, config(db, d))
			}
			commit := produceKeys(db, testsize.Of(400, 100))
			relaytest.Becomes(db, commit, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
			mu.Lock()
			defer mu.Unlock()
			for key, list := range accepted {
				if commit -= len(list); len(slices.Compact(slices.Clone(list))) != len(list) || !slices.IsSorted(list) {
					t.Errorf("of %s were accepted %v", key, list)
				}
			}
			testkit.Equal(t, "more events than accepted requests", commit, 0)
		})
	}
}

// produceKeys commits events of several keys at once. Each of 6 keys has n in transactions of its
// own, and 12 keys share 15 transactions. It returns how many events that are.
func produceKeys(db *relaytest.Database, n int) int {
	var producers sync.WaitGroup
	for k := range 6 {
		producers.Go(func() {
			for i := range n {
				if _, err := db.Pool.Exec(db.Context(), insertKeyedEvent, fmt.Sprintf("k%d/%04d", k, i), fmt.Sprint("k", k)); err != nil {
					db.Error(err)
					return
				}
			}
		})
	}
	for i := range 15 {
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 't', '{}', 'shared-' || k || '-' || lpad($1::text, 3, '0'), 'shared-' || k FROM generate_series(1, 12) k`, fmt.Sprint(i))
	}
	producers.Wait()
	return 6*n + 12*15
}

// An event that was committed after a later one of its key holds what follows it, although all
// deliveries before the later one were known to be settled: while it waits, and once it has failed.
func TestLateEventHoldsItsKey(t *testing.T) {
	t.Parallel()
	for name, status := range map[string]int{"waits": http.StatusServiceUnavailable, "failed": http.StatusBadRequest} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.New(t, "default")
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
				switch {
				case r.Key == "2" && r.Number == 1:
					w.WriteHeader(http.StatusServiceUnavailable)
				case r.Key == "1" && r.Number == 1:
					w.WriteHeader(status)
				}
			})
			d := to(rc.URL)
			d.Retry.Schedule = []time.Duration{2 * time.Second}
			start(t, config(db, d))
			const insert = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', $1, 'k')`
			late := db.Begin()
			_, err := late.Exec(t.Context(), insert, "1")
			relaytest.Must(t, err)
			db.Exec(insert, "2")
			relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
			relaytest.Must(t, late.Commit(t.Context()))
			relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE event_id = 1 AND attempts = 1`)
			db.Exec(insert, "3")
			want := "2 2 1 1 3"
			if status == http.StatusBadRequest {
				want = "2 2 1"
				relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE blocked_by = 1`)
			} else {
				relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
			}
			testkit.Equal(t, "sent", strings.Join(rc.Keys(), " "), want)
		})
	}
}

// While a key waits for its head, the lane continues, and its position moves past what follows in
// the key. That must not wait, event by event, for the next routine sweep, which here is an hour
// away.
func TestOrderedKeysGoOnBehindThePosition(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, 30) i`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute'`)
	db.Insert(10, "free")
	r := start(t, rarely(config(db, to(rc.URL))))
	r.settles(t, policy.Delivered, 40)
}

// The same key of another destination, and a head whose retry is hours away: only the one lane
// waits.
func TestOrderIsPerDestination(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "slow", "fast")
	slow, fast := relaytest.NewReceiver(t, relaytest.Status(http.StatusServiceUnavailable)), relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, 20) i`)
	a, b := named("slow", to(slow.URL)), named("fast", to(fast.URL))
	a.Retry.Schedule = []time.Duration{time.Hour}
	r := start(t, config(db, a, b))
	r.settles(t, policy.Delivered, 20)
	testkit.Equal(t, "requests behind a head that waits", slow.Total(), 1)
	want := make([]string, 20)
	for i := range want {
		want[i] = fmt.Sprint(i + 1)
	}
	if got := fast.Keys(); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%v", got)
	}
}

// The database refuses the row of a delivery for longer than its lease. What comes later in its key
// does not pass it, although nothing in the database shows the key.
func TestNothingPassesARefusedRow(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Refuse("INSERT ON outbox_delivery", "NEW.event_id = 1")
	var accepts atomic.Bool
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Header.Get(webhook.OrderingKey) == "k" && !accepts.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Timeout = 300 * time.Millisecond
	db.InsertKeyed("k", 1, 1)
	r := startWithLease(t, config(db, d), shortLease)
	relaytest.Becomes(db, true, `SELECT coalesce(min(taken_at) < now() - $1::interval, false) FROM outbox_range WHERE ended_at IS NULL`, shortLease+time.Second)
	accepts.Store(true)
	db.InsertKeyed("k", 2, 2)
	db.Insert(1, "other")
	r.settles(t, policy.Delivered, 1)
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	relaytest.Becomes(db, 3, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
	keys := slices.DeleteFunc(rc.Keys(), func(key string) bool { return key == "other-1" })
	if second := slices.Index(keys, "k-2"); second < 0 || slices.Contains(keys[second:], "k-1") {
		t.Errorf("sent: %v", keys)
	}
}

// The database refuses the rows of a destination for longer than the leases. Its lane sends no more
// than it has room for, and other destinations continue.
func TestRefusedRowsStopOneLane(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "refused", "other")
	db.Refuse("INSERT ON outbox_delivery", "NEW.destination = 'refused'")
	rc := relaytest.NewReceiver(t, nil)
	d := named("refused", to(rc.URL))
	d.Timeout, d.MaxInFlight, d.RateLimit = 300*time.Millisecond, 2, 4
	rest := named("other", to(relaytest.NewReceiver(t, nil).URL))
	rest.Timeout = d.Timeout
	db.Insert(10, "early")
	r := startWithLease(t, config(db, d, rest), shortLease)
	relaytest.Becomes(db, true, `SELECT coalesce(min(taken_at) < now() - $1::interval, false) FROM outbox_range WHERE ended_at IS NULL`, shortLease+time.Second)
	db.Insert(3, "late")
	r.settles(t, policy.Delivered, 13)
	sent := rc.Keys()
	if room := d.MaxInFlight + int(d.RateLimit); len(sent) > room || rc.Numbers("late") != "" {
		t.Errorf("sent %v: there was room for %d", sent, room)
	}
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	relaytest.Becomes(db, 26, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
}
