package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// Once records an event of any transport inside the caller's transaction and reports whether it is the first time: apply
// the event's effect in tx if it is, and skip it if not. Receiver, source and key are what [Middleware] uses, so that an event
// which arrives by both ways counts once; each is 1 to 255 printable ASCII characters.
//
// While another transaction holds the key, Once waits until that one ends, bounded by ctx and lock_timeout, because a
// bool cannot say "perhaps". Above READ COMMITTED it may return a serialization failure (SQLSTATE 40001) instead: run the
// transaction again. After any error tx is of no more use. A handler that gets
// an event from this package must not call it for that event, which is recorded already: it fails there.
func Once(ctx context.Context, tx pgx.Tx, receiver, source, key string) (first bool, err error) {
	return memory.Once(ctx, receiver, source, key, execIn(tx))
}

func execIn(tx pgx.Tx) memory.Exec {
	return func(ctx context.Context, query string, args ...any) (int64, error) {
		tag, err := tx.Exec(ctx, query, args...)
		return tag.RowsAffected(), err
	}
}
