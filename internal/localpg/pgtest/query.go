package pgtest

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Must ends the test when err is not nil. Call it on the test's own goroutine.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Exec runs a statement through a pool, a connection or a transaction of pgx, and ends the test
// when it fails. Without arguments the text may hold several statements, as pgx allows.
func Exec(t testing.TB, db interface {
	Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
}, query string, args ...any,
) {
	t.Helper()
	if _, err := db.Exec(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// Row returns the only column of the first row that a query answers, and ends the test when the
// query fails or has no row.
func Row[T any](t testing.TB, db interface {
	QueryRow(ctx context.Context, query string, args ...any) pgx.Row
}, query string, args ...any,
) (value T) {
	t.Helper()
	if err := db.QueryRow(t.Context(), query, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}
