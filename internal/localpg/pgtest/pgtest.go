// Package pgtest gives every test its own PostgreSQL database, migrated
// and empty. One throwaway server per test process starts at the first need:
//
//	func TestMain(m *testing.M) { pgtest.RunTests(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		pool := pgtest.Pool(t, pgtest.New(t, migrations.Outbox))
//		...
//	}
//
// A missing PostgreSQL fails the tests and says what to install: a suite that
// skips what it cannot run proves nothing.
package pgtest

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // registers the driver "pgx"
	"go.uber.org/goleak"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// patience bounds each step against the server, so that a stuck one fails its
// test and not the whole run. Starting takes about a second, a clone 50 ms.
const patience = time.Minute

// shared is the server of this test process. It is the one package-level state
// of this module, since testing offers no other place that outlives a test.
var shared process

type process struct {
	databases atomic.Int64 // numbers the clones

	mu        sync.Mutex // guards the fields below
	started   bool
	server    *localpg.Server
	err       error
	templates map[string]func() error // by name; each migrates once
}

// RunTests is the body of TestMain: it runs the tests, stops the server they
// used, fails on a goroutine that any of them left running, and exits. Options
// excuse goroutines, as goleak.IgnoreTopFunction does.
func RunTests(m *testing.M, options ...goleak.Option) {
	goleak.VerifyTestMain(suite{m}, options...)
}

type suite struct{ m *testing.M }

func (s suite) Run() int {
	code := s.m.Run()
	if err := shared.stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	return code
}

// New returns the DSN of a new database on the shared server, with the given
// sets of migrations applied in the order of their names. The database is
// dropped when t ends, also while others are connected. Safe in parallel tests.
func New(t testing.TB, sets ...migrations.Set) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	server, err := shared.start(ctx)
	Must(t, err)
	template, err := shared.template(server, sets)
	Must(t, err)
	name := "test_" + strconv.FormatInt(shared.databases.Add(1), 10)
	Must(t, server.CreateDatabase(ctx, name, template))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience) // t.Context() has ended
		defer cancel()
		if err := server.DropDatabase(ctx, name); err != nil {
			t.Error(err)
		}
	})
	return server.DSN(name)
}

