// Package handlerctx is what package consumer and consumer/consumertest share: the key of a handler's context, which neither
// has to export.
package handlerctx

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
)

type key struct{}

// With returns a context for a handler, whose [Value] is value.
func With(ctx context.Context, value any) context.Context {
	return context.WithValue(ctx, key{}, value)
}

// Value returns the value of the innermost [With], and nil for any other context.
func Value(ctx context.Context) any { return ctx.Value(key{}) }

// Tested is the value for a handler that a unit test calls, with one of the transactions. Event is a consumer.Event: this
// package cannot name the type, because package consumer imports it.
type Tested[Event any] struct {
	Event Event
	Tx    pgx.Tx
	SQLTx *sql.Tx
}
