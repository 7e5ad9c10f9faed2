package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A migrator is one set of migrations in one database.
type migrator struct {
	*migrations.Migrator
	set      migrations.Set
	db       *sql.DB
	schema   string // empty: the first of the search_path
	database string // for messages
}

func (flags setFlags) open(inv *cli.Invocation, options migrations.Options) (m *migrator, err error) {
	c, err := config.Read(inv, "database")
	if err != nil {
		return nil, err
	}
	m = &migrator{set: flags.Set, schema: c.Relay.Schema, database: c.DatabaseName()}
	if m.db, m.Migrator, err = c.OpenMigrator(m.set, options); err != nil {
		return nil, err
	}
	return m, nil
}

// applied is one migration that the database has.
type applied struct {
	version int64
	at      time.Time
}

// The table's name is one of two constants.
const selectApplied = `
SELECT version_id, tstamp::timestamptz
FROM (SELECT DISTINCT ON (version_id) version_id, tstamp, is_applied FROM %s ORDER BY version_id, id DESC) v
WHERE is_applied AND version_id > 0 ORDER BY version_id`

// applied lists what the database has, oldest first. Asking goose instead would create its table,
// and wait while another process migrates.
func (m *migrator) applied(ctx context.Context) ([]applied, error) {
	rows, err := m.db.QueryContext(ctx, fmt.Sprintf(selectApplied, m.set.VersionTable()))
	if pg.HasCode(err, pg.UndefinedTable) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list applied migrations: %w", err)
	}
	defer rows.Close()
	var all []applied
	for rows.Next() {
		var a applied
		if err := rows.Scan(&a.version, &a.at); err != nil {
			return nil, fmt.Errorf("list applied migrations: %w", err)
		}
		all = append(all, a)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list applied migrations: %w", err)
	}
	return all, nil
}

// known returns an error if the database has a migration that this build does not: an older program
// would leave a schema that neither of the two describes.
func (m *migrator) known(all []applied) error {
	if n := len(all); n > 0 && all[n-1].version > m.set.Latest() {
		return fmt.Errorf("%w: the database has %s version %d, this build knows %d; run a newer outbox-relay",
			pg.ErrSchema, m.set, all[n-1].version, m.set.Latest())
	}
	return nil
}

const selectEncoding = `SHOW server_encoding`

// checkEncoding returns an error for a database in which no relay works.
func (m *migrator) checkEncoding(ctx context.Context) error {
	var encoding string
	if err := m.db.QueryRowContext(ctx, selectEncoding).Scan(&encoding); err != nil {
		return fmt.Errorf("read the encoding of the database: %w", err)
	}
	if m.set == migrations.Outbox {
		return pg.CheckEncoding(encoding)
	}
	return nil
}

const selectSchema = `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`

// createSchema makes the configured schema if it is absent. It looks first, because CREATE SCHEMA
// IF NOT EXISTS needs the right to create one even where it exists.
func (m *migrator) createSchema(ctx context.Context) error {
	if m.schema == "" {
		return nil
	}
	var exists bool
	if err := m.db.QueryRowContext(ctx, selectSchema, m.schema).Scan(&exists); err != nil {
		return fmt.Errorf("look for schema %s: %w", m.schema, err)
	}
	if exists {
		return nil
	}
	_, err := m.db.ExecContext(ctx, "CREATE SCHEMA "+pgx.Identifier{m.schema}.Sanitize())
	if pg.HasCode(err, "42P06") || pg.HasCode(err, "23505") { // duplicate_schema, unique_violation: another process was faster
		return nil
	} else if err != nil {
		return fmt.Errorf("create schema %s: %w", m.schema, err)
	}
	return nil
}

// selectOpenSchema names the roles that may create objects where the migrations run, beside the
// owner of the schema, the owner of the tables (this login, if there are none yet) and superusers.
// $1 is the set's version table.
const selectOpenSchema = `
SELECT pg_catalog.quote_ident(n.nspname), pg_catalog.string_agg(DISTINCT coalesce(pg_catalog.quote_ident(r.rolname), 'PUBLIC'), ', '),
    pg_catalog.quote_ident(o.owner)
FROM pg_catalog.pg_namespace n CROSS JOIN LATERAL pg_catalog.aclexplode(n.nspacl) a LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
CROSS JOIN LATERAL (
    SELECT coalesce((SELECT pg_catalog.pg_get_userbyid(t.relowner) FROM pg_catalog.pg_class t
                     WHERE t.relnamespace = n.oid AND t.relname = $1), current_user) AS owner
) o
WHERE n.nspname = pg_catalog.current_schema() AND a.privilege_type = 'CREATE'
  AND a.grantee <> n.nspowner AND r.rolsuper IS NOT TRUE AND r.rolname IS DISTINCT FROM o.owner
GROUP BY n.nspname, o.owner`

// warnOfOpenSchema prints who may create objects in the schema, before anything runs there: a
// function of theirs could take the place of one that a migration calls, with the rights of this
// login.
func (m *migrator) warnOfOpenSchema(ctx context.Context, out io.Writer) error {
	var roles string
	var creators pg.SchemaCreators
	switch err := m.db.QueryRowContext(ctx, selectOpenSchema, m.set.VersionTable()).Scan(&creators.Schema, &roles, &creators.Owner); {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("find who may create objects in the schema: %w", err)
	}
	creators.Roles = []string{roles}
	_, err := fmt.Fprintf(out, "warning: others may create objects in schema %s and have them run with the rights of its users; run, as a superuser or the owner of the schema: %s\n",
		output.Printable(creators.Schema), output.Printable(creators.Revoke()))
	return err
}
