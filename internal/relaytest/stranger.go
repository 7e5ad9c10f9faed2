package relaytest

import (
	"context"
	"net/url"

	"github.com/jackc/pgx/v5"
)

// Stranger connects as a login that has no right but CONNECT, under the given application_name.
func Stranger(db *Database, application string) *pgx.Conn {
	db.Helper()
	name := Row[string](db, `SELECT 'stranger_of_' || current_database()`)
	db.Exec(`DO $$ BEGIN CREATE ROLE ` + name + ` LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$`)
	u, err := url.Parse(db.DSN)
	Must(db, err)
	u.User = url.User(name)
	cfg, err := pgx.ParseConfig(u.String())
	Must(db, err)
	cfg.RuntimeParams["application_name"] = application
	conn, err := pgx.ConnectConfig(db.Context(), cfg)
	Must(db, err)
	db.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(db.Context()), Patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}
