package memory_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// chain is not refused, because of the comment.
const chain = "/* */ ROLLBACK AND CHAIN"

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

// Whatever way a handler takes: what it writes into a transaction that it put in the place of its
// own is not committed. An answer of 204 is the one for which nothing is written at the end that
// would show it.
func TestExchangedTransactionIsFoundOutOnEveryWay(t *testing.T) {
	t.Parallel()
	for way, exchange := range exchanges {
		t.Run(way, func(t *testing.T) { // on a connection that no other way has put in doubt
			testsize.OneIn(t, 3)
			t.Parallel()
			m := newMemory(t, nil)
			for range 2 {
				m.wantWorked("k", http.StatusNoContent, memory.ErrEnded, func(ctx context.Context, tx pgx.Tx) error {
					// The first statement leaves the transaction in no doubt.
					return errors.Join(execute(ctx, tx, "SELECT 1"), exchange(ctx, tx), effect(ctx, tx, "k"))
				})
				m.WantRows("k", 0, 0)
			}
		})
	}
}

// nameStandsFor has a connection of the pool know chain by names from its beginning.
func nameStandsFor(names ...string) func(cfg *pgxpool.Config) {
	return func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			for _, name := range names {
				if _, err := conn.Prepare(ctx, name, chain); err != nil {
					return err
				}
			}
			return nil
		}
	}
}

// A name that the pool has prepared says nothing.
func TestPreparedNamesAreInDoubt(t *testing.T) {
	t.Parallel()
	names := []string{"finish", "insert", "select"}
	m := newMemory(t, nameStandsFor(names...))
	for _, name := range names {
		m.wantWorked(name, http.StatusNoContent, memory.ErrEnded, func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(execute(ctx, tx, name), effect(ctx, tx, name))
		})
		m.WantRows(name, 0, 0)
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

// What a handler names on a connection keeps its name there. In a later event the name may read
// like a statement that ends nothing.
func TestNamesOfEarlierEventsAreInDoubt(t *testing.T) {
	t.Parallel()
	for way, expose := range exposures {
		for _, refusal := range []error{nil, errRefused} { // the first event is committed, or rolled back
			t.Run(fmt.Sprint(way, " ", refusal), func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				m := newMemory(t, nil)
				m.wantWorked("first", http.StatusNoContent, refusal, func(ctx context.Context, tx pgx.Tx) error {
					return errors.Join(expose(ctx, tx), refusal)
				})
				m.wantWorked("k", http.StatusNoContent, memory.ErrEnded, func(ctx context.Context, tx pgx.Tx) error {
					return errors.Join(execute(ctx, tx, misleading), effect(ctx, tx, "k"))
				})
				m.WantRows("k", 0, 0)
			})
		}
	}
}

// COMMIT is a statement as others are: it may be a name, too. What is remembered is committed all
// the same, and a connection on which nothing can be belongs to no event.
func TestCommitMayBeAName(t *testing.T) {
	t.Parallel()
	for stands, want := range map[string]error{
		"INSERT INTO effect VALUES ('in place of COMMIT')": memory.ErrNotCommit, "SELECT 1": memory.ErrNotCommit,
		chain: memory.ErrAborted, "/* */ ROLLBACK": memory.ErrAborted,
	} {
		for _, status := range []int{http.StatusNoContent, http.StatusOK} {
			t.Run(fmt.Sprint(status, " ", stands), func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				m := newMemory(t, nil)
				m.wantWorked("k", status, want, func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Conn().Prepare(ctx, "commit", stands)
					return errors.Join(effect(ctx, tx, "k"), err)
				})
				m.WantRows("k", 0, 0)
				m.wantWorked("k", status, nil, func(ctx context.Context, tx pgx.Tx) error { return effect(ctx, tx, "k") }) // on the next connection
				m.WantRows("k", 1, 1)
			})
		}
	}
}

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

// What would end the transaction is not sent. A handler that wanted to undo its work, and says 2xx
// all the same, has undone it; one that wanted to commit, or to begin, has what it wanted.
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
