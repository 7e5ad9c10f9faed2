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
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The events of one ordering key arrive in order, however many relays send and however often the
// receiver fails: a later one is never sent before the earlier one was taken.
func TestOrderWithinAKey(t *testing.T) {
	t.Parallel()
	const keys, each = 12, 15
	db := relaytest.Covered(t)
	var mu sync.Mutex
	inFlight := map[string]bool{}
	var taken []string
	random := rand.New(rand.NewPCG(1, 2))
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		ordering := r.Header.Get(webhook.OrderingKey)
		mu.Lock()
		if inFlight[ordering] {
			t.Errorf("%s comes while an earlier event of its key is in flight", r.Key)
		}
		inFlight[ordering] = true
		fail := random.IntN(4) == 0
		if !fail {
			taken = append(taken, r.Key)
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
	cfg := config(db, d)
	start(t, cfg)
	start(t, cfg)
	for n := range each { // in several transactions, some of many keys, while the relays work
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 't', '{}', 'key-' || k || '-' || lpad($1::text, 3, '0'), 'key-' || k FROM generate_series(1, $2) k`, fmt.Sprint(n), keys)
	}
	relaytest.Becomes(db, keys*each, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	last := map[string]string{}
	for _, key := range taken {
		ordering := key[:strings.LastIndex(key, "-")]
		if key <= last[ordering] {
			t.Errorf("%s was taken after %s", key, last[ordering])
		}
		last[ordering] = key
	}
	testkit.Equal(t, "taken", len(taken), keys*each)
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
	db.Exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.event_id = 1 THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION refuse()`)
	var accepts atomic.Bool
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Header.Get(webhook.OrderingKey) == "k" && !accepts.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Timeout = time.Second
	cfg := config(db, d)
	cfg.Lease = d.Timeout + leaseMargin
	db.InsertKeyed("k", 1, 1)
	r := start(t, cfg)
	relaytest.Becomes(db, true, `SELECT coalesce(min(taken_at) < now() - interval '7 seconds', false) FROM outbox_range WHERE ended_at IS NULL`)
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
	db.Exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.destination = 'refused' THEN RAISE EXCEPTION 'not there'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION refuse()`)
	rc := relaytest.NewReceiver(t, nil)
	d := named("refused", to(rc.URL))
	d.Timeout, d.MaxInFlight, d.RateLimit = time.Second, 2, 4
	rest := named("other", to(relaytest.NewReceiver(t, nil).URL))
	rest.Timeout = d.Timeout
	cfg := config(db, d, rest)
	cfg.Lease = d.Timeout + leaseMargin
	db.Insert(10, "early")
	r := start(t, cfg)
	relaytest.Becomes(db, true, `SELECT coalesce(min(taken_at) < now() - interval '7 seconds', false) FROM outbox_range WHERE ended_at IS NULL`)
	db.Insert(3, "late")
	r.settles(t, policy.Delivered, 13)
	sent := rc.Keys()
	if room := d.MaxInFlight + int(d.RateLimit); len(sent) > room || rc.Numbers("late") != "" {
		t.Errorf("sent %v: there was room for %d", sent, room)
	}
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	relaytest.Becomes(db, 26, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
}
