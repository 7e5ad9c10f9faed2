package migrations_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// SQLSTATEs that refusals have.
const (
	insufficientPrivilege = "42501"
	checkViolation        = "23514"
	invalidParameter      = "22023"
)

// A shop is a database as an operator sets it up: shop_owner owns the tables, roles.sql was run,
// and every login has one of its roles. The stranger has nothing but CONNECT, and what PUBLIC has.
type shop struct {
	*testing.T
	server *localpg.Server
}

// newShop returns a shop on its own server, because roles belong to all of a server.
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
	_, err := s.as(login).conn.Exec(s.Context(), migrations.Roles())
	return err
}

// cover makes the pending deliveries of all events, as when relays have taken the events and set
// them aside. No relay takes them again.
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

// An owner who may create roles needs no superuser; and where nothing could be granted the script
// fails, instead of leaving it to warnings.
func TestRolesAreGrantedByTheOwner(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to all of it
	run := func(role, statements string) error {
		_, err := open(t, server.DSN("")+"&search_path=shop&role="+role).ExecContext(t.Context(), statements)
		return err
	}
	must := func(err error) {
		t.Helper()
		pgtest.Must(t, err)
	}
	refused := func(err error, why string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("the script ended with %v, want %q", err, why)
		}
	}
	const superuser = "none" // who is logged in
	must(run(superuser, `CREATE ROLE shop_owner CREATEROLE; CREATE SCHEMA shop AUTHORIZATION shop_owner; CREATE ROLE shop_app`))
	refused(run("shop_owner", migrations.Roles()), "schema shop has no tables")
	for _, set := range []migrations.Set{migrations.Inbox, migrations.Outbox} {
		pgtest.Migrate(t, server.DSN("")+"&search_path=shop&role=shop_owner", set)
		must(run("shop_owner", migrations.Roles()))
		must(run("shop_owner", migrations.Roles()))
	}
	must(run(superuser, `GRANT inbox_receiver TO shop_app`))
	must(run("shop_app", `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 's', 'k', 'succeeded')`))
	must(run(superuser, `DROP TABLE outbox CASCADE`))
	refused(run("shop_app", migrations.Roles()), "shop_app may not grant rights on processed_events: run this as its owner, shop_owner")
	must(run(superuser, migrations.Roles()))
}

// With a prefix, outboxes that share a database have roles of their own: no producer, relay or
// receiver of one reaches another. Later runs find the prefix.
func TestSecurityRolesWithAPrefixReachOneOutbox(t *testing.T) {
	t.Parallel()
	s := &shop{t, pgtest.StartCopy(t, localpg.Options{})}
	owner := s.server.DSN("") + "&search_path="
	s.superuser(`CREATE SCHEMA a; CREATE SCHEMA b`)
	for _, schema := range []string{"a", "b"} {
		for _, set := range []migrations.Set{migrations.Outbox, migrations.Inbox} {
			pgtest.Migrate(t, owner+schema, set)
		}
		for _, setting := range []string{"-coutbox_relay.role_prefix=" + schema + "_", ""} {
			_, err := open(t, owner+schema+"&options="+url.QueryEscape(setting)).ExecContext(t.Context(), migrations.Roles())
			pgtest.Must(t, err)
		}
	}
	s.superuser(`CREATE ROLE producer LOGIN IN ROLE a_outbox_producer; CREATE ROLE relay LOGIN IN ROLE a_outbox_relay, a_inbox_receiver`)
	const insert = `.outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k')`
	s.as("producer").exec(`INSERT INTO a` + insert)
	s.as("producer").refused(insufficientPrivilege, `INSERT INTO b`+insert)
	for _, table := range []string{"outbox_delivery", "processed_events"} {
		s.as("relay").exec(`SELECT count(*) FROM a.` + table)
		s.as("relay").refused(insufficientPrivilege, `SELECT count(*) FROM b.`+table)
	}
	var plain int
	pgtest.Must(t, open(t, owner+"a").QueryRowContext(t.Context(), `SELECT count(*) FROM pg_roles WHERE rolname ~ '^(outbox|inbox)_'`).Scan(&plain))
	testkit.Equal(t, "roles without a prefix", plain, 0)
	_, err := open(t, owner+"a&options="+url.QueryEscape("-coutbox_relay.role_prefix=A")).ExecContext(t.Context(), migrations.Roles())
	if err == nil || !strings.Contains(err.Error(), "the prefix of roles may be") {
		t.Errorf("a wrong prefix: %v", err)
	}
}

// The owner of the tables may own neither the schema nor roles, and PUBLIC may have no right. Each
// refusal says what to run.
func TestRolesSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	s := &shop{t, pgtest.StartCopy(t, localpg.Options{})}
	s.superuser(`
		REVOKE ALL ON SCHEMA public FROM PUBLIC;
		CREATE ROLE shop_owner LOGIN;
		GRANT CREATE, USAGE ON SCHEMA public TO shop_owner`)
	pgtest.Migrate(t, s.dsn("shop_owner"), migrations.Outbox)
	refused := func(why, hint string) {
		t.Helper()
		err := s.applyRoles("shop_owner")
		if err == nil || !strings.Contains(err.Error(), why) || !strings.Contains(hintOf(err), hint) {
			t.Errorf("the script ended with %v, hint %q; want %q, hint %q", err, hintOf(err), why, hint)
		}
	}
	refused("shop_owner may not create the role outbox_producer", "ALTER ROLE shop_owner CREATEROLE")
	s.superuser(`ALTER ROLE shop_owner CREATEROLE`)
	refused("shop_owner may not grant rights on schema public", "Run this script as "+s.superuserName())
	if err := s.applyRoles(s.superuserName()); err != nil {
		t.Error(err)
	}
	if err := s.applyRoles("shop_owner"); err != nil {
		t.Errorf("once the roles have USAGE: %v", err)
	}
	s.superuser(`REVOKE USAGE ON SCHEMA public FROM shop_owner`)
	refused("names no schema that is there and that shop_owner may use", "")
}

// Archiving makes partitions with the rights of the owner of the tables. Without CREATE it would
// fail a month later.
func TestRolesWarnOfAnOwnerWhoCannotArchive(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	s := newShop(t, migrations.Outbox)
	config, err := pgx.ParseConfig(s.dsn("shop_owner"))
	pgtest.Must(t, err)
	var warnings []string
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { warnings = append(warnings, n.Message+"; "+n.Hint) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	pgtest.Must(t, err)
	defer conn.Close(t.Context())
	owner := &session{t, "shop_owner", conn}
	owner.exec(migrations.Roles())
	if len(warnings) > 0 {
		t.Errorf("an owner with the right is warned: %q", warnings)
	}
	s.superuser(`REVOKE CREATE ON SCHEMA public FROM shop_owner`)
	owner.exec(migrations.Roles())
	want := "shop_owner may not create tables in schema public: nothing will be archived; Run this, as " + s.superuserName() +
		" or a superuser: GRANT CREATE ON SCHEMA public TO shop_owner;"
	if len(warnings) != 1 || warnings[0] != want {
		t.Errorf("the warnings are %q, want %q", warnings, want)
	}
}
