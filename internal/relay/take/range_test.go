package take

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// running is a taker whose settler writes.
type running struct {
	*Taker
	db      *relaytest.Database
	relayID int32
}

func start(t *testing.T, db *relaytest.Database, destinations ...string) running {
	t.Helper()
	c, relayID := newTaker(t, db, destinations...)
	s := c.Settler
	s.DB, s.RelayID, s.RangeEnded = db.Pool, func() int32 { return relayID }, c.Hands.Remove
	s.NeedsRoom, s.ForOthers = func(string) bool { return false }, func(string) bool { return false }
	s.Dropped, s.Failed = func(*settle.Settlement) {}, func(operation string, err error) { t.Errorf("%s: %v", operation, err) }
	s.Written = func(written []settle.Settlement) {
		for i := range written {
			s := &written[i]
			l := c.Lanes.Get(s.Destination)
			if l == nil {
				continue
			}
			l.SettleKey(s, s.FreesKey, s.Blocks)
			if !s.Spilled {
				l.Release(lane.Class(s.Class), 1)
			}
		}
	}
	var settler sync.WaitGroup
	ctx := context.WithoutCancel(t.Context())
	settler.Go(func() { s.Run(ctx) })
	t.Cleanup(func() {
		s.Close()
		settler.Wait()
	})
	return running{Taker: c, db: db, relayID: relayID}
}

func (r running) take(t *testing.T) {
	t.Helper()
	relaytest.Eventually(t, "a take that no other one beats", func() bool {
		relaytest.Must(t, r.TakeEvents(t.Context(), r.relayID, true))
		now := time.Now()
		due := r.Agenda.Take(now)
		r.Agenda.At(due&^agenda.CauseTakeAgain, now)
		return !due.Has(agenda.CauseTakeAgain)
	})
}

// deliver settles what the lane of a destination got as delivered, and returns the events' keys in
// the order in which they would be sent.
func (r running) deliver(destination string) (keys []string) {
	l := r.Lanes.Get(destination)
	for {
		run, _ := l.NextRun(time.Now())
		if run == nil {
			return keys
		}
		for len(run) > 0 {
			for i := range run {
				d := &run[i]
				keys = append(keys, *d.Event.Key)
				about := policy.Circumstances{Ordered: d.Event.OrderingKey != nil, LastOfRun: i == len(run)-1}
				r.Settler.Settle(d.Settlement(policy.Decide(policy.Result{Reason: policy.ReasonOK, StatusCode: 204, Posted: true}, about), time.Now(), 0))
			}
			if run[0].Event.OrderingKey == nil {
				break
			}
			run = l.NextOfKey(*run[0].Event.OrderingKey)
		}
	}
}

// becomes waits until the deliveries are these: destination, key, status, and + if it is due.
func (r running) becomes(want ...string) {
	r.db.Helper()
	slices.Sort(want)
	var got []string
	r.db.Cleanup(func() {
		if r.db.Failed() {
			r.db.Logf("the deliveries were %v", got)
		}
	})
	relaytest.Eventually(r.db, "the deliveries", func() bool {
		got = relaytest.Rows[string](r.db, `SELECT d.destination || ' ' || o.idempotency_key || ' ' || d.status || CASE WHEN d.status <> 'pending' OR d.next_attempt_at <= now() THEN '' ELSE ' later' END
			FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id ORDER BY 1`)
		slices.Sort(got)
		return slices.Equal(got, want)
	})
}

func (r running) has(t *testing.T, cause agenda.Cause) {
	t.Helper()
	if due := r.Agenda.Take(time.Now().Add(time.Minute)); !due.Has(cause) {
		t.Errorf("due: %s, and not %s", due, cause)
	}
}

const insertEvent = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', $1, $2)`

// A range is handed to the lanes of its destinations, and ends when each delivery has its outcome.
func TestRangeIsHandedOut(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "a", "b")
	r := start(t, db, "a", "b")
	db.Insert(2, "key")
	db.InsertKeyed("k", 1, 3)
	r.take(t)
	for _, destination := range []string{"a", "b"} {
		if keys := r.deliver(destination); len(keys) != 5 || slices.Index(keys, "k-1") > slices.Index(keys, "k-2") || slices.Index(keys, "k-2") > slices.Index(keys, "k-3") {
			t.Errorf("to %s: %v", destination, keys)
		}
	}
	relaytest.Becomes(db, 10, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`)
	relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_range WHERE ended_at IS NULL`)
	if list := r.Hands.fences(); len(list) != 0 {
		t.Errorf("still in hand: %v", list)
	}
	r.take(t)
	if keys := r.deliver("a"); len(keys) != 0 {
		t.Errorf("taken twice: %v", keys)
	}
}

