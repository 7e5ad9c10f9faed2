package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// Prune is consumer.PruneConfig, field by field: the one converts to the other.
type Prune struct {
	Receiver   string
	Retention  time.Duration
	BatchPages int
	Pause      time.Duration
}

// Pruned is consumer.Pruned, field by field.
type Pruned struct {
	Removed, Announced int64
	RemembersSince     time.Time
}

// QueryRow runs a statement that is a whole transaction.
type QueryRow func(ctx context.Context, query string, args ...any) pgx.Row

const (
	// minRetention catches durations written in the wrong unit, such as Retention: 90, which would
	// empty the memory. Every sender that retries at all does so for hours.
	minRetention = 24 * time.Hour
	// pruneRest is how many times as long as a batch took the pause behind it lasts.
	pruneRest = 4
	// prunePatience is how often in a row a batch may meet another session's lock.
	prunePatience = 5
	// maxBatchPages leaves most of PostgreSQL's locks to others.
	maxBatchPages = 32
)

// Run is consumer.Prune.
func (c Prune) Run(ctx context.Context, query QueryRow) (done Pruned, err error) {
	if err := c.complete(); err != nil {
		return Pruned{}, err
	}
	failed := 0
	for page, finished := int64(0), false; !finished; {
		if err := checkClock(ctx, query); err != nil {
			return done, fmt.Errorf("prune processed_events: %w", err)
		}
		began, pause := time.Now(), c.Pause
		batch, err := c.forget(ctx, query, page)
		switch {
		case err == nil:
			failed = 0
			page, finished = batch.nextPage, batch.finished
			done.Removed += int64(batch.removed)
			done.Announced += int64(batch.announced)
		case failed < prunePatience && (sqlstate.IsConflict(err) || sqlstate.Of(err) == sqlstate.LockNotAvailable):
			failed++
			pause = min(pause, time.Second) // it has removed nothing that the others need a rest from
		default:
			return done, err
		}
		if !finished {
			if err := sleep.For(ctx, max(pause, pruneRest*time.Since(began))); err != nil {
				return done, fmt.Errorf("prune processed_events: %w", err)
			}
		}
	}
	done.RemembersSince, err = c.remembersSince(ctx, query)
	return done, err
}

// complete fills in defaults.
func (c *Prune) complete() error {
	if c.BatchPages == 0 {
		c.BatchPages = 16
	}
	if c.Pause == 0 {
		c.Pause = 10 * time.Millisecond
	}
	problem := ""
	switch {
	case c.Retention == 0:
		problem = "Retention is not set: say for how long to remember, which must be longer than the sender may send an event again " +
			"(a relay: 30 days), such as 90 * 24 * time.Hour"
	case c.Retention < minRetention:
		problem = fmt.Sprintf("Retention: %v is less than a day, within which any sender sends again; set %v or more", c.Retention, minRetention)
	case !headers.Printable(c.Receiver):
		problem = fmt.Sprintf("Receiver: %q is not 1 to %d printable ASCII characters; set the one of the Config", c.Receiver, headers.MaxTextBytes)
	case c.BatchPages < 1 || c.BatchPages > maxBatchPages:
		problem = fmt.Sprintf("BatchPages: %d is out of range; set 1 to %d, or 0 for the default", c.BatchPages, maxBatchPages)
	case c.Pause < 0:
		problem = fmt.Sprintf("Pause is negative: %v", c.Pause)
	}
	if problem != "" {
		return fmt.Errorf("consumer: PruneConfig.%s", problem)
	}
	return nil
}
