package relay

import (
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// takeAs takes what there is for a relay that is not running.
func takeAs(db *relaytest.Database, on pg.DB, relayID int32) {
	db.Helper()
	relaytest.Eventually(db, "a range", func() bool {
		r, err := intake.TakeRange(db.Context(), on, relayID, intake.Terms{Events: 100, Inline: 1 << 20, Promised: time.Hour}, false)
		relaytest.Must(db, err)
		return r.Found == intake.Taken && len(r.Events) > 0
	})
}

const deadRelay = 9999

// A range of a dead relay waits until a living one has no earlier event of its keys in hand. Until
// then nothing that follows in any of its keys is sent, also behind an event that joins its key
// meanwhile.
func TestRescuedRangeThatWaitsKeepsItsKeys(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		after string // is the first event of the key k due
		taken []string
		sent  []string
	}{
		"due":                 {"0", []string{"k-2"}, []string{"k-1", "k-2", "k-3"}},
		"joins its key later": {"500 milliseconds", nil, []string{"k-1", "k-3"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.New(t)
			rc := relaytest.NewReceiver(t, nil)
			living := relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version) VALUES ('living', '') RETURNING id`)
			db.Exec(insertKeyedEvent, "j-1", "j")
			takeAs(db, db.Pool, living)
			db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
				VALUES ('t', '{}', 'k-1', 'k', now() + $1::interval), ('t', '{}', 'j-2', 'j', now())`, c.after)
			takeAs(db, db.Pool, deadRelay)
			for _, key := range c.taken {
				db.Exec(insertKeyedEvent, key, "k")
				takeAs(db, db.Pool, deadRelay)
			}
			r := start(t, config(db, to(rc.URL)))
			relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE relay_id = $1`, deadRelay)
			relaytest.Becomes(db, true, `SELECT now() > max(available_at) + interval '100 milliseconds' FROM outbox`)
			db.Exec(insertKeyedEvent, "k-3", "k")
			relaytest.Becomes(db, true, `SELECT taken_at BETWEEN now() - interval '1 minute' AND now() - interval '1.5 seconds' FROM outbox_range WHERE relay_id NOT IN (0, $1) ORDER BY seq DESC LIMIT 1`, living)
			if n := rc.Total(); n > 0 {
				t.Errorf("sent: %v", rc.Keys())
			}
			if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery`); n > 0 && c.taken != nil {
				t.Errorf("%d have rows, which any relay could claim", n)
			}
			db.Exec(`DELETE FROM outbox_relay WHERE id = $1`, living)
			r.settles(t, policy.Delivered, 2+len(c.sent))
			testkit.Equal(t, "sent", slices.DeleteFunc(rc.Keys(), func(key string) bool { return key[0] == 'j' }), c.sent)
			if slices.Index(rc.Keys(), "j-1") > slices.Index(rc.Keys(), "j-2") {
				t.Errorf("%v", rc.Keys())
			}
		})
	}
}

// A relay that takes over a range while it has earlier events of its keys in hand makes rows of
// these with it. Otherwise a third relay would claim what follows.
func TestRescueMakesRowsOfEarlierEventsToo(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	g, rc := relaytest.NewGated(t, "k-1")
	r := start(t, config(db, to(rc.URL)))
	r.relayID()
	db.Exec(insertKeyedEvent, "k-1", "k")
	<-g.Arrived
	lock := db.Begin() // k-1 gets no row meanwhile
	_, err := lock.Exec(t.Context(), `SELECT FROM outbox_range ORDER BY seq DESC LIMIT 1 FOR UPDATE`)
	relaytest.Must(t, err)
	take := db.Begin()
	_, err = take.Exec(t.Context(), `LOCK TABLE outbox_range IN SHARE ROW EXCLUSIVE MODE`)
	relaytest.Must(t, err)
	db.Exec(insertKeyedEvent, "k-2", "k")
	takeAs(db, take, deadRelay)
	relaytest.Must(t, take.Commit(t.Context()))
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE relay_id = $1`, deadRelay)
	relaytest.Must(t, lock.Commit(t.Context()))
	relaytest.Becomes(db, 2, `SELECT count(*) FROM outbox_delivery`)
	if alone := relaytest.Row[bool](db, `SELECT (array_agg(d.xmin::text::bigint ORDER BY o.idempotency_key))[1] > max(d.xmin::text::bigint) FILTER (WHERE o.idempotency_key = 'k-2')
		FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id`); alone {
		t.Error("the row of k-2 was written before that of k-1")
	}
	g.Open()
	r.settles(t, policy.Delivered, 2)
}

// leaveUndue runs a relay until n events, late-1 and so on, of the key k have rows and are not due.
func leaveUndue(t *testing.T, db *relaytest.Database, url string, n int) {
	t.Helper()
	r := start(t, config(db, to(url)))
	later(db, "late", "k", n, "1 hour")
	relaytest.Becomes(db, n, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`)
	r.stop()
}

