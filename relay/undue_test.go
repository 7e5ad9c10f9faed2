package relay

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// later adds n events of an ordering key that are due after the given time.
func later(db *relaytest.Database, prefix, ordering string, n int, after string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		SELECT 't', '{}', $1 || '-' || i, $2, now() + $4::interval FROM generate_series(1, $3::int) i`, prefix, ordering, n, after)
}

// A producer that may insert cannot stop the events of another one by a shared ordering key and a far time.
func TestEventsThatAreNotDueHoldNobody(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	later(db, "hostile", "k", 1, "365 days")
	r := start(t, rarely(config(db, to(rc.URL))))
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery`)
	keyed(db, "k", 1, 3)
	r.settles(t, policy.Delivered, 3)
	later(db, "more", "k", 10_000, "365 days")
	relaytest.Becomes(db, 10_004, `SELECT count(*) FROM outbox_delivery`)
	keyed(db, "k", 4, 6)
	r.settles(t, policy.Delivered, 6)
	wantSent(t, rc, "k", numbers(1, 6))
}

// Events of a key with a time are sent in the order in which they become due, each behind what was due before it, also if no relay ran then.
func TestEventsJoinTheirKeyInTheOrderOfTheirTimes(t *testing.T) {
	t.Parallel()
	for name, runs := range map[string]bool{"a relay runs": true, "no relay runs": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.New(t)
			rc := relaytest.NewReceiver(t, nil)
			var r *running
			begin := func() { r = start(t, rarely(config(db, to(rc.URL)))) }
			if runs {
				begin()
			}
			later(db, "third", "k", 1, "4 seconds")
			later(db, "first", "k", 1, "1500 milliseconds")
			keyed(db, "k", 0, 0)
			due := `SELECT now() >= available_at + interval '500 milliseconds' FROM outbox WHERE idempotency_key = $1`
			relaytest.Becomes(db, true, due, "first-1")
			keyed(db, "k", 2, 2)
			relaytest.Becomes(db, true, due, "third-1")
			keyed(db, "k", 4, 4)
			if !runs {
				begin()
			}
			r.settles(t, policy.Delivered, 5)
			if got, want := strings.Join(rc.Keys(), " "), "k-0 first-1 k-2 third-1 k-4"; got != want {
				t.Errorf("sent: %s; want %s", got, want)
			}
		})
	}
}

// An event whose time comes while an earlier one of its key has failed, or is retried, waits behind it, and what is inserted later waits
// behind both.
func TestEventsThatBecomeDueWaitBehindTheirHead(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, refusing("k-1", 1, http.StatusUnprocessableEntity))
	r := start(t, rarely(config(db, to(rc.URL))))
	later(db, "late", "k", 3, "1 second")
	keyed(db, "k", 1, 1)
	r.settles(t, policy.Fail, 1)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`)
	keyed(db, "k", 2, 3)
	relaytest.Becomes(db, 5, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND joined > 0 AND attempts = 0`)
	relaytest.Becomes(db, 5, `SELECT count(*) FROM outbox_delivery WHERE blocked_by IS NOT NULL`) // no claim reads past them
	waits, err := ops.New(db.Pool).Waits(t.Context(), relaytest.Row[int64](db, `SELECT id FROM outbox WHERE idempotency_key = 'late-2'`))
	relaytest.Must(t, err)
	head := relaytest.Row[int64](db, `SELECT id FROM outbox WHERE idempotency_key = 'k-1'`)
	if len(waits) == 0 || !strings.HasPrefix(waits[0].Text, fmt.Sprintf("behind event %d of its ordering key, which is failed", head)) {
		t.Errorf("it waits: %v", waits)
	}
	_, err = ops.New(db.Pool).Replay(t.Context(), ops.Selection{EventIDs: []int64{head}}, 0, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 6)
	if got, want := strings.Join(rc.Keys(), " "), "k-1 k-1 late-1 late-2 late-3 k-2 k-3"; got != want {
		t.Errorf("sent: %s; want %s", got, want)
	}
}

// What explains a wait never names an event that is not due.
func TestExplainNamesNoEventThatIsNotDue(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	later(db, "hostile", "k", 1, "1 hour")
	keyed(db, "k", 1, 1)
	later(db, "another", "k", 1, "30 minutes")
	outbox := ops.New(db.Pool)
	for id, want := range map[int64]string{1: "not_due", 2: "no_relay", 3: "not_due"} {
		waits, err := outbox.Waits(t.Context(), id)
		relaytest.Must(t, err)
		if len(waits) == 0 || waits[0].Why != want {
			t.Errorf("event %d: %v; want %s", id, waits, want)
		}
	}
	head, err := outbox.HeadOfKey(t.Context(), "default", "k")
	relaytest.Must(t, err)
	if head == nil || head.EventID != 2 || head.Behind != 0 {
		t.Errorf("head: %+v", head)
	}
}

// While relays die, and the receiver fails requests, events with and without a time reach it in the order in which they became due, then of
// their commits. The times are apart by more than a transaction takes.
func TestOrderOfTimesUnderKills(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	random := rand.New(rand.NewPCG(1, 2))
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number == 1 && len(r.Key)%5 == 0 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	cfg := config(db, to(rc.URL))
	one, two := start(t, cfg), start(t, cfg)
	const keys, each = 20, 40
	for i := range each {
		for k := range keys {
			ordering, prefix := fmt.Sprint("o", k), fmt.Sprintf("e-%d-%s", i, strings.Repeat("x", 1+random.IntN(9)))
			switch random.IntN(4) {
			case 0:
				later(db, prefix+ordering, ordering, 1, fmt.Sprint(1+random.IntN(4000), " milliseconds"))
			case 1:
				later(db, prefix+ordering, ordering, 1, "365 days")
			default:
				db.Exec(insertKeyedEvent, prefix+ordering, ordering)
			}
		}
		if i%10 == 9 {
			one.Abort()
			one.stop()
			one, two = two, start(t, cfg)
		}
	}
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox o WHERE available_at < now() + interval '1 day'
		AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id AND d.status = 'delivered')`)
	two.stop()
	type event struct {
		Key, OrderingKey string
		Due              time.Time
	}
	of := map[string]event{}
	for _, e := range relaytest.Rows[string](db, `SELECT idempotency_key || '|' || ordering_key || '|' || to_char(greatest(available_at, created_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM outbox`) {
		parts := strings.Split(e, "|")
		due, err := time.Parse(time.RFC3339Nano, parts[2])
		relaytest.Must(t, err)
		of[parts[0]] = event{parts[0], parts[1], due}
	}
	first := map[string][]event{}
	for _, key := range rc.Keys() {
		e := of[key]
		if !slices.Contains(first[e.OrderingKey], e) {
			first[e.OrderingKey] = append(first[e.OrderingKey], e)
		}
	}
	for key, list := range first {
		for i := 1; i < len(list); i++ {
			if gap := list[i-1].Due.Sub(list[i].Due); gap > lateAfter {
				t.Errorf("of %s, %s was sent before %s, which was due %s earlier", key, list[i-1].Key, list[i].Key, gap)
			}
		}
	}
}
