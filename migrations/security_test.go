package migrations_test

import (
	"context"
	"errors"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// SQLSTATEs that refusals have.
const (
	insufficientPrivilege = "42501"
	checkViolation        = "23514"
	invalidParameter      = "22023"
)

// A shop is a database as an operator sets it up: shop_owner owns the tables, roles.sql was run, and every login has one of its
// roles. The stranger has nothing but CONNECT, and what PUBLIC has.
type shop struct {
	*testing.T
	server *localpg.Server
}

// newShop returns a shop on a server of its own, because roles belong to all of a server.
func newShop(t *testing.T, sets ...migrations.Set) *shop {
	t.Helper()
	s := &shop{t, pgtest.StartCopy(t, localpg.Options{})}
	s.superuser(`
		REVOKE CREATE ON SCHEMA public FROM PUBLIC;
		CREATE ROLE shop_owner LOGIN CREATEROLE;
		GRANT CREATE ON SCHEMA public TO shop_owner`)
	pgtest.Migrate(t, s.dsn("shop_owner"), sets...)
	pgtest.Must(t, s.applyRoles("shop_owner"))
	s.superuser(`
		CREATE ROLE producer LOGIN IN ROLE outbox_producer;
		CREATE ROLE other_producer LOGIN IN ROLE outbox_producer;
		CREATE ROLE relay LOGIN IN ROLE outbox_relay;
		CREATE ROLE reader LOGIN IN ROLE outbox_reader;
		CREATE ROLE support LOGIN IN ROLE outbox_support;
		CREATE ROLE stranger LOGIN`)
	return s
}

func (s *shop) dsn(login string) string {
	u, err := url.Parse(s.server.DSN(""))
	pgtest.Must(s, err)
	u.User = url.User(login)
	return u.String()
}

// as returns a session of the login.
func (s *shop) as(login string) *session {
	s.Helper()
	conn, err := pgx.Connect(s.Context(), s.dsn(login))
	pgtest.Must(s, err)
	s.Cleanup(func() { _ = conn.Close(context.WithoutCancel(s.Context())) })
	return &session{s.T, login, conn}
}

func (s *shop) superuser(statements string) {
	s.Helper()
	conn, err := pgx.Connect(s.Context(), s.server.DSN(""))
	pgtest.Must(s, err)
	defer conn.Close(s.Context())
	pgtest.Exec(s, conn, statements)
}

// applyRoles runs roles.sql as the login.
func (s *shop) applyRoles(login string) error {
	s.Helper()
	script, err := os.ReadFile("roles.sql")
	pgtest.Must(s, err)
	_, err = s.as(login).conn.Exec(s.Context(), string(script))
	return err
}

// cover makes the pending deliveries of all events, as when relays have taken the events and set them aside. No relay takes them again.
const cover = `SELECT outbox_cover_events(0, 100, '3:3:')` // no transaction is visible in this snapshot

// A session belongs to one login.
type session struct {
	*testing.T
	login string
	conn  *pgx.Conn
}

// exec runs statements that must succeed.
func (s *session) exec(statements string) {
	s.Helper()
	if _, err := s.conn.Exec(s.Context(), statements); err != nil {
		s.Fatalf("%s: %.200s: %v", s.login, statements, err)
	}
}

// refused runs statements one by one and wants the SQLSTATE of each.
func (s *session) refused(code string, statements ...string) {
	s.Helper()
	for _, statement := range statements {
		_, err := s.conn.Exec(s.Context(), statement)
		refusal := new(pgconn.PgError)
		if !errors.As(err, &refusal) || refusal.Code != code {
			s.Errorf("%s: %s\nended with %v, want SQLSTATE %s", s.login, statement, err, code)
		}
	}
}

// wants runs a query that must return one value, and compares it as text.
func (s *session) wants(want, query string, arguments ...any) {
	s.Helper()
	var got *string
	err := s.conn.QueryRow(s.Context(), query, append([]any{pgx.QueryExecModeSimpleProtocol}, arguments...)...).Scan(&got)
	if err != nil {
		s.Errorf("%s: %s: %v", s.login, query, err)
	} else if got == nil || strings.TrimSpace(*got) != want {
		s.Errorf("%s: %s returned %v, want %s", s.login, query, deref(got), want)
	}
}

func deref(text *string) string {
	if text == nil {
		return "NULL"
	}
	return *text
}

// superuserName returns the login of the server's superuser.
func (s *shop) superuserName() string {
	u, err := url.Parse(s.server.DSN(""))
	pgtest.Must(s, err)
	return u.User.Username()
}

func hintOf(err error) string {
	refusal := new(pgconn.PgError)
	errors.As(err, &refusal)
	return refusal.Hint
}
