package batch

import (
	"encoding/json"
	"math"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestIDs(t *testing.T) {
	t.Parallel()
	ids := IDs{1, math.MaxInt64}
	text, err := json.Marshal(ids)
	testkit.Must(t, err)
	testkit.Equal(t, "the text", string(text), `["1","9223372036854775807"]`)
	for _, list := range []string{string(text), "[1, 9223372036854775807]"} {
		var got IDs
		if err := json.Unmarshal([]byte(list), &got); err != nil || !slices.Equal(got, ids) {
			t.Errorf("%s is %d: %v", list, got, err)
		}
	}
}
