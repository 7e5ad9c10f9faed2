package pg

import (
	"context"
	"time"
)

const selectTime = `SELECT now()`

// ReadTime returns the database's time.
func ReadTime(ctx context.Context, db Pool) (now time.Time, err error) {
	return Value[time.Time](ctx, db, "read the database's time", selectTime)
}

// A Clock estimates the database's time from when it was last read. The zero value knows no time.
type Clock struct{ shown, read time.Time }

// IsSet reports whether the clock knows a time.
func (c *Clock) IsSet() bool { return !c.read.IsZero() }

// Set notes what the database showed at this moment.
func (c *Clock) Set(shown time.Time) { c.shown, c.read = shown, time.Now() }

// Now returns the database's time.
func (c *Clock) Now() time.Time { return c.shown.Add(time.Since(c.read)) }
