package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// Once records an event of any transport inside the caller's transaction, and reports whether it is
// the first time. Apply the event's effect in tx if it is, and skip it if not:
//
//	first, err := consumer.Once(ctx, tx, consumer.Event{Receiver: "logistics", Source: "finance", IdempotencyKey: key})
//
// Only these three fields count. Use the names of [Config], so that an event which arrives by both
// ways counts once. Each is 1 to 255 printable ASCII characters.
//
// While another transaction holds the key, Once waits until that one ends, bounded by ctx and
// lock_timeout, because a bool cannot say "perhaps". Above READ COMMITTED it may return a
// serialization failure (SQLSTATE 40001) instead: run the transaction again. After any error tx
// cannot be used any more. A handler of this package must not call Once for its own event, which is
// recorded already: that fails.
func Once(ctx context.Context, tx pgx.Tx, event Event) (first bool, err error) {
	return memory.Once(ctx, event.Receiver, event.Source, event.IdempotencyKey, execIn(tx))
}

func execIn(tx pgx.Tx) memory.Exec {
	return func(ctx context.Context, query string, args ...any) (int64, error) {
		tag, err := tx.Exec(ctx, query, args...)
		return tag.RowsAffected(), err
	}
}
