package intake

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What each state of a delivery looks like in its row.
func TestSettle(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 6)
	of := r.take(1, usual)
	promise := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	one := func(event int64, destination string, status Status) NewRow {
		return NewRow{Range: of.Ref(), EventID: event, Destination: destination, Status: status, PayloadBytes: 8}
	}
	retried := one(2, "default", Pending)
	retried.Attempts, retried.Wait, retried.Since, retried.Code, retried.Reason, retried.Error = 1, time.Hour, time.Minute, 503, "server_error", "503"
	retried.NotAfter, retried.OrderingKey = promise, new("k")
	delivered := one(1, "default", Delivered)
	delivered.Attempts, delivered.Code = 1, 204
	behind := one(4, "default", Pending)
	behind.BlockedBy, behind.OrderingKey = 2, new("k")
	inFlight := one(5, "default", Pending)
	inFlight.Lease = time.Minute
	s := NewRows{Relay: 1, Ranges: []RangeRef{of.Ref()}, Deliveries: []NewRow{
		delivered, retried, one(3, "default", "failed"), behind, inFlight, one(6, "", Pending), one(1, "other", "discarded"),
	}}
	done, err := SettleRanges(t.Context(), r.pool, s)
	relaytest.Must(t, err)
	if done.Lost != nil || done.Existing != nil {
		t.Errorf("%+v", done)
	}
	got := relaytest.Rows[string](r.Database, `
		SELECT concat_ws(' ', event_id, destination, status, attempts, last_http_status, last_reason, last_error, ordering_key, blocked_by, claimed_by,
			extract(year FROM not_after),
			CASE WHEN delivered_at IS NOT NULL THEN 'delivered' END,
			CASE WHEN last_attempt_at < now() - interval '50 s' THEN 'a minute ago' WHEN last_attempt_at IS NOT NULL THEN 'now' END,
			CASE WHEN next_attempt_at > now() + interval '50 min' THEN 'in an hour' END,
			CASE WHEN lease_expires_at > now() + interval '50 s' THEN 'leased' END,
			CASE WHEN claim <> $1 THEN 'another fence' END, payload_bytes)
		FROM outbox_delivery ORDER BY event_id, destination`, of.Fence)
	want := []string{
		"1 default delivered 1 204 delivered now 8",
		"1 other discarded 0 8",
		"2 default pending 1 503 server_error 503 k 2030 a minute ago in an hour 8",
		"3 default failed 0 8",
		"4 default pending 0 k 2 8",
		"5 default pending 0 1 leased 8",
		"6  pending 0 8",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	testkit.Equal(t, "ranges are open", relaytest.Row[int](r.Database, `SELECT count(*)::int FROM outbox_range WHERE ended_at IS NULL`), 1)

	// Again, as after a lost acknowledgement, now with the end of the range; a delivery that is
	// given twice is written once.
	s.Ended = s.Ranges
	s.Deliveries = append(s.Deliveries[5:], one(2, "new", Delivered), one(2, "new", Delivered))
	done, err = SettleRanges(t.Context(), r.pool, s)
	relaytest.Must(t, err)
	if done.Lost != nil || !slices.Equal(done.Existing, []int{0, 1, 3}) {
		t.Errorf("%+v", done)
	}
	done, err = SettleRanges(t.Context(), r.pool, s)
	relaytest.Must(t, err)
	if !slices.Equal(done.Lost, []RangeRef{of.Ref()}) || done.Existing != nil {
		t.Errorf("after the end: %+v", done)
	}
}

// The rows of a range stand behind what joined their key before, also those that are written after
// it was delivered: others of the range stand there.
func TestRowsOfARangeKeepTheirOrder(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 3)
	of := r.take(1, usual)
	r.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, joined) VALUES (1, 'default', 'k', 1)`)
	for _, event := range []int64{2, 3} {
		_, err := SettleRanges(t.Context(), r.pool, NewRows{Relay: 1, Ranges: []RangeRef{of.Ref()}, Deliveries: []NewRow{
			{Range: of.Ref(), EventID: event, Destination: "default", Status: Pending, OrderingKey: new("k")},
		}})
		relaytest.Must(t, err)
		r.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id = 1`)
	}
	got, want := relaytest.Rows[int64](r.Database, `SELECT joined FROM outbox_delivery ORDER BY event_id`), []int64{1, of.Seq << 22, of.Seq << 22}
	if !slices.Equal(got, want) {
		t.Errorf("places: %v; want %v", got, want)
	}
}

