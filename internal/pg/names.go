package pg

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Names lets statements run with search_path = pg_catalog: it writes the schema of the tables into
// each statement. Otherwise a login that may create objects in that schema makes an operator or a
// function that suits the types of an expression better than the one of pg_catalog, and the server
// calls it with the rights of the relay.
//
// Unless it is configured, the schema is that of a table to which the search_path of role and
// database leads, found once. Until then statements stay as they are. It is safe for concurrent
// use.
type Names struct {
	table string

	mu     sync.RWMutex
	schema string // quoted; empty: not found yet
	texts  map[string]string
}

// NewNames returns the names of a schema; if that is empty, of the one that has the given table.
func NewNames(schema, table string) *Names {
	n := &Names{table: table, texts: map[string]string{}}
	if schema != "" {
		n.schema = pgx.Identifier{schema}.Sanitize()
	}
	return n
}

// SafePath is the search_path of a session whose statements name their schema.
const SafePath = "pg_catalog"

// Find finds the schema, if it is not known yet and there is one. It reports whether it has found
// it just now.
func (n *Names) Find(ctx context.Context, db DB) (found bool, err error) {
	if n.known() != "" {
		return false, nil
	}
	schema, err := findSchema(ctx, db, n.table)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	found = n.schema == ""
	n.schema = pgx.Identifier{schema}.Sanitize()
	return found, nil
}

func (n *Names) known() string {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.schema
}

// Pin makes new connections search pg_catalog alone once the schema is known.
func (n *Names) Pin(cfg *pgxpool.Config) {
	if n == nil {
		return
	}
	before := cfg.BeforeConnect
	cfg.BeforeConnect = func(ctx context.Context, conn *pgx.ConnConfig) error {
		if n.known() != "" {
			conn.RuntimeParams["search_path"] = SafePath
		}
		if before == nil {
			return nil
		}
		return before(ctx, conn)
	}
}

// token finds what must stay as it is (comments, strings, other names) and what is written again:
// names of ours, also as a regclass, and current_schema().
var token = regexp.MustCompile(`--[^\n]*|'(?:outbox|inbox|processed)\w*'::regclass\b|\bto_regclass\('\w+'\)|'(?:[^']|'')*'` +
	`|\bcurrent_schema\(\)|(?:"(?:[^"]|"")*"|[A-Za-z_]\w*)(?:\.(?:"(?:[^"]|"")*"|[A-Za-z_]\w*|\*))*`)

// ours are the tables and functions of both schemas. Columns begin with inbox_, too.
var ours = regexp.MustCompile(`^(outbox(_[a-z_]+)?|processed_events|inbox_(compatible_since|events|forgotten|freshness|has_payload|prune|schema_version))(\.|$)`)

// In returns a statement with the schema written into it.
func (n *Names) In(statement string) string {
	n.mu.RLock()
	schema, text := n.schema, n.texts[statement]
	n.mu.RUnlock()
	if schema == "" {
		return statement
	}
	if text != "" {
		return text
	}
	text = qualify(statement, schema)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.texts[statement] = text
	return text
}

func qualify(statement, schema string) string {
	if strings.HasPrefix(statement, "LISTEN") { // whose name is a channel
		return statement
	}
	quoted := func(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
	return token.ReplaceAllStringFunc(statement, func(word string) string {
		switch {
		case word == "current_schema()":
			return quoted(strings.ReplaceAll(schema[1:len(schema)-1], `""`, `"`)) + "::pg_catalog.text"
		case strings.HasSuffix(word, "'::regclass"):
			return quoted(schema+"."+strings.TrimSuffix(word[1:], "'::regclass")) + "::pg_catalog.regclass"
		case strings.HasPrefix(word, "to_regclass("):
			return "pg_catalog.to_regclass(" + quoted(schema+"."+strings.TrimSuffix(strings.TrimPrefix(word, "to_regclass('"), "')")) + ")"
		case ours.MatchString(word):
			return schema + "." + word
		}
		return word
	})
}

// On returns a pool whose statements name their schema. A pool of connections that [Names.Pin] has
// been given is emptied when the schema has been found: what was connected before still has the
// search_path of its role. Of no names it is pool itself.
func (n *Names) On(pool Pool) Pool {
	if n == nil {
		return pool
	}
	p := named{lower: lower{pool}, names: n}
	p.renaming = renaming{pool, p.in}
	return p
}

// A named pool runs its statements through renaming: the methods of the pool itself lie one level
// deeper.
type named struct {
	renaming
	lower
	names *Names
}

type lower struct{ Pool }

func (p named) in(ctx context.Context, statement string) (string, error) {
	if found, err := p.names.Find(ctx, p.Pool); err != nil {
		return "", err
	} else if connections, are := p.Pool.(*pgxpool.Pool); found && are {
		connections.Reset()
	}
	return p.names.In(statement), nil
}

// Begin begins a transaction of several round trips.
func (p named) Begin(ctx context.Context) (pgx.Tx, error) {
	if _, err := p.in(ctx, ""); err != nil {
		return nil, err
	}
	tx, err := p.Pool.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return p.names.Within(tx), nil
}

// Within returns a transaction whose statements name their schema, once that is known.
func (n *Names) Within(tx pgx.Tx) pgx.Tx {
	return namedTx{renaming{tx, func(_ context.Context, sql string) (string, error) { return n.In(sql), nil }}, lowerTx{tx}}
}

// A namedTx is as [named].
type namedTx struct {
	renaming
	lowerTx
}

type lowerTx struct{ pgx.Tx }

// A renaming runs statements after rename has named their schema.
type renaming struct {
	on     Pool
	rename func(ctx context.Context, statement string) (string, error)
}

// Query runs a statement; it ends with its rows.
func (r renaming) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	sql, err := r.rename(ctx, sql)
	if err != nil {
		return nil, err
	}
	return r.on.Query(ctx, sql, args...)
}

// QueryRow runs a statement whose first row is all that matters.
func (r renaming) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	sql, err := r.rename(ctx, sql)
	if err != nil {
		return committedRow{err: err}
	}
	return r.on.QueryRow(ctx, sql, args...)
}

// Exec runs a statement without rows.
func (r renaming) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	sql, err := r.rename(ctx, sql)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	return r.on.Exec(ctx, sql, args...)
}

// SendBatch runs statements in one round trip.
func (r renaming) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	for _, q := range batch.QueuedQueries {
		sql, err := r.rename(ctx, q.SQL)
		if err != nil {
			return pgx.FailedBatchResults(batch, err)
		}
		q.SQL = sql
	}
	return r.on.SendBatch(ctx, batch)
}