// What cannot be sent soon gets a row at once: its destination is paused, nobody here serves it,
// the event is not due, or has no route.
func TestWhatCannotBeSentGetsARow(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "served", "paused", "elsewhere")
	r := start(t, db, "served", "paused")
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('paused', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'served'), ('t', 'paused'), ('t', 'elsewhere')`)
	db.Insert(1, "key")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('nowhere', '{}', 'unrouted')`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at) VALUES ('t', '{}', 'scheduled', 'k', now() + interval '1 hour')`)
	r.take(t)
	testkit.Equal(t, "sent", r.deliver("served"), []string{"key-1"})
	r.becomes("served key-1 delivered", "paused key-1 pending", "elsewhere key-1 pending", " unrouted pending",
		"served scheduled pending later", "paused scheduled pending later", "elsewhere scheduled pending later")
	relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_range WHERE ended_at IS NULL`)
}

// Events of an ordering key that another relay has in hand wait for it, and others do not wait for
// them.
func TestRangeWaitsForKeysOfAnotherRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	other, err := session.Register(t.Context(), db.Pool, false, "other", "", time.Hour)
	relaytest.Must(t, err)
	db.Exec(insertEvent, "k-1", "k")
	theirs, err := intake.TakeRange(t.Context(), db.Pool, other, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	db.Exec(insertEvent, "k-2", "k")
	db.Exec(insertEvent, "j-1", "j")
	db.Exec(insertEvent, "free", nil)
	r.take(t)
	if keys := r.deliver("default"); len(keys) != 2 || slices.Contains(keys, "k-2") {
		t.Errorf("sent: %v", keys)
	}
	r.has(t, agenda.CauseAwaitedKeys)
	db.Exec(insertEvent, "k-3", "k")
	r.take(t) // it waits behind the range before it
	relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
	if keys := r.deliver("default"); len(keys) != 0 {
		t.Errorf("sent while another relay has k-1: %v", keys)
	}
	_, err = intake.SettleRanges(t.Context(), db.Pool, intake.NewRows{
		Relay: other, Ranges: []intake.RangeRef{theirs.Ref()}, Ended: []intake.RangeRef{theirs.Ref()},
		Deliveries: []intake.NewRow{{Range: theirs.Ref(), EventID: theirs.Events[0].ID, Destination: "default", Status: intake.Delivered, Attempts: 1}},
	})
	relaytest.Must(t, err)
	relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
	testkit.Equal(t, "then", r.deliver("default"), []string{"k-2", "k-3"})
	relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_range WHERE ended_at IS NULL`)
}

// silent is a database from which no answer to a take comes.
type silent struct{ pg.Pool }

func (silent) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.New("connection reset")
}

// A take commits after its answer was lost, and after the search for ranges that this relay has
// without knowing. Later events of its keys wait until the next search, which comes at once.
func TestTakeThatCommitsLateKeepsItsKeys(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	db.Exec(insertEvent, "k-1", "k")
	r.DB = silent{db.Pool}
	if err := r.TakeEvents(t.Context(), r.relayID, true); err == nil {
		t.Fatal("it took events")
	}
	r.DB = db.Pool
	r.has(t, agenda.CauseRescue)
	relaytest.Must(t, r.RescueRanges(t.Context(), time.Now(), r.relayID))
	_, err := intake.TakeRange(t.Context(), db.Pool, r.relayID, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	db.Exec(insertEvent, "k-2", "k")
	r.take(t)
	if keys := r.deliver("default"); len(keys) != 0 {
		t.Errorf("sent before k-1: %v", keys)
	}
	r.has(t, agenda.CauseRescue)
	relaytest.Must(t, r.RescueRanges(t.Context(), time.Now(), r.relayID))
	relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
	r.becomes("default k-1 pending", "default k-2 pending")
}

// A crash of the server has undone a take that is still in hand here, and another one has got its
// number: the keys of that one wait for it, and it is rescued.
func TestLostRangeHidesNoneOfItsNumber(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	db.Exec(insertEvent, "k-1", "k")
	unknown, err := intake.TakeRange(t.Context(), db.Pool, r.relayID, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	lost := intake.RangeRef{Seq: unknown.Seq, Fence: unknown.Fence - 2}
	r.Hands.add(lost)
	db.Exec(insertEvent, "k-2", "k")
	r.take(t)
	if keys := r.deliver("default"); len(keys) != 0 {
		t.Errorf("sent before k-1: %v", keys)
	}
	relaytest.Must(t, r.RescueRanges(t.Context(), time.Now(), r.relayID))
	relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
	r.becomes("default k-1 pending", "default k-2 pending")
}

// Events of a key that has a row follow it through rows.
func TestRangeFollowsARowOfItsKey(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	db.Exec(insertEvent, "k-1", "k")
	r.take(t)
	l := r.Lanes.Get("default")
	run, _ := l.NextRun(time.Now())
	decided := policy.Decide(policy.Result{Reason: policy.ReasonServerError, StatusCode: 500, Posted: true}, policy.Circumstances{
		Attempt: 1, Ordered: true, Retry: policy.RetryPolicy{Schedule: []time.Duration{time.Hour}}.WithDefaults(),
	})
	if behind := l.StopKey("k"); len(behind) != 0 {
		t.Fatalf("%d wait behind the only one", len(behind))
	}
	r.Settler.Settle(run[0].Settlement(decided, time.Now(), 0))
	r.becomes("default k-1 pending later")
	db.Exec(insertEvent, "k-2", "k")
	db.Exec(insertEvent, "j-1", "j")
	r.take(t)
	testkit.Equal(t, "sent", r.deliver("default"), []string{"j-1"})
	r.becomes("default k-1 pending later", "default k-2 pending", "default j-1 delivered")
}

// What has become due of a key joins it before the events of a new range, which follow it.
func TestRowThatIsDueJoinsBeforeARange(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at) VALUES ('t', '{}', 'scheduled', 'k', now() + interval '1 hour')`)
	r.take(t)
	r.becomes("default scheduled pending later")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute'`)
	db.Exec(insertEvent, "k-1", "k")
	r.take(t)
	relaytest.Eventually(t, "the row has joined its key", func() bool {
		relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
		relaytest.Must(t, r.Joins.Run(t.Context(), r.Complete))
		return relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE joined IS NOT NULL`) == 2
	})
	r.becomes("default scheduled pending", "default k-1 pending")
	if first := relaytest.Row[string](db, `SELECT o.idempotency_key FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id ORDER BY d.joined, d.event_id LIMIT 1`); first != "scheduled" {
		t.Errorf("%s is the first of its key", first)
	}
}

// What a dead relay had in hand becomes rows, which say that a relay may have died of them. It
// waits for keys that a living relay has.
func TestRangesOfADeadRelayBecomeRows(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	const dead = 9999
	other, err := session.Register(t.Context(), db.Pool, false, "other", "", time.Hour)
	relaytest.Must(t, err)
	takeAs := func(relayID int32) (taken intake.Range) {
		relaytest.Eventually(t, "a range", func() bool {
			taken, err = intake.TakeRange(t.Context(), db.Pool, relayID, intake.Terms{Events: 10, Inline: 1 << 20, Promised: time.Hour}, false)
			relaytest.Must(t, err)
			return len(taken.Events) > 0
		})
		return taken
	}
	db.Exec(insertEvent, "k-1", "k")
	theirs := takeAs(other)
	db.Exec(insertEvent, "free", nil)
	takeAs(dead)
	db.Exec(insertEvent, "k-2", "k")
	takeAs(dead)
	r := start(t, db, "default")
	relaytest.Must(t, r.RescueRanges(t.Context(), time.Now(), r.relayID))
	r.becomes("default free pending")
	r.has(t, agenda.CauseAwaitedKeys)
	db.Exec(`DELETE FROM outbox_range WHERE seq = $1`, theirs.Seq)
	relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
	r.becomes("default free pending", "default k-2 pending")
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE rescues = 1 AND not_after > now()`); n != 2 {
		t.Errorf("%d of 2 are known as rescued, with their promise", n)
	}
}