// InEncoding returns the DSN of a new, empty database in another encoding than UTF-8.
func InEncoding(t testing.TB, encoding string) string {
	t.Helper()
	u, err := url.Parse(New(t))
	Must(t, err)
	server := Pool(t, u.String())
	u.Path += "_" + strings.ToLower(encoding)
	name := strings.TrimPrefix(u.Path, "/")
	_, err = server.Exec(t.Context(), `CREATE DATABASE `+name+` ENCODING `+encoding+` LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	Must(t, err)
	t.Cleanup(func() {
		if _, err := server.Exec(context.WithoutCancel(t.Context()), `DROP DATABASE `+name+` WITH (FORCE)`); err != nil {
			t.Error(err)
		}
	})
	return u.String()
}

// Pool returns a pool of connections to dsn that is closed when t ends. Closing
// waits for connections that the test did not release.
func Pool(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	return PoolWith(t, dsn, func(*pgxpool.Config) {})
}

// PoolWith is [Pool] with a configuration that change has changed.
func PoolWith(t testing.TB, dsn string, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	Must(t, err)
	change(cfg)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	Must(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// PoolBefore is [Pool] that calls do before each statement that contains a text.
func PoolBefore(t testing.TB, dsn, text string, do func()) *pgxpool.Pool {
	t.Helper()
	return PoolWith(t, dsn, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = &before{text, do} })
}

type before struct {
	text string
	do   func()
}

func (b *before) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, b.text) {
		b.do()
	}
	return ctx
}

func (b *before) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Program returns the path of one of PostgreSQL's programs, such as pg_dump. It skips t if the
// installation that [localpg.BinDirVariable] names lacks the program.
func Program(t testing.TB, name string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	server, err := shared.start(ctx)
	Must(t, err)
	return program(t, server, name)
}

// BaseBackup returns a copy of the server's data, for [localpg.Options.CopyOf]; see
// [localpg.Server.BaseBackup]. It skips t if the installation that [localpg.BinDirVariable] names
// lacks pg_basebackup.
func BaseBackup(t testing.TB, server *localpg.Server, standby bool) (dir string) {
	t.Helper()
	program(t, server, "pg_basebackup")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	dir, err := server.BaseBackup(ctx, standby)
	Must(t, err)
	return dir
}

// program finds a program beside the server's own. Other versions' programs would not do: pg_dump
// and pg_basebackup refuse servers that are newer.
func program(t testing.TB, server *localpg.Server, name string) string {
	t.Helper()
	path := filepath.Join(server.BinDir(), name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if os.Getenv(localpg.BinDirVariable) == "" {
		t.Fatalf("%s has no %s: install all of PostgreSQL's server package", server.BinDir(), name)
	}
	t.Skipf("%s, which %s names, has no %s", server.BinDir(), localpg.BinDirVariable, name)
	return ""
}

// Start returns a server for t alone, for tests that restart it, crash it or
// need other settings. It is stopped when t ends.
func Start(t testing.TB, o localpg.Options) *localpg.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	server, err := localpg.Start(ctx, o)
	Must(t, err)
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// StartCopy is [Start] for tests to which it does not matter that the server is a copy of the
// shared one's origin, with its system identifier and templates: it needs no initdb.
func StartCopy(t testing.TB, o localpg.Options) *localpg.Server {
	t.Helper()
	o.CopyOf = origin()
	return Start(t, o)
}

// origin returns the directory that [localpg.DataVariable] names. Not by os.Getenv, which makes go
// test run everything again when the variable has another value.
func origin() string {
	data, _ := syscall.Getenv(localpg.DataVariable)
	return data
}

// Prepare makes the migrated templates on server and shuts it down. Its data is for
// [localpg.DataVariable].
func Prepare(ctx context.Context, server *localpg.Server) error {
	for _, sets := range [][]migrations.Set{{migrations.Inbox}, {migrations.Outbox}, {migrations.Inbox, migrations.Outbox}} {
		if err := makeTemplate(ctx, server, templateName(sets), sets); err != nil {
			return err
		}
	}
	return server.Shutdown(ctx)
}

func makeTemplate(ctx context.Context, server *localpg.Server, name string, sets []migrations.Set) error {
	if err := server.CreateDatabase(ctx, name, ""); err != nil {
		return err
	}
	return migrate(ctx, server.DSN(name), sets)
}

func templateName(sets []migrations.Set) string {
	name := "template"
	for _, set := range sets {
		name += "_" + string(set)
	}
	return name
}

// Migrate applies sets to the database at dsn: to one on a server from [Start],
// or to a schema that its search_path names.
func Migrate(t testing.TB, dsn string, sets ...migrations.Set) {
	t.Helper()
	Must(t, migrate(t.Context(), dsn, sets))
}

func migrate(ctx context.Context, dsn string, sets []migrations.Set) error {
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	defer db.Close()
	// As it is since PostgreSQL 15: roles.sql refuses, and relays warn of, a schema in which
	// everybody may create.
	if _, err := db.ExecContext(ctx, `REVOKE CREATE ON SCHEMA public FROM PUBLIC`); err != nil {
		return fmt.Errorf("close schema public: %w", err)
	}
	for _, set := range sets {
		if err := migrations.Up(ctx, db, set); err != nil {
			return err
		}
	}
	return nil
}

func (p *process) start(ctx context.Context) (*localpg.Server, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.started {
		p.started = true
		p.templates = make(map[string]func() error)
		// A copy has the system identifier of the original, so the servers of [Start] are none:
		// tests compare theirs with that of this one.
		p.server, p.err = localpg.Start(ctx, localpg.Options{CopyOf: origin()})
	}
	return p.server, p.err
}

func (p *process) stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server == nil {
		return nil
	}
	return p.server.Stop()
}

// template returns the name of a database with the sets applied, to be cloned:
// migrating takes several times as long.
func (p *process) template(server *localpg.Server, sets []migrations.Set) (string, error) {
	sets = slices.Compact(slices.Sorted(slices.Values(sets)))
	if len(sets) == 0 {
		return "template0", nil
	}
	name := templateName(sets)
	if origin() != "" {
		return name, nil // by [Prepare]
	}
	p.mu.Lock()
	prepare, ok := p.templates[name]
	if !ok {
		prepare = sync.OnceValue(func() error {
			// Not the context of the test that happens to be first: the others share the result.
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			return makeTemplate(ctx, server, name, sets)
		})
		p.templates[name] = prepare
	}
	p.mu.Unlock()
	return name, prepare()
}
