package compare

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/reconcile"
)

// Whichever of the fresh keys have arrived, they explain the difference. One key more, or another one, is not explained.
func TestFreshKeysExplainADifference(t *testing.T) {
	t.Parallel()
	for range 2000 {
		hashes := make([]uint64, rand.IntN(12))
		n, sum := int64(0), uint64(0)
		for i := range hashes {
			hashes[i] = rand.Uint64()
			if rand.IntN(2) == 0 {
				n, sum = n+1, sum+hashes[i]
			}
		}
		if !explained(n, sum, hashes) {
			t.Fatalf("%d of %d are not explained", n, len(hashes))
		}
		other := rand.Uint64() | 1
		for what, wrong := range map[string]bool{
			"one more": explained(n+1, sum+other, hashes), "one less": explained(n-1, sum-other, hashes), "another one": explained(n, sum+other, hashes), "another count": explained(n+1, sum, hashes),
		} {
			if wrong {
				t.Fatalf("%s of %d is explained", what, len(hashes))
			}
		}
	}
	// Too many to try: the range is compared key by key.
	many := make([]uint64, 64)
	sum := uint64(0)
	for i := range many {
		if many[i] = rand.Uint64(); i%2 == 0 {
			sum += many[i]
		}
	}
	if explained(31, sum+1, many) {
		t.Error("what has too many sets is explained")
	}
}

func TestBoundsFitIntoAQuestion(t *testing.T) {
	t.Parallel()
	var keys []string
	for range 20_000 {
		keys = append(keys, strings.Repeat("x", rand.IntN(255))+string(rune('a'+rand.IntN(26))))
	}
	bounds := sortBounds(keys)
	size := 0
	for _, key := range bounds {
		size += len(key)
	}
	if size > reconcile.MaxBoundBytes || len(bounds) > reconcile.MaxBounds || !slices.IsSorted(bounds) || len(slices.Compact(slices.Clone(bounds))) != len(bounds) || len(bounds) < 1000 {
		t.Errorf("%d bounds of %d bytes", len(bounds), size)
	}
	if got := sortBounds([]string{"b", "a", "b"}); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("got %q", got)
	}
}