// What a taker knows of a server, it forgets when another one may be in its place.
func TestForgetsWhatAnotherServerMayNotKnow(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	relaytest.Must(t, r.CheckOrigin(t.Context()))
	db.Exec(insertEvent, "k-1", "k")
	r.take(t)
	if len(r.awaitedKeys()) != 0 || r.Complete.IsZero() || r.routes == nil {
		t.Errorf("after a take: %+v", r.taken)
	}
	r.Forget()
	if r.routes != nil || !r.Complete.IsZero() {
		t.Errorf("after a failover: %+v", r.taken)
	}
}

// Events join their keys by their time if that comes after their insert, and others of the key that
// come after that time follow these.
func TestSchedule(t *testing.T) {
	t.Parallel()
	at := func(second int) time.Time { return time.Unix(1_000_000+int64(second), 0) }
	s := schedule{}
	for i, c := range []struct {
		key           string
		due, inserted time.Time
		wait          time.Duration
		want          time.Time
	}{
		{"k", at(5), at(5), 0, time.Time{}},   // due at its insert
		{"k", at(9), at(6), time.Hour, at(9)}, // not due
		{"k", at(10), at(7), 0, at(10)},       // became due after its insert, before the take
		{"k", at(8), at(8), 0, time.Time{}},   // before that
		{"k", at(12), at(12), 0, at(12)},      // after that
		{"k", at(11), at(11), 0, at(12)},      // the order of ids is kept
		{"other", at(12), at(12), 0, time.Time{}},
	} {
		if got := s.joinsAt(c.key, c.due, c.inserted, c.wait); !got.Equal(c.want) {
			t.Errorf("event %d joins at %s, want %s", i, got, c.want)
		}
	}
}
