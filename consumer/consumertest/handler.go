package consumertest

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// WithTx returns a context in which a handler finds event by [consumer.EventFrom] and tx by
// [consumer.Tx], as behind [consumer.Middleware]. The handler can neither commit nor roll back: the
// test does, as it began tx. event is given as it is, nothing in it is checked or filled in.
func WithTx(ctx context.Context, event consumer.Event, tx pgx.Tx) context.Context {
	return handlerctx.With(ctx, &handlerctx.Scope{Event: headers.Event(event), Tx: memory.ForHandler(tx)})
}

// WithTxSQL is [WithTx] for handlers behind sqlconsumer.Middleware, which find tx by
// sqlconsumer.Tx.
func WithTxSQL(ctx context.Context, event consumer.Event, tx *sql.Tx) context.Context {
	return handlerctx.With(ctx, &handlerctx.Scope{Event: headers.Event(event), SQLTx: tx})
}
