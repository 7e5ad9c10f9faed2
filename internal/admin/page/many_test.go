package page

import (
	"fmt"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// The overview of thousands of destinations shows a hundred: those in trouble, then those with most to do, or those that are asked for.
func TestOverviewOfManyDestinations(t *testing.T) {
	t.Parallel()
	some := func(n int) (all []control.Destination) {
		for i := range n {
			d := control.Destination{State: "ok"}
			d.Destination, d.Pending = fmt.Sprintf("d%04d", i), int64(i%1000)
			all = append(all, d)
		}
		return all
	}
	for name, c := range map[string]struct {
		n            int
		sort, prefix string
		first        string
		shown, left  int
	}{
		"few keep their order": {n: 100, first: "d0000", shown: 100},
		"trouble first":        {n: 5000, first: "d4321", shown: 100, left: 4900},
		"sorted":               {n: 5000, sort: "pending", first: "d0999", shown: 100, left: 4900},
		"by name":              {n: 5000, sort: "name", first: "d0000", shown: 100, left: 4900},
		"searched":             {n: 5000, prefix: "d432", first: "d4320", shown: 10},
		"nothing found":        {n: 5000, prefix: "x"},
	} {
		data := overviewData{Sort: c.sort, Prefix: c.prefix}
		data.Advice = []ops.Advice{{}, {Subject: "d4321", Level: ops.Warning}, {Subject: "d0001", Level: ops.Notice}}
		data.Destinations = some(c.n)
		data.choose()
		if len(data.Destinations) != c.shown || data.Left != c.left || data.All != c.n || c.shown > 0 && data.Destinations[0].Destination != c.first {
			t.Errorf("%s: %d shown, %d left of %d, first %+v", name, len(data.Destinations), data.Left, data.All, data.Destinations[:min(1, len(data.Destinations))])
		}
	}
}
