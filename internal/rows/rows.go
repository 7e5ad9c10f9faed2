// Package rows reads what a statement returns.
package rows

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// A Querier runs statements: a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, statement string, args ...any) (pgx.Rows, error)
}

// Structs runs a statement whose columns are the fields of T in their order, and returns its rows;
// never nil without an error. what says in the error what failed.
func Structs[T any](ctx context.Context, q Querier, what, statement string, args ...any) ([]T, error) {
	return collect(ctx, q, pgx.RowToStructByPos[T], what, statement, args)
}

// Values is [Structs] for a statement of one column.
func Values[T any](ctx context.Context, q Querier, what, statement string, args ...any) ([]T, error) {
	return collect(ctx, q, pgx.RowTo[T], what, statement, args)
}

// Value returns the one column of the first row; without a row the error wraps [pgx.ErrNoRows].
func Value[T any](ctx context.Context, q Querier, what, statement string, args ...any) (value T, err error) {
	rows, err := q.Query(ctx, statement, args...)
	if err == nil {
		value, err = pgx.CollectOneRow(rows, pgx.RowTo[T])
	}
	if err != nil {
		return value, fmt.Errorf("%s: %w", what, err)
	}
	return value, nil
}

func collect[T any](ctx context.Context, q Querier, read pgx.RowToFunc[T], what, statement string, args []any) ([]T, error) {
	rows, err := q.Query(ctx, statement, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	list, err := pgx.CollectRows(rows, read)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return list, nil
}
