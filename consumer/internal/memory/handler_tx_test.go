package memory_test

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// senders are the ways in which a statement's text reaches a handler's transaction.
var senders = map[string]func(ctx context.Context, tx pgx.Tx, query string) error{
	"Exec": func(ctx context.Context, tx pgx.Tx, query string) error { return execute(ctx, tx, query) },
	"Query": func(ctx context.Context, tx pgx.Tx, query string) error {
		rows, err := tx.Query(ctx, query)
		if rows.Next() || !errors.Is(rows.Err(), err) {
			return errors.New("there are rows")
		}
		return err
	},
	"QueryRow": func(ctx context.Context, tx pgx.Tx, query string) error {
		return tx.QueryRow(ctx, query).Scan()
	},
	"SendBatch": func(ctx context.Context, tx pgx.Tx, query string) error {
		batch := &pgx.Batch{}
		batch.Queue("INSERT INTO effect VALUES ('with the batch')")
		batch.Queue(query)
		return tx.SendBatch(ctx, batch).Close()
	},
	"a savepoint": func(ctx context.Context, tx pgx.Tx, query string) error {
		inner, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		return execute(ctx, inner, query)
	},
}

// What would end the transaction is not sent. A handler that wanted to undo its work, and says 2xx all the same, has undone it;
// one that wanted to commit, or to begin, has what it wanted.
func TestStatementsThatEndTheTransactionAreRefused(t *testing.T) {
	t.Parallel()
	for statement, want := range map[string]error{
		"COMMIT": nil, "commit and chain;": nil, "END": nil, "BEGIN": nil, "START TRANSACTION": nil, "PREPARE TRANSACTION 'x'": nil,
		"ROLLBACK": memory.ErrEnded, " rollback and chain": memory.ErrEnded, "ABORT": memory.ErrEnded,
	} {
		t.Run(statement, func(t *testing.T) {
			testsize.OneIn(t, 2)
			t.Parallel()
			m := newMemory(t, nil)
			for way, send := range senders {
				m.wantWorked(way, http.StatusNoContent, want, func(ctx context.Context, tx pgx.Tx) error {
					if err := send(ctx, tx, statement); !errors.Is(err, memory.ErrMiddlewareCommits) {
						t.Errorf("%s: %v", way, err)
					}
					return effect(ctx, tx, way)
				})
				if want == nil {
					m.WantRows(way, 1, 1)
				} else {
					m.WantRows(way, 0, 0)
				}
			}
			m.WantRows("with the batch", 0, 0)
		})
	}
}

// Savepoints are the handler's own.
func TestSavepointStatementsAreSent(t *testing.T) {
	t.Parallel()
	m := newMemory(t, nil)
	m.wantWorked("k", http.StatusNoContent, nil, func(ctx context.Context, tx pgx.Tx) (err error) {
		for _, statement := range []string{
			"INSERT INTO effect VALUES ('kept')", "SAVEPOINT s", "INSERT INTO effect VALUES ('undone')", "ROLLBACK TO SAVEPOINT s",
			"rollback work to s", "RELEASE SAVEPOINT s",
		} {
			err = errors.Join(err, execute(ctx, tx, statement))
		}
		return err
	})
	m.WantRows("kept", 1, 0)
	m.WantRows("undone", 0, 0)
	m.WantRows("k", 0, 1)
}
