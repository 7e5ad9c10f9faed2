package sqlconsumer

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// New is [consumer.New].
func New(db *sql.DB, cfg consumer.Config, handle consumer.Handler[*sql.Tx]) (http.Handler, error) {
	receive, err := receiver("New", db, cfg)
	switch {
	case err != nil:
		return nil, err
	case handle == nil:
		return nil, errors.New("sqlconsumer: New needs a handler")
	}
	return receive.Handler(func(ctx context.Context) error { return handle(ctx, Tx(ctx), consumer.EventFrom(ctx)) }), nil
}

// Middleware is [consumer.Middleware]. The handler finds its transaction by [Tx].
func Middleware(db *sql.DB, cfg consumer.Config) (func(http.Handler) http.Handler, error) {
	receive, err := receiver("Middleware", db, cfg)
	if err != nil {
		return nil, err
	}
	return receive.Middleware, nil
}

func receiver(constructor string, db *sql.DB, cfg consumer.Config) (memory.Receiver, error) {
	return memory.NewReceiver(cfg, func(s memory.Settings) (memory.Memory, error) {
		if db == nil {
			return nil, fmt.Errorf("sqlconsumer: %s needs a database", constructor)
		}
		return memory.InDatabase(s, &database{db: db, isolation: s.Isolation, timeout: s.CommitTimeout}), nil
	})
}

// Tx is [consumer.Tx] for handlers behind [Middleware]. A *sql.Tx cannot refuse Commit and
// Rollback: a handler that calls one of them is found out afterwards, and answered with 500 however
// well it did. What it committed stays, once.
func Tx(ctx context.Context) *sql.Tx {
	switch scope := handlerctx.From(ctx); {
	case scope.SQLTx != nil:
		return scope.SQLTx
	case scope.Tx != nil:
		panic("sqlconsumer: Tx is called behind consumer.Middleware, whose transaction is consumer.Tx's")
	case scope.Store:
		panic("sqlconsumer: Tx is called behind store.Middleware, which has no transaction: use Middleware where the effect is in PostgreSQL")
	}
	panic("sqlconsumer: Tx needs the context of a request that came through Middleware")
}

// NewRouter returns a Router without handlers, for [New].
func NewRouter() *consumer.Router[*sql.Tx] { return &consumer.Router[*sql.Tx]{} }

// Once is [consumer.Once].
func Once(ctx context.Context, tx *sql.Tx, event consumer.Event) (first bool, err error) {
	return memory.Once(ctx, event.Receiver, event.Source, event.IdempotencyKey, execIn(tx))
}

// ApplyIfNewer is [consumer.ApplyIfNewer].
func ApplyIfNewer(ctx context.Context, tx *sql.Tx, scope, entity string, v consumer.Version) (applied bool, err error) {
	return memory.ApplyIfNewer(ctx, scope, entity, memory.Version(v), execIn(tx))
}

func execIn(tx *sql.Tx) memory.Exec {
	return func(ctx context.Context, query string, args ...any) (int64, error) {
		result, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	}
}

// Prune is [consumer.Prune].
func Prune(ctx context.Context, db *sql.DB, cfg consumer.PruneConfig) (consumer.Pruned, error) {
	done, err := memory.Prune(cfg).Run(ctx, func(ctx context.Context, query string, args ...any) pgx.Row {
		return db.QueryRowContext(ctx, query, args...)
	})
	return consumer.Pruned(done), err
}
