package pg

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A Prologue returns the statement with which each transaction begins, and its arguments. The
// statement sets the settings that it is given.
type Prologue func(ctx context.Context, names, values []string) (statement string, args []any)

// Transactions runs every statement in its own transaction that begins with the settings of a
// session, all of it in one round trip where statements are not described before. It leaves nothing
// behind on a connection that another user gets next.
type Transactions struct {
	pool          *pgxpool.Pool
	names, values []string // of the settings
	begin         Prologue
	explain       func(error) error
	objects       *Names // nil: statements find them by the search_path of the connection
	// described: the server is asked for the types of a statement before it runs, and must find the
	// same names then.
	described bool
}

// NewTransactions returns transactions over pool. explain turns an error of the prologue into what
// it means.
func NewTransactions(pool *pgxpool.Pool, settings map[string]string, begin Prologue, explain func(error) error) *Transactions {
	t := &Transactions{pool: pool, begin: begin, explain: explain}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		t.names, t.values = append(t.names, name), append(t.values, settings[name])
	}
	return t
}

// ReadCommitted returns transactions that set nothing but their isolation and search_path, for
// statements that must see what was committed since they began, whatever role and database say.
func ReadCommitted(pool *pgxpool.Pool, objects *Names) *Transactions {
	begin := func(_ context.Context, names, values []string) (string, []any) {
		return SetForTransaction, []any{names, values}
	}
	t := NewTransactions(pool, nil, begin, func(err error) error { return err }).Naming(objects)
	t.described = true
	return t
}

// Naming returns the same transactions with statements that name the schema of their objects.
func (t *Transactions) Naming(objects *Names) *Transactions {
	changed := *t
	changed.objects = objects
	return &changed
}

// With returns the same transactions With one setting changed.
func (t *Transactions) With(name, value string) *Transactions {
	changed := *t
	changed.values = slices.Clone(t.values)
	changed.values[slices.Index(t.names, name)] = value
	return &changed
}

// settings returns the statement that a transaction begins with, once it is known where its objects
// are.
func (t *Transactions) settings(ctx context.Context) (statement string, args []any, err error) {
	names, values := t.names, t.values
	if t.objects != nil {
		if _, err := t.objects.Find(ctx, t.pool); err != nil {
			return "", nil, err
		}
		if t.objects.known() != "" {
			names, values = append(slices.Clip(names), "search_path"), append(slices.Clip(values), SafePath)
		}
	}
	statement, args = t.begin(ctx, names, values)
	return statement, args, nil
}

// in returns a statement with the schema of its objects.
func (t *Transactions) in(statement string) string {
	if t.objects == nil {
		return statement
	}
	return t.objects.In(statement)
}

// rollbackTimeout bounds how long a failed transaction may take to be rolled back.
const rollbackTimeout = 2 * time.Second

// A sent is a transaction on its way.
type sent struct {
	conn    *pgxpool.Conn
	results pgx.BatchResults
}

func (t *Transactions) send(ctx context.Context, queries ...*pgx.QueuedQuery) (*sent, error) {
	settings, args, err := t.settings(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := t.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	var batch pgx.Batch
	batch.Queue(beginTransaction)
	batch.Queue(settings, args...)
	begins := 2
	if t.described {
		if err := conn.SendBatch(ctx, &batch).Close(); err != nil {
			_ = (&sent{conn: conn, results: pgx.FailedBatchResults(&batch, err)}).end(ctx)
			return nil, t.explain(err)
		}
		batch, begins = pgx.Batch{}, 0
	}
	for _, q := range queries {
		q.SQL = t.in(q.SQL)
	}
	batch.QueuedQueries = append(batch.QueuedQueries, queries...)
	batch.Queue(commitTransaction)
	s := &sent{conn: conn, results: conn.SendBatch(ctx, &batch)}
	for range begins {
		if _, err := s.results.Exec(); err != nil {
			_ = s.end(ctx) // repeats it
			return nil, t.explain(err)
		}
	}
	return s, nil
}

// end waits for the commit and gives the connection back.
func (s *sent) end(ctx context.Context) error {
	err := s.results.Close()
	if !s.conn.Conn().IsClosed() && s.conn.Conn().PgConn().TxStatus() != 'I' {
		// Otherwise the pooler would have to throw its connection to the server away.
		rolling, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_, _ = s.conn.Exec(rolling, rollbackTransaction)
	}
	s.conn.Release()
	return err
}

// queued leaves out a mode in which to run the statement: through a pooler there is but one.
func queued(sql string, args []any) *pgx.QueuedQuery {
	if len(args) > 0 {
		if _, isMode := args[0].(pgx.QueryExecMode); isMode {
			args = args[1:]
		}
	}
	return &pgx.QueuedQuery{SQL: sql, Arguments: args}
}

// Query runs a statement; its transaction ends with the rows.
func (t *Transactions) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	s, err := t.send(ctx, queued(sql, args))
	if err != nil {
		return nil, err
	}
	rows, err := s.results.Query()
	if err != nil {
		_ = s.end(ctx)
		return nil, err
	}
	return &committedRows{Rows: rows, end: func() error { return s.end(ctx) }}, nil
}

// committedRows are rows that end with the commit.
type committedRows struct {
	pgx.Rows
	end func() error // nil: it has ended
	err error
}

func (r *committedRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *committedRows) Close() {
	r.Rows.Close()
	if r.end != nil {
		r.err, r.end = r.end(), nil
	}
}

func (r *committedRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}

// QueryRow runs a statement whose first row is all that matters.
func (t *Transactions) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := t.Query(ctx, sql, args...)
	return committedRow{rows: rows, err: err}
}

type committedRow struct {
	rows pgx.Rows
	err  error
}

func (r committedRow) Scan(into ...any) error {
	if r.err != nil {
		return r.err
	}
	_, err := pgx.CollectOneRow(r.rows, func(row pgx.CollectableRow) (struct{}, error) {
		return struct{}{}, row.Scan(into...)
	})
	return err
}

// Exec runs a statement without rows.
func (t *Transactions) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	s, err := t.send(ctx, queued(sql, args))
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := s.results.Exec()
	if endErr := s.end(ctx); err == nil {
		err = endErr
	}
	return tag, err
}

// SendBatch runs statements in one transaction. A BEGIN and a COMMIT among them say no more than
// that.
func (t *Transactions) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	queries := slices.DeleteFunc(slices.Clone(batch.QueuedQueries), func(q *pgx.QueuedQuery) bool {
		return strings.EqualFold(q.SQL, "BEGIN") || strings.EqualFold(q.SQL, "COMMIT")
	})
	s, err := t.send(ctx, queries...)
	if err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	return committedBatch{BatchResults: s.results, end: sync.OnceValue(func() error { return s.end(ctx) })}
}

// committedBatch are results that end with the commit.
type committedBatch struct {
	pgx.BatchResults
	end func() error
}

func (b committedBatch) Close() error { return b.end() }

// Begin begins a transaction of several round trips.
func (t *Transactions) Begin(ctx context.Context) (pgx.Tx, error) {
	return t.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
}

// BeginTx is [Transactions.Begin] with options.
func (t *Transactions) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	settings, args, err := t.settings(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := t.pool.BeginTx(ctx, options)
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, settings, args...); err != nil {
		return nil, errors.Join(t.explain(err), tx.Rollback(ctx))
	}
	if t.objects != nil {
		return t.objects.Within(tx), nil
	}
	return tx, nil
}
