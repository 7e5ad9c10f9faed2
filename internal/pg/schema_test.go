package pg

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// A schema that only adds to the one that this build knows is worked with, as in a deploy. Any
// other one is an error that stays, and says what to do.
func TestCheckSchema(t *testing.T) {
	t.Parallel()
	const newer = `INSERT INTO outbox_schema_version (version_id, is_applied) VALUES (9999, true);`
	for name, c := range map[string]struct {
		change, want string
		newer        int64
	}{
		"the same":             {"", "", 0},
		"newer, and only adds": {newer, "", 9999},
		"newer": {
			newer + `CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 9999'`,
			"which works with builds that know 9999 or later", 0,
		},
		"newer, and does not say with what it works": {newer + `DROP FUNCTION outbox_compatible_since()`, "run a newer outbox-relay", 0},
		"older":    {`DELETE FROM outbox_schema_version WHERE version_id = (SELECT max(version_id) FROM outbox_schema_version)`, "outbox-relay migrate up", 0},
		"reverted": {`INSERT INTO outbox_schema_version (version_id, is_applied) SELECT max(version_id), false FROM outbox_schema_version`, "outbox-relay migrate up", 0},
		"none":     {`DROP TABLE outbox_schema_version`, "there is no outbox schema here", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			if c.change != "" {
				db.Exec(c.change)
			}
			version, err := CheckSchema(t.Context(), db.Pool)
			if version != c.newer || errors.Is(err, ErrSchema) != (c.want != "") || c.want != "" && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%d, %v; want %d, %q", version, err, c.newer, c.want)
			}
		})
	}
	t.Run("empty database", func(t *testing.T) {
		t.Parallel()
		if _, err := CheckSchema(t.Context(), pgtest.Pool(t, pgtest.New(t))); !errors.Is(err, ErrSchema) {
			t.Error(err)
		}
	})
}

// Numbers alone do not tell whose migrations they are.
func TestCheckHistory(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ change, want string }{
		"the same":   {`SELECT`, ""},
		"with a gap": {`DELETE FROM outbox_schema_version WHERE version_id = 2`, "the schema lacks migration 2, and so is of another history"},
		"of other columns": {
			`ALTER TABLE outbox_destination RENAME parked_after TO parked; ALTER TABLE outbox_attempt RENAME reason TO why`,
			"the schema lacks outbox_destination.parked_after, outbox_attempt.reason, and so is of another history",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Exec(c.change)
			err := CheckHistory(t.Context(), db.Pool)
			if errors.Is(err, ErrSchema) != (c.want != "") || c.want != "" && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v; want %q", err, c.want)
			}
		})
	}
}

