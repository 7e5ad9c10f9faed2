package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

const selectTime = `SELECT now()`

// readTime returns the database's time.
func readTime(ctx context.Context, db pg.Pool) (now time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if err := db.QueryRow(ctx, selectTime).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read the database's time: %w", err)
	}
	return now, nil
}

// databaseClock estimates the database's time from when it was last read.
type databaseClock struct{ shown, read time.Time }

func (c *databaseClock) set(shown time.Time) { c.shown, c.read = shown, time.Now() }

func (c *databaseClock) now() time.Time { return c.shown.Add(time.Since(c.read)) }
