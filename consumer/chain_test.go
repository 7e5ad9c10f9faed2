package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// chain is not refused, because of the comment.
const chain = unseen + "ROLLBACK AND CHAIN"

// rewritten sends another statement than it is asked to.
type rewritten struct{ query string }

func (r rewritten) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return r.query, nil, nil
}

// takesConn scans a row, and keeps its connection.
type takesConn struct{ conn *pgx.Conn }

func (s *takesConn) ScanRow(rows pgx.Rows) error {
	s.conn = rows.Conn()
	return nil
}

// exchanges are ways in which a handler can put another transaction in the place of its own.
var exchanges = map[string]func(ctx context.Context, tx pgx.Tx) error{
	"a comment with a newline": func(ctx context.Context, tx pgx.Tx) error { return execute(ctx, tx, "-- SELECT\nROLLBACK AND CHAIN") },
	"a comment with a return":  func(ctx context.Context, tx pgx.Tx) error { return execute(ctx, tx, "-- SELECT\rROLLBACK AND CHAIN") },
	"another comment":          func(ctx context.Context, tx pgx.Tx) error { return execute(ctx, tx, "/* SELECT */ROLLBACK AND CHAIN") },
	"lower case": func(ctx context.Context, tx pgx.Tx) error {
		return execute(ctx, tx, "\t/**/ rollback and chain;")
	},
	"several statements": func(ctx context.Context, tx pgx.Tx) error {
		return execute(ctx, tx, "SELECT 1; "+chain, pgx.QueryExecModeSimpleProtocol)
	},
	"a rewriter":         func(ctx context.Context, tx pgx.Tx) error { return execute(ctx, tx, "SELECT 1", rewritten{chain}) },
	"named arguments":    func(ctx context.Context, tx pgx.Tx) error { return execute(ctx, tx, chain, pgx.NamedArgs{}) },
	"a prepared name":    func(ctx context.Context, tx pgx.Tx) error { return prepared(ctx, tx, "finish") },
	"a misleading name":  func(ctx context.Context, tx pgx.Tx) error { return prepared(ctx, tx, "insert") },
	"the connection":     func(ctx context.Context, tx pgx.Tx) error { return chainOn(ctx, tx.Conn()) },
	"a savepoint's":      savepoints,
	"a row's connection": rowsConn,
	"a scanner's": func(ctx context.Context, tx pgx.Tx) error {
		var s takesConn
		if err := tx.QueryRow(ctx, "SELECT 1").Scan(&s); err != nil {
			return err
		}
		return chainOn(ctx, s.conn)
	},
	"a batch": func(ctx context.Context, tx pgx.Tx) error {
		batch := &pgx.Batch{}
		batch.Queue("SELECT 1")
		batch.Queue(chain)
		return tx.SendBatch(ctx, batch).Close()
	},
	"a query": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, chain)
		if err == nil {
			rows.Close()
			err = rows.Err()
		}
		return err
	},
	"a row": func(ctx context.Context, tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, chain).Scan(); err != pgx.ErrNoRows {
			return err
		}
		return nil
	},
}

func execute(ctx context.Context, tx pgx.Tx, query string, args ...any) error {
	_, err := tx.Exec(ctx, query, args...)
	return err
}

func chainOn(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, chain)
	return err
}

func prepared(ctx context.Context, tx pgx.Tx, name string) error {
	if _, err := tx.Prepare(ctx, name, chain); err != nil {
		return err
	}
	return execute(ctx, tx, name)
}

func savepoints(ctx context.Context, tx pgx.Tx) error {
	inner, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	return execute(ctx, inner, chain)
}

func rowsConn(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, "SELECT 1")
	if err != nil {
		return err
	}
	conn := rows.Conn()
	rows.Close()
	return chainOn(ctx, conn)
}

// Whatever way a handler takes: what it writes into a transaction that it put in the place of its own is not committed. An
// answer of 204 is the one for which nothing is written at the end that would show it.
func TestExchangedTransactionIsFoundOutOnEveryWay(t *testing.T) {
	t.Parallel()
	for way, exchange := range exchanges {
		t.Run(way, func(t *testing.T) { // on a connection that no other way has put in doubt
			testsize.OneIn(t, 3)
			t.Parallel()
			e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					tx := consumer.Tx(r.Context())
					mustNot(e, execute(r.Context(), tx, "SELECT 1")) // in no doubt so far
					mustNot(e, exchange(r.Context(), tx))
					effect(e)(discardWriter{}, r)
					w.WriteHeader(http.StatusNoContent)
				}
			})
			for range 2 {
				wantProblem(t, e.post("k", "{}"), 500, "handler-ended-transaction")
				e.wantResult(consumer.ResultCommitFailed)
				e.wantRows("k", 0, 0)
			}
		})
	}
}

