package ops

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A replay is spread over time by small batches, and rests for long behind one that was slow.
func TestPace(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		rate     *int64
		batch    int
		spread   time.Duration // of 100,000
		took     time.Duration
		rest     time.Duration // behind a batch
		sentence string
	}{
		"the default":       {batch: 10, spread: 200 * time.Second, took: 1 * ms, rest: 19 * ms, sentence: "spread over about 3m20s, 500 deliveries a second"},
		"a slow database":   {batch: 10, spread: 200 * time.Second, took: 50 * ms, rest: 100 * ms, sentence: "spread over about 3m20s, 500 deliveries a second"},
		"one a second":      {rate: new(int64(1)), batch: 1, spread: 100_000 * time.Second, took: 5 * ms, rest: 995 * ms, sentence: "spread over about 1d4h, 1 delivery a second"},
		"more than a batch": {rate: new(int64(50_000)), batch: 1000, spread: 2 * time.Second, took: 4 * ms, rest: 16 * ms, sentence: "spread over about 2s, 50000 deliveries a second"},
		"no limit":          {rate: new(int64(0)), batch: 1000, took: 5 * ms},
		"at once":           {rate: new(int64(200_000)), batch: 1000, spread: 500 * ms, took: 1 * ms, rest: 4 * ms},
	} {
		p := replayAction(0).pace(Selection{Rate: c.rate})
		if p.batch() != c.batch || p.spread(100_000) != c.spread || p.rest(p.batch(), c.took) != c.rest {
			t.Errorf("%s: %d a batch, %v, a rest of %v", name, p.batch(), p.spread(100_000), p.rest(p.batch(), c.took))
		}
		b := Bulk{Rate: int64(p), Seconds: p.spread(100_000).Seconds()}
		testkit.Equal(t, name, b.Spread(), c.sentence)
	}
	for _, a := range []action{retryAction(), discardAction(), quarantineAction(nil)} {
		if a.pace(Selection{}) != 0 {
			t.Errorf("%s has a pace", a.name)
		}
	}
}

// A replay goes through small batches, within which deliveries become due one after the other, and
// leaves at its interruption what it has not reached, also between two batches. What continues
// keeps the rate.
func TestReplayIsSpread(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(60, "k")
	db.Settled("failed", "true")
	outbox := New(db.Pool)
	order := Order{Action: "replay", Selection: Selection{Destination: "default", Rate: new(int64(100))}}
	order, preview, err := outbox.Preview(t.Context(), order)
	relaytest.Must(t, err)
	if preview.Rate != 100 || preview.Seconds != 0.6 {
		t.Errorf("%+v", preview)
	}
	id, order, err := outbox.Begin(t.Context(), order)
	relaytest.Must(t, err)
	var steps []int64
	interrupted, interrupt := context.WithCancel(t.Context())
	_, err = outbox.Work(interrupted, id, order, func(b Bulk) {
		if steps = append(steps, b.Done); len(steps) == 3 {
			interrupt()
		}
	})
	if !errors.Is(err, context.Canceled) || !slices.Equal(steps, []int64{2, 4, 6}) {
		t.Errorf("in steps %v: %v", steps, err)
	}
	testkit.Equal(t, "pending", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND replay`), 6)
	// The second of a batch is due a hundredth of a second behind the first, but for the time
	// between two calls of the clock.
	gaps := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery a JOIN outbox_delivery b ON b.event_id = a.event_id + 1
		WHERE a.event_id IN (1, 3, 5) AND b.next_attempt_at >= a.next_attempt_at + interval '0.01 s'`)
	if gaps != 3 {
		t.Errorf("%d of 3 batches are spread", gaps)
	}
	taken, err := outbox.TakeUp(t.Context(), id)
	relaytest.Must(t, err)
	if taken.Selection.Rate == nil || *taken.Selection.Rate != 100 {
		t.Errorf("continues with %+v", taken.Selection)
	}
	// In the pause between two batches it does not wait for the next one either.
	slow, hurry := context.WithCancel(t.Context())
	taken.Selection.Rate = new(int64(1))
	if b, err := outbox.Work(slow, id, taken, func(Bulk) { time.AfterFunc(time.Millisecond, hurry) }); !errors.Is(err, context.Canceled) || b.Done != 1 {
		t.Errorf("%+v, %v", b, err)
	}
	entry, err := outbox.AuditEntry(t.Context(), id)
	relaytest.Must(t, err)
	if entry.State != "interrupted" || entry.Done != 7 || entry.TimeLeft() != "" {
		t.Errorf("%+v", entry)
	}
	entry.State, entry.Matched = "running", 6007
	testkit.Equal(t, "left", entry.TimeLeft(), "about 1m0s")
}
