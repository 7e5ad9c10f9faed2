// Package handlerctx carries an event and its transaction in the context of a handler, from the
// packages that call handlers to those that export how a handler finds them.
package handlerctx

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
)

// Scope is what a handler's context carries.
type Scope struct {
	Event headers.Event
	Tx    pgx.Tx  // of package consumer and of inboxes
	SQLTx *sql.Tx // of package sqlconsumer
	Store bool    // of package store: there is no transaction
}

type key struct{}

// With returns a context for a handler, in which [From] finds scope.
func With(ctx context.Context, scope *Scope) context.Context {
	return context.WithValue(ctx, key{}, scope)
}

// From returns the scope of the innermost [With], and an empty one for any other context.
func From(ctx context.Context) *Scope {
	if scope, ok := ctx.Value(key{}).(*Scope); ok {
		return scope
	}
	return &Scope{}
}
