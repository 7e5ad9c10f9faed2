package settle

import (
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// openRanges returns how many ranges have not ended.
func (r *room) openRanges() int {
	r.Helper()
	return relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
}

// Each delivery of a range is written once, with its outcome, and the last one ends the range.
func TestOutcomesOfARange(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(4, "key")
	of := r.take()
	r.Insert(1, "next")
	next := r.take()
	of.keepYoung()
	next.keepYoung()
	r.begin()
	d := of.Deliveries
	r.settle(d[0].settlement(), with(d[1].settlement(), policy.Retry), with(d[2].settlement(), policy.Hold), next.Deliveries[0].settlement())
	r.awaitsWritten(4)
	testkit.Equal(t, "ranges open", r.openRanges(), 1)
	r.settle(with(d[3].settlement(), policy.Fail))
	r.end()
	if got := r.rows(); !slices.Equal(got[:2], []string{"1 delivered 1 204 dated", "2 pending 1 500 server_error no later"}) ||
		!slices.Equal(got[3:], []string{"4 failed 1 500 server_error no", "5 delivered 1 204 dated"}) {
		t.Errorf("%q", got)
	}
	// Nothing was sent: the receiver has not seen the promise of the third.
	if !relaytest.Row[bool](r.Database, `SELECT status = 'pending' AND attempts = 0 AND claimed_by IS NULL AND not_after IS NULL FROM outbox_delivery WHERE event_id = 3`) {
		t.Errorf("%q", r.rows())
	}
	if !slices.Equal(r.ended, []intake.RangeRef{next.Ref(), of.Ref()}) {
		t.Errorf("ended %v", r.ended)
	}
	if n := r.openRanges(); n != 0 || r.stale != 0 || len(r.failed) != 0 {
		t.Errorf("%d ranges are open, %d stale, %v", n, r.stale, r.failed)
	}
	testkit.Equal(t, "failures alerted", relaytest.Row[int](r.Database, `SELECT count FROM outbox_alert WHERE rule = 'failed'`), 1)
}

// What is in hand for too long gets a row, which this relay has claimed, and the range ends. Its
// settlement then finds the row.
func TestOldRangesGetRows(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(3, "key")
	of := r.take()
	of.Deliveries[2].HasRow = true // of a range that was taken over
	of.open--
	r.begin()
	r.awaits("the end of the range", func() bool { return len(r.ended) == 1 })
	r.wantRows("1 pending 0 claimed", "2 pending 0 claimed")
	testkit.Equal(t, "ranges open", r.openRanges(), 0)
	r.settle(of.Deliveries[0].settlement(), with(of.Deliveries[1].settlement(), policy.Retry))
	r.end()
	r.wantRows("1 delivered 1 204 dated", "2 pending 1 500 server_error no later")
	testkit.Equal(t, "stale", r.stale, 0)
}

// When a delivery with an ordering key becomes pending, the earlier ones of its key get rows with
// it, and no others.
func TestEarlierOfAKeyGetRows(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, CASE WHEN i % 2 = 0 THEN 'even' ELSE 'odd' END FROM generate_series(1, 6) i`)
	of := r.take()
	of.keepYoung()
	r.begin()
	d := of.Deliveries
	r.settle(d[1].settlement()) // the row of what was delivered holds nothing up
	r.awaitsWritten(1)
	r.wantRows("2 delivered 1 204 dated")
	hold := with(d[4].settlement(), policy.Hold)
	hold.Spilled = true
	r.settle(hold)
	r.awaitsWritten(2)
	got := relaytest.Rows[string](r.Database, `SELECT concat_ws(' ', event_id, status, claimed_by) FROM outbox_delivery ORDER BY 1`)
	if want := []string{"1 pending 1", "2 delivered", "3 pending 1", "5 pending"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	testkit.Equal(t, "ranges open", r.openRanges(), 1)
}

// A crash of the server undoes what it has acknowledged of a range, and the last delivery of that
// is settled before the session knows of the crash: the range does not end without the rows of the
// others, which are written again.
func TestCrashUndoesAPartOfARange(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(5, "key")
	of := r.take()
	of.keepYoung()
	r.begin()
	d := of.Deliveries
	r.settle(d[0].settlement())
	r.awaitsWritten(1)
	r.settle(d[1].settlement(), with(d[2].settlement(), policy.Retry))
	r.awaitsWritten(3)
	r.settle(d[3].settlement())
	r.awaitsWritten(4)
	r.Exec(`DELETE FROM outbox_delivery WHERE event_id > 1`)
	r.settle(d[4].settlement())
	r.awaitsWritten(5)
	r.wantRows("1 delivered 1 204 dated", "2 delivered 1 204 dated", "3 pending 1 500 server_error no later", "4 delivered 1 204 dated", "5 delivered 1 204 dated")
	r.awaits("the end of the range", func() bool { return slices.Equal(r.ended, []intake.RangeRef{of.Ref()}) })
	r.end()
	testkit.Equal(t, "ranges open", r.openRanges(), 0)
	r.wantRows("1 delivered 1 204 dated", "2 delivered 1 204 dated", "3 pending 1 500 server_error no later", "4 delivered 1 204 dated", "5 delivered 1 204 dated")
}

// The same holds for rows that were made of what is in hand, and for a delivery that joins its
// ordering key later, whoever learns of the crash first.
func TestCrashUndoesRowsOfARange(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"settler", "session"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			r := newRoom(t, true)
			r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, CASE WHEN i < 4 THEN 'k' END FROM generate_series(1, 5) i`)
			of := r.take()
			of.keepYoung()
			d := of.Deliveries
			d[3].Scheduled = time.Now().Add(time.Hour)
			r.begin()
			r.settle(with(d[2].settlement(), policy.Hold)) // and rows of what precedes it in its key
			r.awaitsWritten(1)
			r.settle(with(d[3].settlement(), policy.Hold))
			r.awaitsWritten(2)
			r.Exec(`DELETE FROM outbox_delivery`)
			if first == "session" {
				relaytest.Must(t, r.settler.WriteAgain(t.Context(), r.settler.DB, relay))
			}
			r.settle(d[4].settlement())
			r.awaitsWritten(3)
			r.awaits("the end of the range", func() bool { return slices.Equal(r.ended, []intake.RangeRef{of.Ref()}) })
			r.end()
			testkit.Equal(t, "ranges open", r.openRanges(), 0)
			testkit.Equal(t, "rows", relaytest.Rows[string](r.Database, `SELECT concat_ws(' ', event_id, status, claimed_by) FROM outbox_delivery ORDER BY 1`),
				[]string{"1 pending 1", "2 pending 1", "3 pending", "4 pending", "5 delivered"})
		})
	}
}

