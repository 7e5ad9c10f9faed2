package consumertest

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
)

// WithTx returns a context in which a handler finds event by [consumer.EventFrom] and tx by [consumer.Tx], as behind
// [consumer.Middleware]. The handler can neither commit nor roll back: the test does, as it began tx. event is given as it
// is, nothing in it is checked or filled in.
func WithTx(ctx context.Context, event consumer.Event, tx pgx.Tx) context.Context {
	return handlerctx.With(ctx, handlerctx.Tested[consumer.Event]{Event: event, Tx: tx})
}

// WithTxSQL is [WithTx] for handlers behind [consumer.MiddlewareSQL], which find tx by [consumer.TxSQL].
func WithTxSQL(ctx context.Context, event consumer.Event, tx *sql.Tx) context.Context {
	return handlerctx.With(ctx, handlerctx.Tested[consumer.Event]{Event: event, SQLTx: tx})
}
