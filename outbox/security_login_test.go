package outbox_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// logins are what an attacker may have taken over, each with the role of migrations/roles.sql that it was granted. The
// stranger may connect to the database, and that is all.
var logins = map[string]string{
	"producer": "outbox_producer", "neighbour": "outbox_producer", "relay": "outbox_relay", "reader": "outbox_reader", "support": "outbox_support",
	"receiver": "inbox_receiver", "stranger": "",
}

// newTarget returns a database that holds an outbox and an inbox, with the roles and the logins.
func newTarget(t *testing.T) *database {
	t.Helper()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{t: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
	db.applyRoles()
	rolesLock.Lock()
	defer rolesLock.Unlock()
	for login, role := range logins {
		if len(db.strings(`SELECT rolname FROM pg_roles WHERE rolname = $1`, "attack_"+login)) > 0 {
			continue
		}
		db.exec(`CREATE ROLE attack_` + login + ` LOGIN`)
		if role != "" {
			db.exec(`GRANT ` + role + ` TO attack_` + login)
		}
	}
	return db
}

// A session belongs to one login. SET ROLE in a superuser's session would not do: an attacker could undo it.
type session struct {
	t    *testing.T
	name string
	conn *pgx.Conn
}

func (db *database) login(name string) *session {
	db.t.Helper()
	u, err := url.Parse(db.dsn)
	pgtest.Must(db.t, err)
	u.User = url.User("attack_" + name)
	cfg, err := pgx.ParseConfig(u.String())
	pgtest.Must(db.t, err)
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // several statements in one, as psql sends them
	conn, err := pgx.ConnectConfig(db.t.Context(), cfg)
	pgtest.Must(db.t, err)
	db.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(db.t.Context())) })
	return &session{db.t, name, conn}
}

// tries runs a statement, undoes it, and returns with what PostgreSQL refused it, "" for nothing.
func (s *session) tries(statement string) string {
	s.t.Helper()
	ctx := s.t.Context()
	tx, err := s.conn.Begin(ctx)
	pgtest.Must(s.t, err)
	_, err = tx.Exec(ctx, statement)
	pgtest.Must(s.t, tx.Rollback(ctx))
	return refusal(s.t, err)
}

// runs runs a statement that is no attack.
func (s *session) runs(statement string) {
	s.t.Helper()
	_, err := s.conn.Exec(s.t.Context(), statement)
	if err != nil {
		s.t.Fatalf("%s: %s: %v", s.name, statement, err)
	}
}