// What became due before a dead relay took later events of its key goes before these.
func TestRescuedEventsFollowWhatWasDueBeforeThem(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	leaveUndue(t, db, rc.URL, 2)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	db.InsertKeyed("k", 1, 2)
	takeAs(db, db.Pool, deadRelay)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`); n != 2 {
		t.Fatalf("%d have not joined their key, want 2", n)
	}
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 4)
	if got, want := rc.Keys(), []string{"late-1", "late-2", "k-1", "k-2"}; !slices.Equal(got, want) {
		t.Errorf("sent: %v; want %v", got, want)
	}
}

// What is left of a range of a dead relay follows what became due before it, and that follows the
// events of the range that have rows.
func TestRestOfARescuedRangeFollowsItsRows(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	leaveUndue(t, db, rc.URL, 1)
	db.InsertKeyed("k", 1, 1)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	db.InsertKeyed("k", 2, 2)
	takeAs(db, db.Pool, deadRelay)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, joined)
		SELECT o.id, 'default', 'k', (SELECT max(seq) FROM outbox_range) << 22 FROM outbox o WHERE idempotency_key = 'k-1'`)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 3)
	if got, want := rc.Keys(), []string{"k-1", "late-1", "k-2"}; !slices.Equal(got, want) {
		t.Errorf("sent: %v; want %v", got, want)
	}
}

// A range of a dead relay that alone served a destination goes there all the same: the dead relay
// may have sent its events, and had no delivery.
func TestRescuedRangeTakesTheRoutesOfItsRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "a", "b")
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(1, "key")
	takeAs(db, db.Pool, deadRelay)
	r := start(t, config(db, named("b", to(rc.URL))))
	r.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE destination = 'a' AND status = 'pending'`)
	relaytest.Becomes(db, "b", `SELECT string_agg(destination, ' ') FROM outbox_route`)
}

// A relay that stops leaves a range that waits for keys of another relay. It goes where the relay
// routed it.
func TestStopLeavesTheRoutesOfARangeThatWaits(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "a")
	rc := relaytest.NewReceiver(t, nil)
	living := relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version) VALUES ('living', '') RETURNING id`)
	db.Exec(insertKeyedEvent, "j-1", "j")
	takeAs(db, db.Pool, living)
	a := start(t, config(db, named("a", to(rc.URL))))
	db.Exec(insertKeyedEvent, "j-2", "j")
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_range WHERE relay_id = $1 AND ended_at IS NULL`, a.relayID())
	b := start(t, config(db, named("b", to(rc.URL))))
	relaytest.Becomes(db, 2, `SELECT count(*) FROM outbox_route`)
	left := a.relayID()
	a.stop()
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE relay_id = $1 AND ended_at IS NULL`, left)
	db.Exec(`DELETE FROM outbox_relay WHERE id = $1`, living)
	b.settles(t, policy.Delivered, 2)
	relaytest.Becomes(db, 2, `SELECT count(*) FROM outbox_delivery WHERE destination = 'a' AND status = 'pending'`)
	relaytest.Becomes(db, "b", `SELECT string_agg(destination, ' ') FROM outbox_route`)
}

// A relay that was taken for dead registers again, under another number. What it had in hand is
// another's by then: it sends nothing more of it under the old one.
func TestRelayTakenForDeadSendsNothingOfBefore(t *testing.T) {
	t.Parallel()
	const events = 20
	for name, insert := range map[string]func(db *relaytest.Database){
		"free":       func(db *relaytest.Database) { db.Insert(events, "k") },
		"of one key": func(db *relaytest.Database) { db.InsertKeyed("k", 1, events) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.New(t)
			g, rc := relaytest.NewGated(t, "k-1")
			d := to(rc.URL)
			d.MaxInFlight = 1
			r := start(t, config(db, d))
			before := r.relayID()
			insert(db)
			<-g.Arrived
			other := start(t, config(db, to(rc.URL)))
			other.relayID()
			db.Exec(`DELETE FROM outbox_relay WHERE id = $1`, before)
			db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
			relaytest.Eventually(t, "another number", func() bool {
				now, alive := r.current()
				return alive && now != before
			})
			g.Open()
			relaytest.Becomes(db, events, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
			r.stop()
			other.stop()
			for key, n := range counted(rc.Keys()) {
				if n > 1 && key != "k-1" {
					t.Errorf("%s was sent %d times", key, n)
				}
			}
		})
	}
}

// A relay that has lost its session sends nothing more of what it has before it knows that this is
// still its own.
func TestRelayWithoutItsSessionSendsNothing(t *testing.T) {
	t.Parallel()
	const events = 5
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t, "k-1")
	d := to(rc.URL)
	d.MaxInFlight = 1
	r := start(t, config(db, d))
	r.relayID()
	db.Insert(events, "k")
	<-g.Arrived
	db.Exec(`ALTER TABLE outbox_relay RENAME TO away`)
	db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
	r.await(t, "a lost session", func(o *observer) bool { return o.failures["session"] > 0 })
	g.Open()
	tried := sees(r.observer, func(o *observer) int { return o.failures["session"] })
	r.await(t, "further attempts to register", func(o *observer) bool { return o.failures["session"] > tried+1 })
	testkit.Equal(t, "sent", rc.Keys(), []string{"k-1"})
	db.Exec(`ALTER TABLE away RENAME TO outbox_relay`)
	relaytest.Becomes(db, events, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	testkit.Equal(t, "requests", rc.Total(), events)
}