// Another relay has taken a range over. What this relay has in hand of it is void.
func TestLostRangeChangesNothing(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(3, "key")
	of := r.take()
	of.keepYoung()
	r.begin()
	r.settle(of.Deliveries[0].settlement())
	r.awaitsWritten(1)
	r.Exec(`DELETE FROM outbox_relay WHERE id = $1`, relay)
	taken, found, err := intake.RescueRange(t.Context(), r.settler.DB, 2, nil, 1<<20)
	relaytest.Must(t, err)
	if !found || taken.Seq != of.Seq {
		t.Fatalf("%+v is rescued", taken)
	}
	r.settle(of.Deliveries[1].settlement(), of.Deliveries[2].settlement())
	r.end()
	r.wantRows("1 delivered 1 204 dated")
	if r.stale != 2 || len(r.written) != 3 || !slices.Equal(r.ended, []intake.RangeRef{of.Ref()}) || r.openRanges() != 1 {
		t.Errorf("%d stale, %d written, ended %v", r.stale, len(r.written), r.ended)
	}
}

// A crash of the server undoes a take, and its number is given out again, to this relay, before the
// settler has written what it had of the first range. What is settled of that one says nothing of
// the other: this one does not end, and its outcomes are written.
func TestRangeWhoseNumberIsGivenOutAgain(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.Insert(1, "key")
	undone := r.take()
	r.Exec(`DELETE FROM outbox_range WHERE seq = $1`, undone.Seq)
	r.Insert(2, "next")
	again := r.take()
	undone.keepYoung()
	again.keepYoung()
	if again.Seq != undone.Seq || len(again.Deliveries) != 3 {
		t.Fatalf("%d has %d events, after %d", again.Seq, len(again.Deliveries), undone.Seq)
	}
	r.settle(undone.Deliveries[0].settlement(), again.Deliveries[1].settlement())
	r.begin()
	r.awaitsWritten(2)
	r.wantRows("2 delivered 1 204 dated")
	testkit.Equal(t, "ranges open", r.openRanges(), 1)
	r.settle(again.Deliveries[0].settlement(), with(again.Deliveries[2].settlement(), policy.Retry))
	r.end()
	r.wantRows("1 delivered 1 204 dated", "2 delivered 1 204 dated", "3 pending 1 500 server_error no later")
	testkit.Equal(t, "ranges open", r.openRanges(), 0)
	testkit.Equal(t, "stale", r.stale, 1)
}

