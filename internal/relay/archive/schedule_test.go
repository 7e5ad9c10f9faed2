package archive

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Of a retention that removes nothing no run is planned, and none is overdue.
func TestRunsArePlanned(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 28, 3, 17, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		keep          Retention
		next, overdue time.Time
	}{
		"nothing to remove": {Retention{}, time.Time{}, time.Time{}},
		"no schedule":       {Retention{ArchiveAfter: time.Hour, Schedule: "often"}, time.Time{}, time.Time{}},
		"by default":        {Retention{ArchiveAfter: time.Hour}, now.AddDate(0, 0, 1), now.AddDate(0, 0, 2)},
		"each hour":         {Retention{ArchiveAfter: time.Hour, Schedule: "20 * * * *"}, now.Add(3 * time.Minute), now.Add(63 * time.Minute)},
	} {
		testkit.Equal(t, name+": the next run", c.keep.Next(now), c.next)
		testkit.Equal(t, name+": overdue", c.keep.Overdue(now), c.overdue)
	}
}
