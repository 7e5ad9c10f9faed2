package consumer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// PruneConfig says what [Prune] forgets. Receiver and Retention are required.
type PruneConfig struct {
	// Receiver is the receiver whose events are forgotten, from all its senders, as in [Config].
	// Required.
	Receiver string

	// Retention is how long an event is remembered after it was received and processed, whichever
	// was later. Required. At least 24 hours. An unknown event from before that time is refused, so
	// choose the time for which the sender may send an event again (a relay: 30 days), and add the
	// longest outage that events should survive without an operator.
	Retention time.Duration

	// BatchPages is how many of the table's pages one transaction reads, each of 8 KiB and ten to
	// seventy rows. 1 to 32. Default 16. A transaction holds a lock for each row that it removes,
	// and PostgreSQL has room for about 6,400 in all (max_locks_per_transaction times
	// max_connections): without room all transactions fail.
	BatchPages int

	// Pause is the shortest pause between two transactions. It is four times as long as the last
	// transaction took, if that is longer. Default 10 milliseconds.
	Pause time.Duration
}

// Pruned is what [Prune] did.
type Pruned struct {
	// Removed counts the events that were forgotten.
	Removed int64
	// Announced counts the events that are old enough and had to be announced first. The next run
	// removes them, if it begins more than a minute later and no transaction is left that began
	// before the announcement.
	Announced int64
	// RemembersSince is the time since which every received event is known. An unknown event that
	// was created before it is refused. Zero: nothing was ever forgotten.
	RemembersSince time.Time
}

// Prune forgets the events of one receiver that were received and finished longer ago than
// cfg.Retention, in short transactions with pauses in between. It removes what an inbox has
// recorded from both of its tables. It never forgets an event that is pending, being processed or
// failed, one whose sender may still send it by itself, or one that a request asks about at that
// moment.
//
// An event is forgotten in two runs. One announces, in the table inbox_forgotten, from when on
// everything is known. A later one removes what was announced. Thus no request can miss both the
// event and the announcement. Run it daily; the first time it removes nothing.
//
// Several processes may prune at once, and a run may be ended at any moment: the next one
// continues. When ctx ends, Prune returns its error, and what it did until then. It fails at once
// when cfg cannot work.
func Prune(ctx context.Context, pool *pgxpool.Pool, cfg PruneConfig) (Pruned, error) {
	done, err := memory.Prune(cfg).Run(ctx, pool.QueryRow)
	return Pruned(done), err
}