// The database refuses the row of a delivery for longer than its lease. Nothing else shows the
// delivery, or makes a row of one that joins its ordering key later. So it is tried again, and its
// lane keeps room and key for it.
func TestDeliveryWithoutARowIsNotGivenUp(t *testing.T) {
	t.Parallel()
	for name, scheduled := range map[string]bool{"joins its key later": true, "sent": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRoom(t, true)
			r.Insert(2, "key")
			of := r.take()
			of.keepYoung()
			r.Refuse("INSERT ON outbox_delivery", "NEW.event_id = 2")
			d := &of.Deliveries[1]
			d.LeaseEnds = time.Now().Add(100 * time.Millisecond)
			s := with(d.settlement(), policy.Retry)
			want := "2 pending 1 500 server_error no later"
			if scheduled {
				d.Scheduled = time.Now().Add(time.Hour)
				s = with(s, policy.Hold)
				s.Spilled, want = true, "2 pending 0 later"
			}
			r.begin()
			r.settle(of.Deliveries[0].settlement(), s)
			r.awaitsWritten(1)
			r.awaits("tries after the lease", func() bool { return time.Now().After(d.LeaseEnds) && len(r.failed) > 6 })
			r.wantRows("1 delivered 1 204 dated")
			testkit.Equal(t, "ranges open", r.openRanges(), 1)
			r.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
			r.awaitsWritten(2)
			r.end()
			r.wantRows("1 delivered 1 204 dated", want)
			testkit.Equal(t, "ranges open", r.openRanges(), 0)
			if len(r.dropped) > 0 || r.written[1].Spilled != scheduled {
				t.Errorf("dropped %v, written %+v", r.dropped, r.written[1])
			}
		})
	}
}

// The database refuses the outcome of a delivery without a row whose lease has ended. The same
// batch makes its row, for a later one of its key: the outcome is written into that.
func TestRowIsMadeBesideARefusal(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.InsertKeyed("k", 1, 2)
	of := r.take()
	of.keepYoung()
	r.Refuse("INSERT ON outbox_delivery", "NEW.event_id = 1 AND NEW.claimed_by IS NULL")
	of.Deliveries[0].LeaseEnds = time.Now()
	r.settle(of.Deliveries[0].settlement(), with(of.Deliveries[1].settlement(), policy.Retry))
	r.begin()
	r.awaitsWritten(2)
	r.end()
	r.wantRows("1 delivered 1 204 dated", "2 pending 1 500 server_error no later")
	if len(r.dropped) > 0 || r.written[1].Spilled || r.stale > 0 {
		t.Errorf("dropped %v, %d stale, written %+v", r.dropped, r.stale, r.written[1])
	}
}

// The database refuses one row of what is left of old ranges. The others get theirs, but for those
// that follow it in its ordering key, and the other ranges end.
func TestRefusedRowKeepsNoOtherRange(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.InsertKeyed("k", 1, 1)
	r.Insert(1, "first")
	refused := r.take()
	r.Insert(2, "second")
	other := r.take()
	r.InsertKeyed("k", 2, 2)
	r.InsertKeyed("j", 1, 1)
	follows := r.take()
	r.Refuse("INSERT ON outbox_delivery", "NEW.event_id = 1")
	r.begin()
	r.awaits("the end of the other range", func() bool { return slices.Equal(r.ended, []intake.RangeRef{other.Ref()}) })
	relaytest.Becomes(r.Database, "2 3 4 6", `SELECT string_agg(event_id::text, ' ' ORDER BY event_id) FROM outbox_delivery`)
	r.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	r.awaits("the end of all ranges", func() bool {
		return slices.Contains(r.ended, refused.Ref()) && slices.Contains(r.ended, follows.Ref())
	})
	testkit.Equal(t, "ranges open", r.openRanges(), 0)
}

// A person locks the row of a range. What belongs to others is written beside it, and no statement
// waits for the lock.
func TestLockedRangeKeepsNoOther(t *testing.T) {
	t.Parallel()
	r := newRoom(t, true)
	r.settler.DB = r.waiting()
	r.Insert(1, "key")
	locked := r.take()
	r.Insert(2, "other")
	other := r.take()
	operator := r.Begin()
	_, err := operator.Exec(t.Context(), `SELECT FROM outbox_range WHERE seq = $1 FOR UPDATE`, locked.Seq)
	relaytest.Must(t, err)
	locked.keepYoung()
	other.keepYoung()
	r.settle(locked.Deliveries[0].settlement(), other.Deliveries[0].settlement(), other.Deliveries[1].settlement())
	r.begin()
	r.awaitsWritten(2)
	r.wantRows("2 delivered 1 204 dated", "3 delivered 1 204 dated")
	relaytest.Must(t, operator.Rollback(t.Context()))
	r.end()
	r.wantRows("1 delivered 1 204 dated", "2 delivered 1 204 dated", "3 delivered 1 204 dated")
	testkit.Equal(t, "ranges open", r.openRanges(), 0)
}
