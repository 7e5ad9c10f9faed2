package relay

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Pooler says whether a connection pooler stands between the relay and its database. The zero value finds out.
type Pooler struct {
	// Mode says what Config.Pool leads to. Empty: PoolerAuto.
	Mode PoolerMode
	// Session is how to reach the server itself when Config.Pool leads through a pooler. The relay opens one connection
	// of it, and is with it what it is without a pooler: woken by notifications, rescued within about a second. nil: as
	// Config.Pool.
	Session *pgxpool.Config
}

// PoolerMode says what a database URL leads to.
type PoolerMode string

// What a database URL may lead to.
const (
	// PoolerAuto asks the server whether it got the settings of a session, and works as PoolerTransaction if it did not.
	PoolerAuto PoolerMode = "auto"
	// PoolerNone is the server itself. A relay that finds a pooler there ends with ErrPooler.
	PoolerNone PoolerMode = "none"
	// PoolerTransaction is a pooler that keeps nothing but transactions, as PgBouncer does. Without Pooler.Session, events
	// are found by polling alone, and the work of a relay that crashed waits for its lease.
	PoolerTransaction PoolerMode = "transaction"
)

func (v *validator) pooler(p Pooler) {
	known := []PoolerMode{"", PoolerAuto, PoolerNone, PoolerTransaction}
	v.Require(slices.Contains(known, p.Mode), "database.pooler", "%q is not known; write auto, none or transaction", p.Mode)
}

// executor runs statements: a pool of connections or one connection, or transactions, where sessions do not last.
type executor interface {
	querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	Begin(ctx context.Context) (pgx.Tx, error)
}

// transactions runs every statement in a transaction of its own that begins with the settings of a session, all of it in
// one round trip. It leaves nothing behind on a connection that belongs to somebody else next.
type transactions struct {
	pool          *pgxpool.Pool
	names, values []string // of the settings
	guard         *guard   // knows which database it has to be
}

// passed are the settings that poolers keep for each of their clients.
var passed = map[string]bool{
	"application_name": true, "client_encoding": true, "datestyle": true, "timezone": true, "standard_conforming_strings": true,
	"options": true, // cannot be set later: who refuses it says so
}

// directly gives a pool the settings that the engine's statements rest on, for as long as its connections last.
func directly(cfg *pgxpool.Config, schema string) {
	maps.Copy(cfg.ConnConfig.RuntimeParams, sessionSettings)
	if schema != "" {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	}
}

// throughPooler takes from a pool all that does not outlive a transaction, and returns the settings that each
// transaction needs instead.
func throughPooler(cfg *pgxpool.Config, schema string) (settings map[string]string) {
	directly(cfg, schema)
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // nothing is prepared
	settings = map[string]string{}
	for name, value := range cfg.ConnConfig.RuntimeParams {
		if passed[strings.ToLower(name)] {
			continue
		}
		delete(cfg.ConnConfig.RuntimeParams, name)
		// Of the connection between pooler and server, which is the pooler's to watch; and of BEGIN itself.
		if !strings.HasPrefix(name, "tcp_") && name != "default_transaction_isolation" {
			settings[name] = value
		}
	}
	return settings
}

func newTransactions(pool *pgxpool.Pool, settings map[string]string, g *guard) *transactions {
	t := &transactions{pool: pool, guard: g}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		t.names, t.values = append(t.names, name), append(t.values, settings[name])
	}
	return t
}

// with returns the same transactions with one setting changed.
func (t *transactions) with(name, value string) *transactions {
	changed := &transactions{pool: t.pool, names: t.names, values: slices.Clone(t.values), guard: t.guard}
	changed.values[slices.Index(t.names, name)] = value
	return changed
}

// A sent is a transaction on its way.
type sent struct {
	conn    *pgxpool.Conn
	results pgx.BatchResults
}

func (t *transactions) send(ctx context.Context, queries ...*pgx.QueuedQuery) (*sent, error) {
	conn, err := t.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	var batch pgx.Batch
	batch.Queue(beginTransaction)
	settings, args := t.guard.settings(ctx, t.names, t.values)
	batch.Queue(settings, args...)
	batch.QueuedQueries = append(batch.QueuedQueries, queries...)
	batch.Queue(commitTransaction)
	s := &sent{conn: conn, results: conn.SendBatch(ctx, &batch)}
	for range 2 {
		if _, err := s.results.Exec(); err != nil {
			_ = s.end(ctx) // repeats it
			return nil, elsewhere(err)
		}
	}
	return s, nil
}

// end waits for the commit and gives the connection back.
func (s *sent) end(ctx context.Context) error {
	err := s.results.Close()
	if !s.conn.Conn().IsClosed() && s.conn.Conn().PgConn().TxStatus() != 'I' {
		// Otherwise the pooler would have to throw its connection to the server away.
		rolling, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
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
func (t *transactions) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
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
func (t *transactions) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
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
	defer r.rows.Close()
	found := r.rows.Next()
	if found {
		if err := r.rows.Scan(into...); err != nil {
			return err
		}
	}
	r.rows.Close()
	if err := r.rows.Err(); err != nil {
		return err
	}
	if !found {
		return pgx.ErrNoRows
	}
	return nil
}

// Exec runs a statement without rows.
func (t *transactions) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
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

// SendBatch runs statements in one transaction. A BEGIN and a COMMIT among them say no more than that.
func (t *transactions) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	queries := slices.DeleteFunc(slices.Clone(batch.QueuedQueries), func(q *pgx.QueuedQuery) bool {
		return strings.EqualFold(q.SQL, "BEGIN") || strings.EqualFold(q.SQL, "COMMIT")
	})
	s, err := t.send(ctx, queries...)
	if err != nil {
		return failedBatch{err}
	}
	return committedBatch{BatchResults: s.results, end: sync.OnceValue(func() error { return s.end(ctx) })}
}

// committedBatch are results that end with the commit.
type committedBatch struct {
	pgx.BatchResults
	end func() error
}

func (b committedBatch) Close() error { return b.end() }

// failedBatch was never sent.
type failedBatch struct{ err error }

func (b failedBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, b.err }
func (b failedBatch) Query() (pgx.Rows, error)         { return nil, b.err }
func (b failedBatch) QueryRow() pgx.Row                { return committedRow{err: b.err} }
func (b failedBatch) Tx() pgx.Tx                       { return nil }
func (b failedBatch) Close() error                     { return b.err }

// Begin begins a transaction of several round trips.
func (t *transactions) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := t.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, err
	}
	settings, args := t.guard.settings(ctx, t.names, t.values)
	if _, err := tx.Exec(ctx, settings, args...); err != nil {
		return nil, errors.Join(elsewhere(err), tx.Rollback(ctx))
	}
	return tx, nil
}
