package relaytest

import (
	"context"
	"net/url"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// At returns the database at dsn, with a pool to look at it.
func At(t testing.TB, dsn string) *Database {
	t.Helper()
	return &Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}
}

// Serve returns the database "postgres" of a server that t has for itself, with an outbox.
func Serve(t testing.TB, o localpg.Options) (*localpg.Server, *Database) {
	t.Helper()
	server := pgtest.Start(t, o)
	if o.CopyOf == "" {
		pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	}
	return server, At(t, server.DSN(""))
}

// ServeCopy is [Serve] for tests to which it does not matter that the server is a copy, as in
// [pgtest.StartCopy].
func ServeCopy(t testing.TB, o localpg.Options) (*localpg.Server, *Database) {
	t.Helper()
	server := pgtest.StartCopy(t, o)
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	return server, At(t, server.DSN(""))
}

// WhileDown shuts a server down in order, and starts it again after do.
func (db *Database) WhileDown(server *localpg.Server, do func()) {
	db.Helper()
	Must(db, server.Shutdown(db.Context()))
	do()
	Must(db, server.StartAgain(db.Context()))
	db.Pool.Reset()
}

// FromTemplate copies the database with CREATE DATABASE … TEMPLATE, for which it closes the pool.
func (db *Database) FromTemplate() *Database {
	db.Helper()
	db.Pool.Close()
	u, err := url.Parse(db.DSN)
	Must(db, err)
	name := strings.TrimPrefix(u.Path, "/")
	elsewhere := pgtest.Pool(db, pgtest.New(db))
	Eventually(db, "the copy of an unused database", func() bool {
		_, err := elsewhere.Exec(db.Context(), "CREATE DATABASE "+name+"_copy TEMPLATE "+name)
		return err == nil
	})
	db.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), db.DSN)
		Must(db, err)
		defer func() { _ = conn.Close(context.Background()) }()
		_, err = conn.Exec(context.Background(), "DROP DATABASE "+name+"_copy WITH (FORCE)")
		Must(db, err)
	})
	u.Path += "_copy"
	return At(db, u.String())
}

// Dump copies the database with pg_dump into the empty one at dsn.
func (db *Database) Dump(dsn string) *Database {
	db.Helper()
	dump := exec.Command(pgtest.Program(db, "pg_dump"), "--no-owner", db.DSN)
	restore := exec.Command(pgtest.Program(db, "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", dsn)
	pipe, err := dump.StdoutPipe()
	Must(db, err)
	restore.Stdin = pipe
	var out strings.Builder
	restore.Stderr = &out
	Must(db, dump.Start())
	if err := restore.Run(); err != nil {
		db.Fatalf("restore: %v\n%s", err, out.String())
	}
	Must(db, dump.Wait())
	return At(db, dsn)
}
