package take

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What is taken of a key whose rows cannot be read gets rows that join the key later, in the order
// in which it was taken, although its transactions began in another one. The other keys of the
// range are sent, and the relay does not ask again all the time.
func TestUnreadableKeyWaitsAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	pool := &relaytest.DamagedPool{Pool: db.Pool, Words: []string{"bad"}}
	told := 0
	r.DB, r.Failed = pool, func(string, error) { told++ }
	older := db.Begin()
	_, err := older.Exec(t.Context(), `SELECT now()`)
	relaytest.Must(t, err)
	db.InsertKeyed("good", 1, 2)
	db.InsertKeyed("bad", 1, 2)
	r.take(t)
	testkit.Equal(t, "sent", r.deliver("default"), []string{"good-1", "good-2"})
	asked := pool.Failed.Load()
	_, err = older.Exec(t.Context(), insertEvent, "bad-3", "bad")
	relaytest.Must(t, err)
	relaytest.Must(t, older.Commit(t.Context()))
	r.take(t)
	nothingWaits(t, r)
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_delivery WHERE ordering_key = 'bad' AND joined IS NULL AND status = 'pending'`)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
	testkit.Equal(t, "told", told, 1)
	testkit.Equal(t, "failed statements", pool.Failed.Load(), asked)
	testkit.Equal(t, "ranges wait", len(r.awaiting), 0)

	pool.Words = nil
	of := r.unreadable[badKey]
	of.again = time.Now()
	r.unreadable[badKey] = of
	db.InsertKeyed("bad", 4, 4)
	r.take(t) // and joins what is due to the key
	testkit.Equal(t, "order", relaytest.Rows[string](db, `SELECT idempotency_key FROM outbox_delivery d JOIN outbox o ON o.id = event_id
		WHERE d.ordering_key = 'bad' ORDER BY d.joined, event_id`), []string{"bad-1", "bad-2", "bad-3"})
	r.has(t, agenda.CauseAwaitedKeys)
	nothingWaits(t, r)
	testkit.Equal(t, "unreadable keys", len(r.unreadable), 0)
}

// The rows of a key can be read again. An event whose transaction began before what was taken
// meanwhile follows that nevertheless, also where its rows could be read, but not joined.
func TestOlderEventDoesNotPassWhatWasUnreadable(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	pool := &relaytest.DamagedPool{Pool: db.Pool, Words: []string{"bad"}}
	r.DB, r.Failed = pool, func(string, error) {}
	older := db.Begin()
	_, err := older.Exec(t.Context(), `SELECT now()`)
	relaytest.Must(t, err)
	db.InsertKeyed("bad", 1, 2)
	r.take(t)
	relaytest.Becomes(db, 2, `SELECT count(*) FROM outbox_delivery WHERE joined IS NULL`)
	pool.Words = nil
	of := r.unreadable[badKey]
	of.again = time.Time{}
	r.unreadable[badKey] = of
	_, err = older.Exec(t.Context(), insertEvent, "bad-3", "bad")
	relaytest.Must(t, err)
	relaytest.Must(t, older.Commit(t.Context()))
	r.take(t)
	nothingWaits(t, r)
	testkit.Equal(t, "sent", r.deliver("default"), nil)
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_delivery WHERE joined IS NOT NULL`)
	testkit.Equal(t, "order", relaytest.Rows[string](db, `SELECT idempotency_key FROM outbox_delivery d JOIN outbox o ON o.id = event_id
		ORDER BY d.joined, event_id`), []string{"bad-1", "bad-2", "bad-3"})
}

// nothingWaits asks again about the keys of ranges until none waits.
func nothingWaits(t *testing.T, r running) {
	t.Helper()
	relaytest.Eventually(t, "no range waits", func() bool {
		relaytest.Must(t, r.RecheckAwaiting(t.Context(), r.relayID))
		return len(r.awaiting) == 0
	})
}

var badKey = ordering.Key{Destination: "default", Key: "bad"}

// A range of a dead relay does not wait for a key whose rows cannot be read.
func TestRescueDoesNotWaitForAnUnreadableKey(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	r.DB, r.Failed = &relaytest.DamagedPool{Pool: db.Pool, Words: []string{"bad"}}, func(string, error) {}
	db.InsertKeyed("good", 1, 1)
	db.InsertKeyed("bad", 1, 1)
	_, err := intake.TakeRange(t.Context(), db.Pool, 9999, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	relaytest.Must(t, r.RescueRanges(t.Context(), time.Now(), r.relayID))
	r.becomes("default bad-1 pending", "default good-1 pending")
	testkit.Equal(t, "which joins later", relaytest.Rows[string](db, `SELECT ordering_key FROM outbox_delivery WHERE joined IS NULL`), []string{"bad"})
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
}

// The rows of a key cannot be read while a range of a dead relay is open that has earlier events of
// it. What is taken now does not pass these.
func TestUnreadableKeyWaitsForEarlierRanges(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	pool := &relaytest.DamagedPool{Pool: db.Pool, Words: []string{"bad"}}
	r.DB, r.Failed = pool, func(string, error) {}
	db.InsertKeyed("bad", 1, 2)
	_, err := intake.TakeRange(t.Context(), db.Pool, 9999, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	db.InsertKeyed("bad", 3, 4)
	r.take(t)
	testkit.Equal(t, "ranges wait", len(r.awaiting), 1)
	relaytest.Must(t, r.RescueRanges(t.Context(), time.Now(), r.relayID))
	nothingWaits(t, r)
	r.becomes("default bad-1 pending", "default bad-2 pending", "default bad-3 pending", "default bad-4 pending")
	testkit.Equal(t, "order", relaytest.Rows[string](db, `SELECT idempotency_key FROM outbox_delivery d JOIN outbox o ON o.id = event_id
		WHERE d.joined IS NULL ORDER BY d.next_attempt_at, event_id`), []string{"bad-1", "bad-2", "bad-3", "bad-4"})
}

// While rows cannot be read, an event beyond a cut that may have one is not sent without it.
func TestUnreadRowIsNotPassed(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	db.Insert(2, "cut")
	_, err := intake.TakeRange(t.Context(), db.Pool, r.relayID, intake.Terms{Events: 1, Inline: 1 << 20}, true)
	relaytest.Must(t, err)
	db.Insert(2, "beyond")
	found, err := intake.FindBeyond(t.Context(), db.Pool)
	relaytest.Must(t, err)
	_, _, err = intake.WriteBeyond(t.Context(), db.Pool, r.relayID, found.Seq, []intake.BeyondRow{{EventID: found.Events[0].ID, Destination: "default"}})
	relaytest.Must(t, err)
	r.cut, r.blindUntil = true, time.Now().Add(time.Hour)
	for range 3 {
		r.take(t)
	}
	r.becomes("default cut-2 pending", "default beyond-1 pending", "default beyond-2 pending")
	testkit.Equal(t, "sent", r.deliver("default"), nil)
}
