package pg

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// pooled returns transactions over a single connection, as a pooler may lend it to others in
// between, and a pool of those others.
func pooled(t *testing.T, begin Prologue) (through *Transactions, others *pgxpool.Pool) {
	t.Helper()
	others = pgtest.PoolWith(t, relaytest.Covered(t).DSN, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })
	explain := func(err error) error {
		if HasCode(err, DivisionByZero) {
			return errors.New("explained")
		}
		return err
	}
	return NewTransactions(others, map[string]string{"work_mem": "7MB", "lock_timeout": "5s"}, begin, explain), others
}

func usual(_ context.Context, names, values []string) (string, []any) {
	return SetForTransaction, []any{names, values}
}

const shown = `SELECT current_setting('work_mem') || ' ' || current_setting('lock_timeout')`

func wantShown(t *testing.T, on DB, want string) {
	t.Helper()
	got := ""
	if err := on.QueryRow(t.Context(), shown).Scan(&got); err != nil || got != want {
		t.Errorf("the settings are %s, %v; want %s", got, err, want)
	}
}

// Every kind of statement has the settings, commits, and leaves nothing behind for who gets the
// connection next.
func TestTransactionsHaveTheirSettings(t *testing.T) {
	t.Parallel()
	through, others := pooled(t, usual)
	wantShown(t, others, "4MB 0")
	wantShown(t, through, "7MB 5s")
	wantShown(t, through.With("lock_timeout", "0"), "7MB 0")
	wantShown(t, others, "4MB 0")

	_, err := through.Exec(t.Context(), `CREATE TABLE shown AS `+shown+` AS settings`)
	relaytest.Must(t, err)
	var batch pgx.Batch
	for _, statement := range []string{`BEGIN`, `INSERT INTO shown ` + shown, `COMMIT`, `INSERT INTO shown ` + shown} {
		batch.Queue(statement)
	}
	relaytest.Must(t, through.SendBatch(t.Context(), &batch).Close())
	tx, err := through.Begin(t.Context())
	relaytest.Must(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO shown `+shown)
	relaytest.Must(t, err)
	relaytest.Must(t, tx.Commit(t.Context()))
	rows, err := through.Query(t.Context(), `SELECT settings FROM shown WHERE settings = $1`, pgx.QueryExecModeExec, "7MB 5s")
	relaytest.Must(t, err)
	if all, err := pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || len(all) != 4 {
		t.Errorf("%d of 4 statements had their settings, %v", len(all), err)
	}
	wantShown(t, others, "4MB 0")
	testkit.ErrorIs(t, "no row", through.QueryRow(t.Context(), `SELECT 1 WHERE false`).Scan(nil), pgx.ErrNoRows)
	wantShown(t, ReadCommitted(others, nil), "4MB 0")
}

// A statement that fails undoes what came with it, and leaves the connection to the next one. What
// fails only when the transaction ends is no success.
func TestFailedTransactionsLeaveNothing(t *testing.T) {
	t.Parallel()
	through, others := pooled(t, usual)
	_, err := others.Exec(t.Context(), `CREATE TABLE written (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO written VALUES (1)`)
	relaytest.Must(t, err)
	const twice = `INSERT INTO written VALUES (1) RETURNING n`
	for name, fail := range map[string]func() error{
		"Exec":     func() error { _, err := through.Exec(t.Context(), `SELECT 1/0`); return err },
		"QueryRow": func() error { return through.QueryRow(t.Context(), `SELECT 1/0`).Scan(nil) },
		"QueryRow, at the first row": func() error {
			return through.QueryRow(t.Context(), `SELECT 1/(2-n) FROM generate_series(2, 3) n`).Scan(nil)
		},
		"Scan":                    func() error { return through.QueryRow(t.Context(), `SELECT 'x'`).Scan(new(int)) },
		"Exec, at the commit":     func() error { _, err := through.Exec(t.Context(), twice); return err },
		"QueryRow, at the commit": func() error { return through.QueryRow(t.Context(), twice).Scan(nil) },
		"Query, at the commit": func() error {
			rows, err := through.Query(t.Context(), twice)
			relaytest.Must(t, err)
			_, err = pgx.CollectRows(rows, pgx.RowTo[int])
			return err
		},
		"SendBatch": func() error {
			var batch pgx.Batch
			batch.Queue(`INSERT INTO written VALUES (2)`)
			batch.Queue(`SELECT 1/0`)
			return through.SendBatch(t.Context(), &batch).Close()
		},
	} {
		if err := fail(); err == nil || err.Error() == "explained" {
			t.Errorf("%s: %v", name, err)
		}
		n := 0
		if err := through.QueryRow(t.Context(), `SELECT count(*) FROM written`).Scan(&n); err != nil || n != 1 {
			t.Errorf("%s: %d rows, %v", name, n, err)
		}
	}
}

// After a prologue that fails, which tells another database, nothing is run; the error is
// explained.
func TestPrologueKeepsStatementsFromRunning(t *testing.T) {
	t.Parallel()
	through, others := pooled(t, func(context.Context, []string, []string) (string, []any) { return `SELECT 1/0`, nil })
	_, err := others.Exec(t.Context(), `CREATE TABLE written (n int)`)
	relaytest.Must(t, err)
	const write = `INSERT INTO written VALUES (1)`
	var batch pgx.Batch
	batch.Queue(write)
	for name, run := range map[string]func() error{
		"Exec":            func() error { _, err := through.Exec(t.Context(), write); return err },
		"Query":           func() error { _, err := through.Query(t.Context(), write); return err },
		"QueryRow":        func() error { return through.QueryRow(t.Context(), write).Scan() },
		"SendBatch":       func() error { return through.SendBatch(t.Context(), &batch).Close() },
		"SendBatch, Exec": func() error { _, err := through.SendBatch(t.Context(), &batch).Exec(); return err },
		"Begin":           func() error { _, err := through.Begin(t.Context()); return err },
	} {
		if err := run(); err == nil || err.Error() != "explained" {
			t.Errorf("%s: %v", name, err)
		}
	}
	n := 0
	if err := others.QueryRow(t.Context(), `SELECT count(*) FROM written`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d were run, %v", n, err)
	}
}

// While one statement of housekeeping is running, no other one holds a connection, whatever its
// kind; then the next one has its turn.
func TestChoresRunOneAtATime(t *testing.T) {
	t.Parallel()
	chores := NewChores(relaytest.Covered(t).Pool)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	wantBusy := func(name string) {
		t.Helper()
		_, exec := chores.Exec(over, `SELECT 1`)
		_, query := chores.Query(over, `SELECT 1`)
		_, begin := chores.Begin(over)
		for _, err := range []error{exec, query, begin, chores.SendBatch(over, &pgx.Batch{}).Close(), chores.QueryRow(over, `SELECT 1`).Scan(nil)} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: another statement: %v", name, err)
			}
		}
	}
	for name, hold := range map[string]func() (end func() error){
		"Query": func() func() error {
			rows, err := chores.Query(t.Context(), `SELECT generate_series(1, 3)`)
			relaytest.Must(t, err)
			return func() error { rows.Close(); return rows.Err() }
		},
		"SendBatch": func() func() error {
			var batch pgx.Batch
			batch.Queue(`SELECT 1`)
			return chores.SendBatch(t.Context(), &batch).Close
		},
		"Commit": func() func() error {
			tx, err := chores.Begin(t.Context())
			relaytest.Must(t, err)
			return func() error { return errors.Join(tx.Commit(t.Context()), ignoreClosed(tx.Rollback(t.Context()))) }
		},
		"Rollback": func() func() error {
			tx, err := chores.Begin(t.Context())
			relaytest.Must(t, err)
			return func() error { return tx.Rollback(t.Context()) }
		},
	} {
		end := hold()
		wantBusy(name)
		relaytest.Must(t, end())
		if _, err := chores.Exec(t.Context(), `SELECT 1/0`); !HasCode(err, DivisionByZero) {
			t.Errorf("after %s: %v", name, err)
		}
		n := 0
		if err := chores.QueryRow(t.Context(), `SELECT 7`).Scan(&n); err != nil || n != 7 {
			t.Errorf("after %s: %d, %v", name, n, err)
		}
	}
}

// ignoreClosed is for a rollback after a commit, as pgx.BeginFunc makes it.
func ignoreClosed(err error) error {
	if errors.Is(err, pgx.ErrTxClosed) {
		return nil
	}
	return err
}
