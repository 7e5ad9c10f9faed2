package settle

import (
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A claim that is gone from its row is restored only where the row is certainly the one that was
// sent, and untouched since.
func TestLostClaimsAreRestoredWithCare(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change  string // to the row, as the crash left it
		outcome policy.Outcome
		key     string
		want    string // status, claim and attempts in the end
	}{
		"delivered":                        {"claim = 0", policy.Delivered, "key-1", "delivered 1000 1"},
		"an older lease has ended":         {"claim = 7, claimed_by = 9, lease_expires_at = now()", policy.Delivered, "key-1", "delivered 1000 1"},
		"to be retried":                    {"claim = 0", policy.Retry, "key-1", "pending 1000 1"},
		"failed":                           {"claim = 0", policy.Fail, "key-1", "failed 1000 1"},
		"another event got its id":         {"claim = 0", policy.Delivered, "key-2", "pending 0 0"},
		"claimed by another relay since":   {"claim = 1001", policy.Delivered, "key-1", "pending 1001 0"},
		"another relay is sending it":      {"claim = 7, claimed_by = 9, lease_expires_at = now() + interval '1 minute'", policy.Delivered, "key-1", "pending 7 0"},
		"attempted by another relay since": {"claim = 7, attempts = 1", policy.Delivered, "key-1", "pending 7 1"},
		"discarded":                        {"claim = 0, status = 'discarded'", policy.Delivered, "key-1", "discarded 0 0"},
		"given back unsent":                {"claim = 0", policy.Hold, "key-1", "pending 0 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Insert(1, "key")
			db.Exec(`UPDATE outbox_delivery SET ` + c.change)
			s := Settlement{
				EventID: 1, Destination: "default", Fence: fence, NotAfter: time.Now().Add(time.Hour), Key: &c.key,
				Decision: policy.Decision{Outcome: c.outcome, Result: policy.Result{Reason: policy.ReasonServerError, Posted: c.outcome != policy.Hold}, Delay: time.Minute},
			}
			for range 2 {
				_, _, err := store{pool: db.Pool}.settle(t.Context(), 5, &batch{settlements: []Settlement{s}, apart: true})
				relaytest.Must(t, err)
			}
			got := relaytest.Row[string](db, `SELECT concat_ws(' ', status, claim, attempts) FROM outbox_delivery`)
			testkit.Equal(t, "the row", got, c.want)
		})
	}
}

// With the claim a crash may undo that the delivery joined its ordering key when it became due, and
// that it was released from behind another one. Its retry holds the key again, and is found.
func TestLostPlaceInAKeyIsRestored(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	r.InsertKeyed("k", 1, 2)
	r.Exec(`UPDATE outbox_delivery SET joined = NULL, blocked_by = 1 WHERE event_id = 2`)
	key, ordering := relaytest.Row[string](r.Database, `SELECT idempotency_key FROM outbox WHERE id = 2`), "k"
	s := with(Settlement{
		EventID: 2, Destination: "default", Fence: fence, LeaseEnds: time.Now().Add(time.Hour), StartedAt: time.Now(), NotAfter: time.Now().Add(time.Hour),
		Key: &key, OrderingKey: &ordering, Joined: 5 << 22,
	}, policy.Retry)
	r.settle(s)
	r.awaitsWritten(1)
	testkit.Equal(t, "the row", relaytest.Row[string](r.Database, `SELECT concat_ws(' ', joined >> 22, attempts, blocked_by) FROM outbox_delivery WHERE event_id = 2`), "5 1")
}

// What is remembered has an end: in number, and once the session has shown that the server lives.
func TestRecentSettlementsAreForgotten(t *testing.T) {
	t.Parallel()
	w := New()
	r := &w.recent
	begun := time.Now()
	for i := range 3 * recentMost / 500 {
		r.add(begun.Add(time.Duration(i)*time.Second), make([]Settlement, 500), nil)
	}
	if r.size != recentMost || len(r.all()) != recentMost/500 {
		t.Errorf("%d settlements in %d batches are kept", r.size, len(r.all()))
	}
	newest := begun.Add(time.Duration(3*recentMost/500-1) * time.Second)
	w.ForgetDurable(newest)
	if got := len(r.all()); got != 4 { // of 0, 1, 2 and 3 s ago
		t.Errorf("%d batches are kept", got)
	}
	w.ForgetDurable(newest.Add(time.Minute))
	if r.size != 0 || len(r.all()) != 0 {
		t.Errorf("%d settlements are kept for ever", r.size)
	}
}

