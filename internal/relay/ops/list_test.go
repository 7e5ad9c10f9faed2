package ops

import (
	"cmp"
	"fmt"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A list of thousands of destinations shows a hundred: those in trouble, then those with most to
// do, or those that are asked for.
func TestListOfManyDestinations(t *testing.T) {
	t.Parallel()
	some := func(n int) (s Status) {
		s.Advice = []Advice{{}, {Subject: "d4321", Level: Warning}, {Subject: "d0001", Level: Notice}}
		for i := range n {
			s.Destinations = append(s.Destinations, DestinationStatus{Destination: fmt.Sprintf("d%04d", i), Pending: int64(i % 1000)})
		}
		return s
	}
	pending := func(a, b DestinationStatus) int { return cmp.Compare(b.Pending, a.Pending) }
	for name, c := range map[string]struct {
		n           int
		list        List
		first, next string
		shown, left int
	}{
		"few keep their order":         {n: 100, first: "d0000", shown: 100},
		"trouble first":                {n: 5000, first: "d4321", shown: 100, left: 4900, next: "d2980"},
		"after the last in trouble":    {n: 5000, list: List{After: "d0001", Limit: 1}, first: "d0999", shown: 1, left: 4997, next: "d0999"},
		"after the first page":         {n: 5000, list: List{After: "d2980"}, first: "d3980", shown: 100, left: 4800, next: "d2960"},
		"after the last":               {n: 5000, list: List{After: "d4000"}},
		"another order":                {n: 5000, list: List{Compare: pending}, first: "d0999", shown: 100, left: 4900, next: "d4980"},
		"by name":                      {n: 5000, list: List{ByName: true}, first: "d0000", shown: 100, left: 4900, next: "d0099"},
		"by name after one":            {n: 5000, list: List{ByName: true, After: "d0099"}, first: "d0100", shown: 100, left: 4800, next: "d0199"},
		"by name after what is gone":   {n: 5000, list: List{ByName: true, After: "d0099x"}, first: "d0100", shown: 100, left: 4800, next: "d0199"},
		"searched":                     {n: 5000, list: List{Prefix: "d432"}, first: "d4320", shown: 10},
		"searched, more than fit in":   {n: 5000, list: List{Prefix: "d432", Limit: 3}, first: "d4321", shown: 3, left: 7, next: "d4328"},
		"nothing found":                {n: 5000, list: List{Prefix: "x"}},
		"all":                          {n: 5000, list: List{Limit: 5000}, first: "d0000", shown: 5000},
		"nothing":                      {list: List{ByName: true, After: "x"}},
		"the rest of what fitted in":   {n: 5, list: List{After: "d0001", Limit: 10}, first: "d0004", shown: 4},
		"as many as fit in":            {n: 5, list: List{Limit: 5}, first: "d0000", shown: 5},
		"one more than fits in":        {n: 5, list: List{Limit: 4}, first: "d0001", shown: 4, left: 1, next: "d0002"},
		"the last one of what remains": {n: 5, list: List{Limit: 4, After: "d0002"}, first: "d0000", shown: 1},
	} {
		s := some(c.n)
		shown, listed, err := c.list.Choose(s)
		testkit.Must(t, err)
		if want := (Listed{int64(c.n), int64(c.left), c.next}); len(shown) != c.shown || listed != want || c.shown > 0 && shown[0].Destination != c.first {
			t.Errorf("%s: %d shown, %+v, first %+v", name, len(shown), listed, shown[:min(1, len(shown))])
		}
		if c.n > 0 && s.Destinations[1].Destination != "d0001" {
			t.Errorf("%s: the status was changed", name)
		}
	}
	if _, _, err := (List{After: "gone"}).Choose(some(5)); err == nil || err.Error() != `after: no destination "gone" is in this list; leave it out to begin with the first` {
		t.Error(err)
	}
}
