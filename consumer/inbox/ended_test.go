package inbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// Statements that end a handler's transaction in a way that is not refused.
const (
	commits  = "/* */ COMMIT"
	chains   = "/* */ COMMIT AND CHAIN"
	rollsOn  = "/* */ ROLLBACK AND CHAIN"
	tooLong  = "SELECT pg_sleep(3600)"
	mistaken = "SELECT 1/0"
)

// sent runs statements in a handler's transaction, and returns the first error.
func sent(ctx context.Context, queries ...string) error {
	for _, query := range queries {
		if _, err := consumer.Tx(ctx).Exec(ctx, query); err != nil {
			return err
		}
	}
	return nil
}

// lose breaks the connection of a handler's transaction. That is noticed when it is used again.
func lose(ctx context.Context) error { return consumer.Tx(ctx).Conn().PgConn().Conn().Close() }

// queried leaves a transaction in doubt that has not changed.
func queried(ctx context.Context, query string) error {
	rows, err := consumer.Tx(ctx).Query(ctx, query)
	if err != nil {
		return err
	}
	_, err = pgx.CollectRows(rows, pgx.RowTo[string])
	return err
}

// An event whose handler has committed it is not given back when the inbox stops.
func TestInboxGivesNothingBackThatIsCommitted(t *testing.T) {
	t.Parallel()
	for name, wait := range map[string]func(ctx context.Context) error{
		"between statements": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"in a statement":     func(ctx context.Context) error { return sent(ctx, tooLong) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			committed := make(chan struct{})
			p := newInbox(t, inbox.Config{DrainTimeout: 10 * time.Millisecond, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				err := errors.Join(receivertest.EffectOf(ctx, event.Key), sent(ctx, chains))
				close(committed)
				return errors.Join(err, wait(ctx))
			}})
			p.run()
			p.record("k")
			<-committed
			pgtest.Must(t, p.stop())
			p.wantState("k", inbox.StateFailed, 1)
			p.WantRows("k", 1, 1)
		})
	}
}
