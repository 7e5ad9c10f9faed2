package consumer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
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
// What an inbox has recorded is removed from both of its tables.
//
// An event is forgotten in two runs: one announces, in the table inbox_forgotten, from when on everything is known, and a later
// one removes what was announced. Thus no request can miss both the event and the announcement. Run it daily:
// the first time it removes nothing.
//
// Several processes may prune at once, and a run may be ended at any moment: the next one goes on. When ctx ends, Prune
// returns its error, beside what it did until then.
func Prune(ctx context.Context, pool *pgxpool.Pool, cfg PruneConfig) (Pruned, error) {
	done, err := memory.Prune(cfg).Run(ctx, pool.QueryRow)
	return Pruned(done), err
}
