package webhook

import (
	"fmt"
	"time"
)

// maxSkew is by how much the clocks of a database and of a host may differ where something is
// removed by its age. What is beyond it is no drift.
const maxSkew = time.Hour

// AskClock is [CheckClock] for the clock of the database that now asks.
func AskClock(now func() (time.Time, error)) error {
	before := time.Now()
	said, err := now()
	if err != nil {
		return err
	}
	return CheckClock(before, said, time.Now())
}

// CheckClock returns an error if a database's clock, which said now between two moments of this
// host, is more than an hour away. A clock that is a year ahead would remove a year's events, and
// what receivers need to know duplicates by.
func CheckClock(before, now, after time.Time) error {
	if max(before.Sub(now), now.Sub(after)) <= maxSkew {
		return nil
	}
	return fmt.Errorf("the clock of the database says %s, and that of this host %s: correct the wrong one; nothing is removed by its age while they differ by more than %v",
		now.UTC().Format(time.RFC3339), after.UTC().Format(time.RFC3339), maxSkew)
}