// newEnvOn is newEnv with one connection, on which the names stand for chain from the beginning.
func newEnvOn(t *testing.T, names []string, handler func(e *env) http.HandlerFunc) *env {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(withSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		for _, name := range names {
			if _, err := conn.Prepare(ctx, name, chain); err != nil {
				return err
			}
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	f := flavours[0]
	f.wrap = func(_ testing.TB, _ string, c consumer.Config) func(http.Handler) http.Handler {
		return consumer.Must(consumer.Middleware(pool, c))
	}
	e := newEnvAt(t, f, cfg.ConnString(), consumer.Config{}, handler)
	e.mustExec(schema)
	return e
}

// A name that the pool has prepared says nothing.
func TestPreparedNamesAreInDoubt(t *testing.T) {
	t.Parallel()
	names := []string{"finish", "insert", "select"}
	e := newEnvOn(t, names, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			mustNot(e, execute(r.Context(), consumer.Tx(r.Context()), consumer.EventFrom(r.Context()).Key))
			effect(e)(discardWriter{}, r)
			w.WriteHeader(http.StatusNoContent)
		}
	})
	for _, name := range names {
		wantProblem(t, e.post(name, "{}"), 500, "handler-ended-transaction")
		e.wantRows(name, 0, 0)
	}
}

const misleading = "select again" // a name

// exposures are ways in which a handler gets at the connection, and gives chain a name on it.
var exposures = map[string]func(ctx context.Context, tx pgx.Tx) error{
	"Prepare": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Prepare(ctx, misleading, chain)
		return err
	},
	"a savepoint's Prepare": func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) error {
			_, err := inner.Prepare(ctx, misleading, chain)
			return err
		})
	},
	"Rows.Conn": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, "SELECT 1")
		if err != nil {
			return err
		}
		rows.Close()
		return nameChain(ctx, rows.Conn())
	},
	"a scanner of a row": func(ctx context.Context, tx pgx.Tx) error {
		var s takesConn
		return errors.Join(tx.QueryRow(ctx, "SELECT 1").Scan(&s), nameChain(ctx, s.conn))
	},
	"a scanner of rows": func(ctx context.Context, tx pgx.Tx) error {
		var s takesConn
		rows, err := tx.Query(ctx, "SELECT 1")
		if err == nil && rows.Next() {
			err = rows.Scan(&s)
		}
		rows.Close()
		return errors.Join(err, nameChain(ctx, s.conn))
	},
	"a batch": func(ctx context.Context, tx pgx.Tx) error {
		batch, conn := &pgx.Batch{}, (*pgx.Conn)(nil)
		batch.Queue("SELECT 1").Query(func(rows pgx.Rows) error {
			conn = rows.Conn()
			return nil
		})
		return errors.Join(tx.SendBatch(ctx, batch).Close(), nameChain(ctx, conn))
	},
	"a rewriter": func(ctx context.Context, tx pgx.Tx) error { return execute(ctx, tx, "SELECT 1", namesChain{}) },
}

func nameChain(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Prepare(ctx, misleading, chain)
	return err
}

// namesChain leaves its statement as it is.
type namesChain struct{}

func (namesChain) RewriteQuery(ctx context.Context, conn *pgx.Conn, query string, args []any) (string, []any, error) {
	return query, args, nameChain(ctx, conn)
}

// What a handler names on a connection keeps its name there. In a later request the name may read like a statement that ends
// nothing.
func TestNamesOfEarlierRequestsAreInDoubt(t *testing.T) {
	t.Parallel()
	for way, expose := range exposures {
		for _, status := range []int{http.StatusNoContent, http.StatusTeapot} { // the first request's: committed, or rolled back
			t.Run(fmt.Sprint(way, " ", status), func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := newEnvOn(t, nil, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						if consumer.EventFrom(r.Context()).Key == "first" {
							mustNot(e, expose(r.Context(), consumer.Tx(r.Context())))
							w.WriteHeader(status)
							return
						}
						mustNot(e, e.exec(r.Context(), misleading))
						effect(e)(discardWriter{}, r)
						w.WriteHeader(http.StatusNoContent)
					}
				})
				if got := e.post("first", "{}"); got.status != status {
					t.Errorf("answered %d %s", got.status, got.body)
				}
				wantProblem(t, e.post("k", "{}"), 500, "handler-ended-transaction")
				e.wantRows("k", 0, 0)
			})
		}
	}
}

// COMMIT is a statement as others are: it may be a name, too. What is answered 2xx is committed all the same, and a connection
// on which nothing can be belongs to no event.
func TestCommitMayBeAName(t *testing.T) {
	t.Parallel()
	for _, stands := range []string{"INSERT INTO effect VALUES ('in place of COMMIT')", chain, unseen + "ROLLBACK", "SELECT 1"} {
		for name, handler := range map[string]http.HandlerFunc{
			"204": func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) },
			"200": func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("done")) },
		} {
			t.Run(name+" "+stands, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				var prepared atomic.Bool
				e := newEnvOn(t, nil, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						effect(e)(discardWriter{}, r)
						if !prepared.Swap(true) {
							_, err := consumer.Tx(r.Context()).Conn().Prepare(r.Context(), "commit", stands)
							mustNot(e, err)
						}
						handler(w, r)
					}
				})
				wantProblem(t, e.post("k", "{}"), 500, "commit-failed")
				e.wantRows("k", 0, 0)
				if got := e.post("k", "{}"); got.status/100 != 2 || got.header.Get(webhook.Replayed) != "" {
					t.Errorf("on the next connection: %d %s", got.status, got.body)
				}
				e.wantRows("k", 1, 1)
			})
		}
	}
}