// A connection that cannot be lent, because a table it is checked by is away, says nothing about
// the schema.
func TestMissingTableIsNotAMissingSchema(t *testing.T) {
	t.Parallel()
	lent := pgtest.PoolWith(t, relaytest.Covered(t).DSN, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SELECT 'away'::regclass`)
			return err
		}
	})
	if _, err := CheckSchema(t.Context(), lent); !HasCode(err, UndefinedTable) || errors.Is(err, ErrSchema) || !SchemaMayDiffer(err) {
		t.Errorf("with a table away: %v", err)
	}
}

// Who may create objects in the schema can run code with the rights of the relay. Revoking that
// right is enough.
func TestSecuritySchemaCreators(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	for _, c := range []struct{ before, roles string }{
		{`SELECT`, "[]"},
		{`GRANT CREATE ON SCHEMA public TO PUBLIC, pg_read_all_data`, "[PUBLIC pg_read_all_data]"},
	} {
		db.Exec(c.before)
		found, err := FindSchemaCreators(t.Context(), db.Pool)
		relaytest.Must(t, err)
		revoke := ""
		if c.roles != "[]" {
			revoke = `REVOKE CREATE ON SCHEMA public FROM PUBLIC, pg_read_all_data; GRANT CREATE ON SCHEMA public TO ` + found.Owner
		}
		if fmt.Sprint(found.Roles) != c.roles || found.Revoke() != revoke {
			t.Errorf("found %+v, revoke with %q", found, found.Revoke())
		}
		if revoke != "" {
			db.Exec(revoke)
		}
	}
	if found, err := FindSchemaCreators(t.Context(), db.Pool); err != nil || len(found.Roles) != 0 {
		t.Errorf("then found %+v, %v", found, err)
	}
}

// A login that may create schemas makes one that is named as the relay's login, with tables of the
// outbox's names.
func TestSecurityForgedSchemaOfTheRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	conn, err := db.Pool.Acquire(t.Context())
	relaytest.Must(t, err)
	defer conn.Release()
	database := relaytest.Row[string](db, `SELECT current_database()::text`)
	login, stranger := database+"_relay", database+"_stranger"
	pgtest.Exec(t, conn, fmt.Sprintf(`
		CREATE ROLE %[1]q; CREATE ROLE %[2]q; GRANT %[2]q TO CURRENT_USER; -- as PostgreSQL up to 15 needs it
		CREATE SCHEMA %[1]q AUTHORIZATION %[2]q; GRANT USAGE ON SCHEMA %[1]q TO PUBLIC;
		CREATE TABLE %[1]q.outbox (); SET ROLE %[1]q`, login, stranger))
	defer db.Exec(fmt.Sprintf(`DROP SCHEMA %[1]q CASCADE; DROP ROLE %[1]q, %[2]q`, login, stranger))
	names := NewNames("", "outbox")
	if found, err := names.Find(t.Context(), conn); err != nil || !found || names.known() != `"public"` {
		t.Errorf("found %t in %s: %v", found, names.known(), err)
	}
	db.Exec(`ALTER TABLE public.outbox RENAME TO away`)
	if _, err := NewNames("", "outbox").Find(t.Context(), conn); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), "belongs to "+stranger) {
		t.Errorf("without another outbox: %v", err)
	}
	pgtest.Exec(t, conn, `RESET ROLE`)
	db.Exec(fmt.Sprintf(`ALTER SCHEMA %[1]q OWNER TO %[1]q`, login))
	pgtest.Exec(t, conn, fmt.Sprintf(`SET ROLE %q`, login))
	names = NewNames("", "outbox")
	if found, err := names.Find(t.Context(), conn); err != nil || !found || names.known() != fmt.Sprintf("%q", login) {
		t.Errorf("in its own schema: found %t in %s: %v", found, names.known(), err)
	}
	pgtest.Exec(t, conn, `RESET ROLE`)
}

// A session that lost its settings stands behind a pooler; one that only reads is on a standby.
func TestCheckSession(t *testing.T) {
	t.Parallel()
	dsn := relaytest.Covered(t).DSN
	settings := func(name, value string) func(*pgxpool.Config) {
		return func(cfg *pgxpool.Config) {
			SetDirect(cfg, "")
			cfg.ConnConfig.RuntimeParams[name] = value
		}
	}
	for name, c := range map[string]struct {
		change func(*pgxpool.Config)
		want   error
	}{
		"as a relay sets it":   {settings("work_mem", "7MB"), nil},
		"without its settings": {func(*pgxpool.Config) {}, ErrPooler},
		"another plan":         {settings("enable_seqscan", "on"), ErrPooler},
		"read-only":            {settings("default_transaction_read_only", "on"), ErrReadOnly},
	} {
		if err := CheckSession(t.Context(), pgtest.PoolWith(t, dsn, c.change)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if err := CheckSession(t.Context(), pgtest.PoolWith(t, dsn, settings("search_path\x00", ""))); err == nil || errors.Is(err, ErrPooler) {
		t.Errorf("a connection that fails: %v", err)
	}
}

// Through a pooler a connection has no setting that does not outlive a transaction; each
// transaction sets them.
func TestPooledSettings(t *testing.T) {
	t.Parallel()
	cfg, err := pgxpool.ParseConfig("postgres://db/x?application_name=theirs&TimeZone=Asia/Tokyo&work_mem=7MB&client_encoding=LATIN1")
	relaytest.Must(t, err)
	settings := SetPooled(cfg, "My schema")
	if want := map[string]string{"application_name": "outbox-relay", "client_encoding": "UTF8"}; !maps.Equal(cfg.ConnConfig.RuntimeParams, want) {
		t.Errorf("the connection begins with %v, want %v", cfg.ConnConfig.RuntimeParams, want)
	}
	want := SessionSettings()
	maps.DeleteFunc(want, func(name, _ string) bool {
		return strings.HasPrefix(name, "tcp_") || passed[name] || name == "default_transaction_isolation"
	})
	want["work_mem"], want["search_path"] = "7MB", `"My schema"`
	if !maps.Equal(settings, want) {
		t.Errorf("a transaction begins with %v, want %v", settings, want)
	}
	testkit.Equal(t, "statements are prepared", cfg.ConnConfig.DefaultQueryExecMode, pgx.QueryExecModeExec)
}
