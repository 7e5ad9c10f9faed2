package consumer

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PruneConfig says what [Prune] forgets. Receiver and Retention are required.
type PruneConfig struct {
	// Receiver is whose events are forgotten, of all its senders, as in [Config].
	Receiver string

	// Retention is how long an event is remembered after it was received and processed, whichever was later. At least 24
	// hours, because less is a mistake: what a sender delivers later than that, after an outage of its own or by hand, is
	// refused when it is not known. Longer than the sender may send an event again (a relay: 30 days) by the longest outage
	// that events should survive without an operator.
	Retention time.Duration

	// BatchPages is how many of the table's pages one transaction looks at, each of 8 KiB and some ten to seventy rows.
	// 1 to 32, because it holds a lock for each row that it removes, and PostgreSQL has room for some 6,400 (max_locks_per_transaction
	// times max_connections) in all: without room everybody's transactions fail. Default 16.
	BatchPages int

	// Pause is the shortest rest between two transactions; it is four times as long as the one before took if that is
	// longer. Default 10 milliseconds.
	Pause time.Duration
}

// Pruned is what [Prune] did.
type Pruned struct {
	// Removed counts the events that were forgotten.
	Removed int64
	// Announced counts those that are old enough but had to be announced first: they go with the next run, if that begins
	// more than a minute later and no transaction is left that began before the announcement.
	Announced int64
	// RemembersSince is the moment since which everything that was received is known. Events that were created before it are refused
	// when they are not known. Zero: nothing has ever been forgotten.
	RemembersSince time.Time
}

// Prune forgets the events of one receiver that were received and finished longer ago than cfg.Retention, in short transactions
// with pauses in between. It never forgets an event that is pending, being processed or failed, one whose sender
// may still send it by itself, or one that a request is just asking about.
//
// What an [Inbox] has recorded is removed from both of its tables.
//
// An event is forgotten in two runs: one announces, in the table inbox_forgotten, from when on everything is known, and a later
// one removes what was announced. Thus no request can miss both the event and the announcement. Run it daily:
// the first time it removes nothing.
//
// Several processes may prune at once, and a run may be ended at any moment: the next one goes on. When ctx ends, Prune
// returns its error, beside what it did until then.
func Prune(ctx context.Context, pool *pgxpool.Pool, cfg PruneConfig) (Pruned, error) {
	return cfg.prune(ctx, pool.QueryRow)
}

// PruneSQL is [Prune] for database/sql.
func PruneSQL(ctx context.Context, db *sql.DB, cfg PruneConfig) (Pruned, error) {
	return cfg.prune(ctx, func(ctx context.Context, query string, args ...any) pgx.Row {
		return db.QueryRowContext(ctx, query, args...)
	})
}

// queryRow runs a statement that is a transaction of its own.
type queryRow func(ctx context.Context, query string, args ...any) pgx.Row

const (
	// minRetention catches durations written in the wrong unit, such as Retention: 90, which would empty the memory. Every
	// sender that retries at all does so for hours.
	minRetention = 24 * time.Hour
	// pruneRest is how many times as long as a batch took the pause behind it lasts.
	pruneRest = 4
	// prunePatience is how often in a row a batch may meet somebody else's lock.
	prunePatience = 5
	// maxBatchPages leaves most of PostgreSQL's locks to others.
	maxBatchPages = 32
)

func (c PruneConfig) prune(ctx context.Context, query queryRow) (done Pruned, err error) {
	if err := c.complete(); err != nil {
		return Pruned{}, err
	}
	failed := 0
	for page, finished := int64(0), false; !finished; {
		began, pause := time.Now(), c.Pause
		batch, err := c.forget(ctx, query, page)
		switch {
		case err == nil:
			failed = 0
			page, finished = batch.nextPage, batch.finished
			done.Removed += int64(batch.removed)
			done.Announced += int64(batch.announced)
		case failed < prunePatience && (isConflict(err) || sqlState(err) == stateLockNotAvailable):
			failed++
			pause = min(pause, time.Second) // it has removed nothing that the others need a rest from
		default:
			return done, err
		}
		if !finished {
			if err := rest(ctx, max(pause, pruneRest*time.Since(began))); err != nil {
				return done, fmt.Errorf("prune processed_events: %w", err)
			}
		}
	}
	done.RemembersSince, err = c.remembersSince(ctx, query)
	return done, err
}

// complete fills in defaults.
func (c *PruneConfig) complete() error {
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
	case !printable(c.Receiver):
		problem = fmt.Sprintf("Receiver: %q is not 1 to %d printable ASCII characters; set the one of the Config", c.Receiver, maxTextBytes)
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

// rest returns after d, or with ctx's error when that ends.
func rest(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
