package consumer_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
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
	e := newEnv(t, flavours[0], consumer.Config{}, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			exchange := exchanges[consumer.EventFrom(r.Context()).Key]
			tx := consumer.Tx(r.Context())
			mustNot(e, execute(r.Context(), tx, "SELECT 1")) // in no doubt so far
			mustNot(e, exchange(r.Context(), tx))
			effect(e)(discardWriter{}, r)
			w.WriteHeader(http.StatusNoContent)
		}
	})
	for way := range exchanges {
		for range 2 {
			got := e.post(way, "{}")
			if got.status != http.StatusInternalServerError {
				t.Errorf("%s: answered %d %s", way, got.status, got.body)
				break
			}
			wantProblem(t, got, 500, "handler-ended-transaction")
			e.wantResult(consumer.ResultCommitFailed)
			e.wantRows(way, 0, 0)
		}
	}
}

// A name that an earlier transaction of the same connection has prepared, or the pool itself, says nothing either.
func TestPreparedNamesAreInDoubt(t *testing.T) {
	t.Parallel()
	cfg, err := pgxpool.ParseConfig(pgtest.New(t, migrations.Inbox))
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"finish", "insert", "select"}
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
		return consumer.Middleware(pool, c)
	}
	e := newEnvAt(t, f, cfg.ConnString(), consumer.Config{}, func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			mustNot(e, execute(r.Context(), consumer.Tx(r.Context()), consumer.EventFrom(r.Context()).Key))
			effect(e)(discardWriter{}, r)
			w.WriteHeader(http.StatusNoContent)
		}
	})
	e.mustExec(schema)
	for _, name := range names {
		wantProblem(t, e.post(name, "{}"), 500, "handler-ended-transaction")
		e.wantRows(name, 0, 0)
	}
}
