package relay

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/take"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// later adds n events of an ordering key that are due after the given time.
func later(db *relaytest.Database, prefix, ordering string, n int, after string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		SELECT 't', '{}', $1 || '-' || i, $2, now() + $4::interval FROM generate_series(1, $3::int) i`, prefix, ordering, n, after)
}

// A producer that may insert cannot stop the events of another one by a shared ordering key and a
// far time.
func TestEventsThatAreNotDueHoldNobody(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	later(db, "hostile", "k", 1, "365 days")
	r := start(t, rarely(config(db, to(rc.URL))))
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery`)
	db.InsertKeyed("k", 1, 3)
	r.settles(t, policy.Delivered, 3)
	later(db, "more", "k", 10_000, "365 days")
	relaytest.Becomes(db, 10_004, `SELECT count(*) FROM outbox_delivery`)
	db.InsertKeyed("k", 4, 6)
	r.settles(t, policy.Delivered, 6)
	wantSent(t, rc, "k", numbers(1, 6))
}

// Events of a key with a time are sent in the order in which they become due, each behind what was
// due before it, also if no relay ran then.
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
			db.InsertKeyed("k", 0, 0)
			due := `SELECT now() >= available_at + interval '500 milliseconds' FROM outbox WHERE idempotency_key = $1`
			relaytest.Becomes(db, true, due, "first-1")
			db.InsertKeyed("k", 2, 2)
			relaytest.Becomes(db, true, due, "third-1")
			db.InsertKeyed("k", 4, 4)
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

// An event whose time comes while an earlier one of its key has failed, or is retried, waits behind
// it, and what is inserted later waits behind both.
func TestEventsThatBecomeDueWaitBehindTheirHead(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, refusing("k-1", 1, http.StatusUnprocessableEntity))
	r := start(t, config(db, to(rc.URL)))
	later(db, "late", "k", 3, "1 hour")
	db.InsertKeyed("k", 1, 1)
	r.settles(t, policy.Fail, 1)
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() WHERE joined IS NULL`)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`)
	db.InsertKeyed("k", 2, 3)
	relaytest.Becomes(db, 5, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND joined > 0 AND attempts = 0`)
	relaytest.Becomes(db, 5, `SELECT count(*) FROM outbox_delivery WHERE blocked_by IS NOT NULL`) // no claim reads past them
	waits, err := ops.New(db.Pool).Waits(t.Context(), relaytest.Row[int64](db, `SELECT id FROM outbox WHERE idempotency_key = 'late-2'`))
	relaytest.Must(t, err)
	head := relaytest.Row[int64](db, `SELECT id FROM outbox WHERE idempotency_key = 'k-1'`)
	if len(waits) == 0 || !strings.HasPrefix(waits[0].Text, fmt.Sprintf("behind event %d of its ordering key, which has failed", head)) {
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
	db.InsertKeyed("k", 1, 1)
	later(db, "another", "k", 1, "30 minutes")
	outbox := ops.New(db.Pool)
	for id, want := range map[int64]string{1: "not_due", 2: "no_relay", 3: "not_due"} {
		waits, err := outbox.Waits(t.Context(), id)
		relaytest.Must(t, err)
		if len(waits) == 0 || waits[0].Cause != want {
			t.Errorf("event %d: %v; want %s", id, waits, want)
		}
	}
	head, err := outbox.HeadOfKey(t.Context(), "default", "k")
	relaytest.Must(t, err)
	if head == nil || head.EventID != 2 || head.Behind != 0 {
		t.Errorf("head: %+v", head)
	}
}

// What was committed before an event became due precedes it in its key, also if it has not been
// taken yet, and what was committed after that follows it, also if one range has both.
func TestEventsThatBecomeDueFollowWhatIsNotTakenYet(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	later(db, "late", "k", 1, "1 hour")
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`)
	lock := db.Begin() // no relay takes anything
	_, err := lock.Exec(t.Context(), `LOCK TABLE outbox_range IN SHARE ROW EXCLUSIVE MODE`)
	relaytest.Must(t, err)
	db.InsertKeyed("k", 1, 1)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	db.InsertKeyed("k", 2, 3)
	relaytest.Becomes(db, true, `SELECT now() > max(next_attempt_at) + interval '2 seconds' FROM outbox_delivery`)
	if n := rc.Total(); n > 0 {
		t.Errorf("sent: %v", rc.Keys())
	}
	relaytest.Must(t, lock.Commit(t.Context()))
	r.settles(t, policy.Delivered, 4)
	if got, want := strings.Join(rc.Keys(), " "), "k-1 late-1 k-2 k-3"; got != want {
		t.Errorf("sent: %s; want %s", got, want)
	}
}

// While relays die, and the receiver fails requests, events with and without a time reach it in the
// order in which they became due, then of their commits.
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
	type event struct {
		key           string
		first, latest time.Time // when it may have become due, by the database's clock: between its insert's begin and its commit, or at its time
	}
	events, orderings := map[string]*event{}, map[string]string{}
	clock := func() time.Time { return relaytest.Row[time.Time](db, `SELECT clock_timestamp()`) }
	const keys, each = 20, 40
	now := clock()
	for i := range each {
		for k := range keys {
			ordering := fmt.Sprint("o", k)
			key := fmt.Sprintf("e-%d-%s%s", i, strings.Repeat("x", 1+random.IntN(9)), ordering)
			e := &event{first: now} // after the event before
			switch random.IntN(4) {
			case 0:
				later(db, key, ordering, 1, fmt.Sprint(1+random.IntN(4000), " milliseconds"))
				key += "-1"
			case 1:
				later(db, key, ordering, 1, "365 days")
				key += "-1"
			default:
				db.Exec(insertKeyedEvent, key, ordering)
			}
			now = clock()
			e.key, e.latest = key, now
			events[key], orderings[key] = e, ordering
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
	available := relaytest.Rows[time.Time](db, `SELECT available_at FROM outbox ORDER BY idempotency_key COLLATE "C"`)
	for i, key := range slices.Sorted(maps.Keys(events)) {
		e := events[key]
		if due := available[i]; due.After(e.latest) {
			e.first, e.latest = due, due
		} else if due.After(e.first) {
			e.first = due
		}
	}
	sent := map[string][]*event{}
	for _, key := range rc.Keys() {
		e, ordering := events[key], orderings[key]
		if !slices.Contains(sent[ordering], e) {
			sent[ordering] = append(sent[ordering], e)
		}
	}
	for ordering, list := range sent {
		for i, e := range list {
			for _, before := range list[:i] {
				if early := before.first.Sub(e.latest); early > take.LateAfter {
					t.Errorf("of %s, %s was sent before %s, which was due %s earlier at least", ordering, before.key, e.key, early)
				}
			}
		}
	}
}
