package ordering

import (
	"math"
	"strconv"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestFloors(t *testing.T) {
	t.Parallel()
	var f Floors
	a := Key{"default", "a"}
	f.Set(a, Floor{Event: 7, Reordered: 1})
	for _, c := range []struct {
		reordered int64
		skip      bool
		want      int64
	}{{1, false, 7}, {2, false, math.MinInt64}, {1, true, math.MinInt64}} {
		if got := f.LookUp(a, c.reordered, c.skip).Event; got != c.want {
			t.Errorf("reordered %d times, skip %t: %d, want %d", c.reordered, c.skip, got, c.want)
		}
	}
	for i := range 3 * floorsKept {
		f.Set(Key{"default", strconv.Itoa(i)}, Floor{Event: int64(i)})
		if i%1000 == 0 && f.LookUp(a, 1, false).Event != 7 {
			t.Fatalf("a key in use is forgotten after %d others", i)
		}
	}
	if n := len(f.recent) + len(f.older); n > 2*floorsKept {
		t.Errorf("%d are kept", n)
	}
	testkit.Equal(t, "one that was not used for long", f.LookUp(Key{"default", "0"}, 0, false).Event, math.MinInt64)
	f.Forget(a, 8)
	testkit.Equal(t, "forgotten for an event behind it", f.LookUp(a, 1, false).Event, 7)
	f.Forget(a, 7)
	testkit.Equal(t, "kept although an event before it is pending", f.LookUp(a, 1, false).Event, math.MinInt64)
}