// A crash of the server undoes the last settlements. They are written again, although the database
// refuses one of them.
func TestWriteAgain(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(6, "key")
	r.settle(of[0], of[1], with(of[2], policy.Retry), with(of[3], policy.Hold), of[4])
	r.awaitsWritten(5)
	r.settle(with(of[5], policy.Fail)) // waits for the disk, and is not lost
	r.end()
	want := r.rows()
	const undo = `UPDATE outbox_delivery SET status = 'pending', attempts = 0, claim = $1, claimed_by = $2, lease_expires_at = now() + interval '1 hour',
		last_http_status = NULL, last_reason = NULL, last_error = NULL, next_attempt_at = now(), delivered_at = NULL, last_attempt_at = NULL
		WHERE event_id BETWEEN $3 AND $4`
	r.Exec(undo, fence, relay, 2, 5)
	r.Refuse("UPDATE ON outbox_delivery", "NEW.event_id = 5 AND NEW.claimed_by IS NULL")
	relaytest.Must(t, r.settler.WriteAgain(t.Context(), r.settler.DB, relay))
	want[4] = "5 pending 0 claimed"
	r.wantRows(want...)
	if !strings.Contains(r.logged.String(), `"deliveries":3,"message":"wrote outcomes again`) || len(r.failed) == 0 {
		t.Errorf("%v: %s", r.failed, r.logged.String())
	}
	r.settler.ForgetDurable(time.Now().Add(time.Hour))
	r.Exec(undo, fence, relay, 1, 1)
	relaytest.Must(t, r.settler.WriteAgain(t.Context(), r.settler.DB, relay))
	want[0] = "1 pending 0 claimed" // what was durable is not written again
	r.wantRows(want...)
}

// A crash of the server undoes what one transaction wrote of a range, and the database then refuses
// a part of that: the range does not end as if all of it were there.
func TestWriteAgainOfARangeIsWhole(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(3, "key")
	of := r.take()
	of.keepYoung()
	d := of.Deliveries
	r.settle(with(d[0].settlement(), policy.Retry), with(d[1].settlement(), policy.Retry))
	r.begin()
	r.awaitsWritten(2)
	r.Exec(`DELETE FROM outbox_delivery`)
	r.Refuse("INSERT ON outbox_delivery", "NEW.event_id = 2")
	relaytest.Must(t, r.settler.WriteAgain(t.Context(), r.settler.DB, relay))
	r.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	r.settle(d[2].settlement())
	r.awaits("the end of the range", func() bool { return len(r.ended) == 1 })
	r.wantRows("1 pending 1 500 server_error no later", "2 pending 1 500 server_error no later", "3 delivered 1 204 dated")
}

// A stranger keeps a lock while the session writes again what a crash has undone. The relay enters
// nevertheless: what needs the lock is left out, and only that.
func TestWriteAgainWaitsForNoLock(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(1, "key")
	locked := r.take()
	r.Insert(1, "other")
	other := r.take()
	locked.keepYoung()
	other.keepYoung()
	r.begin()
	r.settle(locked.Deliveries[0].settlement())
	r.awaitsWritten(1)
	r.settle(other.Deliveries[0].settlement())
	r.awaitsWritten(2)
	r.end()
	r.Exec(`DELETE FROM outbox_delivery`)
	r.Exec(`UPDATE outbox_range SET ended_at = NULL WHERE seq IN ($1, $2)`, locked.Seq, other.Seq)
	operator := r.Begin()
	_, err := operator.Exec(t.Context(), `INSERT INTO outbox_delivery (event_id, destination) VALUES (1, 'default')`)
	relaytest.Must(t, err)
	session := r.waiting()
	relaytest.Must(t, r.settler.WriteAgain(t.Context(), session, relay))
	r.wantRows("2 delivered 1 204 dated")
	relaytest.Must(t, operator.Rollback(t.Context()))
	relaytest.Must(t, r.settler.WriteAgain(t.Context(), session, relay))
	r.wantRows("1 delivered 1 204 dated", "2 delivered 1 204 dated")
}
