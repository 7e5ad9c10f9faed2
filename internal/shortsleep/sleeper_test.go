package shortsleep

import (
	"testing"
	"time"
)

func TestSleepsAtLeastAsLongAsAsked(t *testing.T) {
	t.Parallel()
	s := New()
	for _, closed := range []bool{false, true} {
		if closed {
			s.Close()
			s.Close()
		}
		for _, d := range []time.Duration{1, 250 * time.Microsecond, Longest, 20 * time.Millisecond} {
			began := time.Now()
			s.Sleep(d)
			if slept := time.Since(began); slept < d {
				t.Errorf("closed %v: slept %s instead of %s", closed, slept, d)
			}
		}
	}
}

func TestSleepAllocatesNothing(t *testing.T) {
	s := New()
	defer s.Close()
	if n := testing.AllocsPerRun(100, func() { s.Sleep(time.Microsecond) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkSleep shows what a sleep of a quarter of a millisecond takes, beside one by Go.
func BenchmarkSleep(b *testing.B) {
	const d = 250 * time.Microsecond
	b.Run("shortsleep", func(b *testing.B) {
		s := New()
		defer s.Close()
		for b.Loop() {
			s.Sleep(d)
		}
	})
	b.Run("time", func(b *testing.B) {
		s := New()
		s.Close()
		for b.Loop() {
			s.Sleep(d)
		}
	})
}
