package consumer_test

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
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
	for statement, undoes := range map[string]bool{
		"COMMIT": false, "commit and chain;": false, "END": false, "BEGIN": false, "START TRANSACTION": false, "PREPARE TRANSACTION 'x'": false,
		"ROLLBACK": true, " rollback and chain": true, "ABORT": true,
	} {
		t.Run(statement, func(t *testing.T) {
			testsize.OneIn(t, 2)
			t.Parallel()
			e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					effect(e)(discardWriter{}, r)
					if err := senders[r.Header.Get("Test-Way")](r.Context(), consumer.Tx(r.Context()), statement); !errors.Is(err, consumer.ErrMiddlewareCommits) {
						t.Errorf("%s: %v", r.Header.Get("Test-Way"), err)
					}
					w.WriteHeader(http.StatusNoContent)
				}
			})
			for way := range senders {
				got := e.do(e.newRequest(way, "{}", with("Test-Way", way)))
				if undoes {
					wantProblem(t, got, 500, "handler-ended-transaction")
					e.wantRows(way, 0, 0)
					continue
				}
				wantFirst(t, got, 204, "")
				e.wantRows(way, 1, 1)
			}
			e.wantRows("with the batch", 0, 0)
		})
	}
}

// Savepoints are the handler's own.
func TestSavepointStatementsAreSent(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			for _, statement := range []string{
				"INSERT INTO effect VALUES ('kept')", "SAVEPOINT s", "INSERT INTO effect VALUES ('undone')", "ROLLBACK TO SAVEPOINT s",
				"rollback work to s", "RELEASE SAVEPOINT s",
			} {
				mustNot(e, e.exec(r.Context(), statement))
			}
			w.WriteHeader(http.StatusNoContent)
		}
	})
	wantFirst(t, e.post("k", "{}"), 204, "")
	e.wantRows("kept", 1, 0)
	e.wantRows("undone", 0, 0)
	e.wantRows("k", 0, 1)
}
