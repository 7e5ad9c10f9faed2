package agenda

import (
	"math/bits"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestRetryTimesAreKeptInSteps(t *testing.T) {
	t.Parallel()
	begun := time.Unix(1_000_000, 0)
	d := &RetryTimes{}
	take := func(now time.Time) (due bool, next time.Time) {
		var a Agenda
		d.Plan(&a, now)
		due = a.Take(now).Has(CauseRetry)
		d.Plan(&a, now)
		if a.planned.Has(CauseRetry) {
			next = a.at[bits.TrailingZeros32(uint32(CauseRetry))]
		}
		return due, next
	}
	if due, next := take(begun); due || !next.IsZero() {
		t.Errorf("nothing was put off: %t, %s", due, next)
	}
	for i := range 1000 {
		d.Add(begun.Add(time.Duration(i)*time.Microsecond), 5*time.Second)
	}
	d.Add(begun, dueAhead+1)
	d.Add(begun, time.Second)
	d.Add(begun, 0)
	testkit.Equal(t, "times kept", len(d.at), 3)
	for _, c := range []struct {
		at   time.Duration
		due  bool
		next time.Duration
	}{
		{0, false, dueStep},
		{dueStep, true, time.Second + dueStep},
		{time.Second, false, time.Second + dueStep}, // no earlier than the database has it
		{time.Second + dueStep, true, 5*time.Second + dueStep},
	} {
		if due, next := take(begun.Add(c.at)); due != c.due || !next.Equal(begun.Add(c.next)) {
			t.Errorf("after %s: %t, next after %s; want %t, %s", c.at, due, next.Sub(begun), c.due, c.next)
		}
	}
	if due, next := take(begun.Add(time.Hour)); !due || !next.IsZero() {
		t.Errorf("the last: %t, next %s", due, next)
	}
}
