package claim

import (
	"math"
	"testing"
)

// The place of a row that cannot be read is found by few statements if it is near.
func TestFirstFailing(t *testing.T) {
	t.Parallel()
	for _, want := range []int64{0, 1, 2, 3, 1000, 1 << 40, math.MaxInt64 - 1, math.MaxInt64} {
		calls := 0
		got := firstFailing(math.MaxInt64, func(n int64) bool { calls++; return n < want })
		if most := 130; got != want || calls > most || want <= 3 && calls > 5 {
			t.Errorf("%d after %d calls, want %d", got, calls, want)
		}
	}
	if got := firstFailing(7, func(int64) bool { return true }); got != 7 {
		t.Errorf("%d, want the most", got)
	}
}
