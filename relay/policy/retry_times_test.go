package policy

import (
	"testing"
	"time"
)

func TestRetryTimesAreKeptInSteps(t *testing.T) {
	t.Parallel()
	begun := time.Unix(1_000_000, 0)
	d := &RetryTimes{}
	if due, next := d.Take(begun); due || !next.IsZero() {
		t.Errorf("nothing was put off: %t, %s", due, next)
	}
	for i := range 1000 {
		d.Add(begun.Add(time.Duration(i)*time.Microsecond), 5*time.Second)
	}
	d.Add(begun, dueAhead+1)
	d.Add(begun, time.Second)
	d.Add(begun, 0)
	if n := len(d.at); n != 3 {
		t.Errorf("%d times are kept, want 3", n)
	}
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
		if due, next := d.Take(begun.Add(c.at)); due != c.due || !next.Equal(begun.Add(c.next)) {
			t.Errorf("after %s: %t, next after %s; want %t, %s", c.at, due, next.Sub(begun), c.due, c.next)
		}
	}
	if due, next := d.Take(begun.Add(time.Hour)); !due || !next.IsZero() {
		t.Errorf("the last: %t, next %s", due, next)
	}
}