// Nothing joins a key past a row that another session has locked: another relay may be about to
// join it.
func TestNothingJoinsPastALockedRow(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 3)
	r.take(1, usual)
	r.Exec(`UPDATE outbox_range SET ended_at = now()`)
	r.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, joined, next_attempt_at)
		SELECT i, 'default', 'k', NULL, now() - interval '1 hour' + i * interval '1 second' FROM generate_series(1, 3) i`)
	lock := r.Begin()
	_, err := lock.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 2 FOR UPDATE`)
	relaytest.Must(t, err)
	join := func() string {
		_, err := JoinKeys(t.Context(), r.pool, 0, []Key{{Key: "k", Destination: "default"}}, time.Time{}, 10)
		relaytest.Must(t, err)
		return relaytest.Row[string](r.Database, `SELECT string_agg(event_id::text, ' ' ORDER BY joined, event_id) FROM outbox_delivery WHERE joined IS NOT NULL`)
	}
	if got := join(); got != "1" {
		t.Errorf("beside the lock, %s joined; want 1", got)
	}
	relaytest.Must(t, lock.Rollback(t.Context()))
	if got := join(); got != "1 2 3" {
		t.Errorf("after it, %s joined; want 1 2 3", got)
	}
}

// A relay that does not have a range any more writes nothing of it, and of its other ranges all.
func TestSettleStale(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"taken over":          `UPDATE outbox_range SET relay_id = 2, fence = fence + 1 WHERE seq = $1`,
		"taken over and back": `UPDATE outbox_range SET fence = fence + 1 WHERE seq = $1`,
		// A failover that lost the range: another relay took another event of the same id under the
		// same number.
		"given out again": `WITH d AS (DELETE FROM outbox_range WHERE seq = $1 RETURNING *)
			INSERT INTO outbox_range SELECT seq, 2, fence + 1000, base, target, low, upto, new_above, more, oldest_open_seq, keys FROM d`,
		"gone":  `DELETE FROM outbox_range WHERE seq = $1`,
		"ended": `UPDATE outbox_range SET ended_at = now() WHERE seq = $1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRoom(t)
			r.Exec(insertOne, "lost")
			lost := r.take(1, usual)
			r.Exec(insertOne, "kept")
			kept := r.take(1, usual)
			tx := r.Begin()
			_, err := tx.Exec(t.Context(), change, lost.Seq)
			relaytest.Must(t, err)
			relaytest.Must(t, tx.Commit(t.Context()))
			s := settlement(1, lost, lost.Events)
			s2 := settlement(1, kept, kept.Events)
			s.Ranges, s.Ended, s.Deliveries = append(s.Ranges, s2.Ranges...), append(s.Ended, s2.Ended...), append(s.Deliveries, s2.Deliveries...)
			done, err := SettleRanges(t.Context(), r.pool, s)
			relaytest.Must(t, err)
			if !slices.Equal(done.Lost, []RangeRef{lost.Ref()}) || done.Existing != nil {
				t.Errorf("%+v", done)
			}
			testkit.Equal(t, "written", relaytest.Rows[int64](r.Database, `SELECT event_id FROM outbox_delivery`), []int64{2})
		})
	}
}

// A rescue reads the range again less what is settled, oldest first, and its former owner can write
// no more.
func TestRescue(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	rescue := func(inHand ...int64) (Range, bool) {
		t.Helper()
		got, found, err := RescueRange(t.Context(), r.pool, 2, inHand, 1<<20)
		relaytest.Must(t, err)
		return got, found
	}
	late := r.Begin()
	_, err := late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	r.Exec(insertMany, "e", 3)
	first := r.take(1, usual)
	relaytest.Must(t, late.Commit(t.Context()))
	r.Exec(insertMany, "f", 2)
	second := r.take(1, usual)
	if keys(second.Events) != "late f1 f2" {
		t.Fatalf("took %q", keys(second.Events))
	}
	part := settlement(1, first, first.Events[:2])
	part.Ended = nil
	_, err = SettleRanges(t.Context(), r.pool, part)
	relaytest.Must(t, err)
	if got, found := rescue(); found {
		t.Fatalf("%+v of a relay that lives", got)
	}

	r.Exec(`DELETE FROM outbox_relay WHERE id = 1`)
	got, found := rescue()
	if !found || got.Seq != first.Seq || keys(got.Events) != "e1 e2 e3" || got.Fence <= first.Fence {
		t.Fatalf("%v, %q of %+v", found, keys(got.Events), got)
	}
	for i, want := range [][]string{{"default"}, {"default"}, {}} {
		if !slices.Equal(got.Events[i].Settled, want) {
			t.Errorf("event %d is settled at %q", i, got.Events[i].Settled)
		}
	}
	if done := r.settle(1, first); !slices.Equal(done.Lost, []RangeRef{first.Ref()}) {
		t.Errorf("the former owner settled: %+v", done)
	}
	if done := r.settle(2, got); done.Lost != nil || done.Existing != nil {
		t.Errorf("%+v", done)
	}
	// The answer of this rescue is lost. The relay looks for what is its own and not in hand.
	_, _ = rescue()
	again, found := rescue()
	if !found || again.Seq != second.Seq || keys(again.Events) != "late f1 f2" {
		t.Fatalf("%v, %q of %+v", found, keys(again.Events), again)
	}
	if got, found := rescue(again.Fence); found {
		t.Errorf("%+v is in hand", got)
	}
	r.settle(2, again)
	if got, found := rescue(); found {
		t.Errorf("%+v has ended", got)
	}
}

// Ended ranges go, but for the last one, and none that an open one may need.
func TestPrune(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	var taken []Range
	for _, key := range []string{"a", "b", "c", "d"} {
		r.Exec(insertOne, key)
		taken = append(taken, r.take(1, usual))
	}
	prune := func(from, want int64, left ...int64) {
		t.Helper()
		r.Exec(`UPDATE outbox_range SET ended_at = ended_at - interval '1 hour'`)
		next, err := PruneRanges(t.Context(), r.pool, from)
		relaytest.Must(t, err)
		if got := relaytest.Rows[int64](r.Database, `SELECT seq FROM outbox_range ORDER BY seq`); next != want || !slices.Equal(got, left) {
			t.Errorf("left %v, next %d; want %v, %d", got, next, left, want)
		}
	}
	r.settle(1, taken[0])
	r.settle(1, taken[2])
	prune(0, 2, 2, 3, 4, 5)
	r.settle(1, taken[1])
	r.settle(1, taken[3])
	r.Exec(insertOne, "e")
	r.settle(1, r.take(1, usual))
	prune(2, 6, 6)
	prune(6, 6, 6)
	r.Exec(insertOne, "f")
	r.wantTaken(1, "f")
}

// Keys that are in hand elsewhere, or have rows.
func TestFindBlockedKeys(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertKeyed, "a", "theirs")
	theirs := r.take(1, usual)
	r.Exec(`UPDATE outbox_range SET taken_at = now() - interval '1 minute'`)
	r.Exec(insertKeyed, "b", "mine")
	mine := r.take(2, usual)
	r.Exec(`UPDATE outbox_range SET taken_at = now() - interval '1 minute'`)
	r.Exec(insertKeyed, "c", "younger")
	r.take(1, usual)
	r.Exec(`INSERT INTO outbox_delivery (event_id, destination, status, ordering_key) VALUES
		(90, 'default', 'pending', 'pending'), (91, 'default', 'failed', 'failed'), (92, 'default', 'failed', 'skipped'),
		(93, 'default', 'discarded', 'free'), (94, 'other', 'pending', 'free')`)
	ask := []Key{
		{Key: "theirs", Destination: "default", SkipsFailed: false},
		{Key: "mine", Destination: "default", SkipsFailed: false},
		{Key: "younger", Destination: "default", SkipsFailed: false},
		{Key: "pending", Destination: "default", SkipsFailed: true},
		{Key: "failed", Destination: "default", SkipsFailed: false},
		{Key: "skipped", Destination: "default", SkipsFailed: true},
		{Key: "free", Destination: "default", SkipsFailed: false},
		{Key: "pending", Destination: "other", SkipsFailed: false},
	}
	var known []int64
	check := func(want ...Blocked) {
		t.Helper()
		got, err := FindBlockedKeys(t.Context(), r.pool, 2, mine.Ref(), known, ask)
		relaytest.Must(t, err)
		if !slices.Equal(got, want) {
			t.Errorf("%+v", got)
		}
	}
	hand, row := Blocked{InHand: true}, Blocked{ByRow: true}
	check(hand, Blocked{}, Blocked{}, row, row, Blocked{}, Blocked{}, Blocked{})
	r.settle(1, theirs)
	check(Blocked{}, Blocked{}, Blocked{}, row, row, Blocked{}, Blocked{}, Blocked{})
	r.Exec(`UPDATE outbox_range SET relay_id = 2, ended_at = NULL WHERE seq = $1`, theirs.Seq)
	check(hand, Blocked{}, Blocked{}, row, row, Blocked{}, Blocked{}, Blocked{}) // its own, and not known
	known = []int64{theirs.Fence, mine.Fence}
	check(Blocked{}, Blocked{}, Blocked{}, row, row, Blocked{}, Blocked{}, Blocked{})
	r.Exec(`DELETE FROM outbox_range WHERE seq = $1`, mine.Seq)
	if _, err := FindBlockedKeys(t.Context(), r.pool, 2, mine.Ref(), known, ask); !errors.Is(err, ErrLost) {
		t.Errorf("of a range that was lost: %v", err)
	}
}

// Keys stay with the relay that has some in hand, as long as it takes. Events without keys go to
// any relay.
func TestKeysStay(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertKeyed, "a", "k")
	first := r.take(1, usual)
	r.Exec(`UPDATE outbox_range SET taken_at = now() + interval '1 hour' WHERE seq = $1`, first.Seq) // it continues taking
	r.Exec(insertOne, "b")
	r.wantTaken(2, "b")
	r.Exec(insertKeyed, "c", "other")
	r.find(2, Busy)
	r.Exec(insertMany, "d", usual.Events)
	r.find(2, Busy) // what is cut, too
	if got := r.take(1, usual); len(got.Events) != usual.Events || !got.More {
		t.Errorf("took %q", keys(got.Events))
	}
	r.Exec(insertKeyed, "e", "k")
	r.Exec(`UPDATE outbox_range SET taken_at = now() - interval '1 second'`)
	r.take(2, usual)
}
