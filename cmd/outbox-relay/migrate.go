package main

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply what is missing. May run many times, and in several places at once."`
	Down   migrateDownCmd   `cmd:"" help:"Revert the last migration. Drops data."`
	Status migrateStatusCmd `cmd:"" help:"List the migrations; exit 5 unless the schema is the one this version needs."`
}

// MigrateFlags choose what to migrate.
type MigrateFlags struct {
	DatabaseFlags
	Set migrations.Set `enum:"outbox,inbox" default:"outbox" help:"outbox (a producer's tables) or inbox (a receiver's)."`
}

// A migrator is one set of migrations in one database.
type migrator struct {
	*goose.Provider
	set      migrations.Set
	db       *sql.DB
	schema   string // empty: the first of the search_path
	database string // for messages
}

func (flags MigrateFlags) open(inv *invocation) (*migrator, error) {
	c, err := inv.config("database")
	if err != nil {
		return nil, err
	}
	m := &migrator{set: flags.Set, db: stdlib.OpenDB(*c.connConfig()), schema: get[string](c, "database.schema"), database: c.database()}
	if m.Provider, err = migrations.NewProvider(m.db, m.set); err != nil {
		return nil, errors.Join(err, m.db.Close())
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

// applied lists what the database has, oldest first. Asking goose instead would create its table, and wait while
// somebody migrates.
func (m *migrator) applied(ctx context.Context) ([]applied, error) {
	rows, err := m.db.QueryContext(ctx, fmt.Sprintf(selectApplied, m.set.VersionTable()))
	if code(err) == "42P01" { // undefined_table
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

// known returns an error if the database has a migration that this build does not: an older program would leave a
// schema that neither of the two describes.
func (m *migrator) known(all []applied) error {
	if n := len(all); n > 0 && all[n-1].version > m.set.Latest() {
		return fmt.Errorf("%w: the database has %s version %d, this build knows %d; run a newer outbox-relay",
			relay.ErrSchema, m.set, all[n-1].version, m.set.Latest())
	}
	return nil
}

const selectSchema = `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`

// createSchema makes the configured schema if it is absent. It looks first, because CREATE SCHEMA IF NOT EXISTS needs
// the right to create one even where it exists.
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
	if c := code(err); c == "42P06" || c == "23505" { // duplicate_schema, unique_violation: somebody was faster
		return nil
	} else if err != nil {
		return fmt.Errorf("create schema %s: %w", m.schema, err)
	}
	return nil
}

// code returns the SQLSTATE of an error of the server, otherwise an empty text.
func code(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

type migrateUpCmd struct{ MigrateFlags }

func (cmd migrateUpCmd) Run(inv *invocation) error {
	m, err := cmd.open(inv)
	if err != nil {
		return err
	}
	defer m.db.Close()
	if err := m.createSchema(inv.ctx); err != nil {
		return err
	}
	all, err := m.applied(inv.ctx)
	if err != nil {
		return err
	}
	if err := m.known(all); err != nil {
		return err
	}
	results, err := m.Provider.Up(inv.ctx)
	if err := m.print(inv, "applied", results, err); err != nil {
		return err
	}
	_, err = fmt.Fprintf(inv.Stdout, "%s schema is up to date: version %d\n", m.set, m.set.Latest())
	return err
}

// print tells what was done, also when an error ended it.
func (m *migrator) print(inv *invocation, done string, results []*goose.MigrationResult, err error) error {
	var partial *goose.PartialError
	if errors.As(err, &partial) {
		results = partial.Applied
		err = fmt.Errorf("%s: %w", path.Base(partial.Failed.Source.Path), partial.Err)
	}
	for _, r := range results {
		fmt.Fprintf(inv.Stdout, "%s %s in %s\n", done, path.Base(r.Source.Path), r.Duration.Round(time.Millisecond))
	}
	if err != nil {
		return fmt.Errorf("migrate %s: %w", m.set, err)
	}
	return nil
}

type migrateDownCmd struct {
	MigrateFlags
	To  *int64 `placeholder:"N" help:"Revert every migration above version N; 0 reverts all."`
	Yes bool   `short:"y" help:"Do not ask."`
}

func (cmd migrateDownCmd) Run(inv *invocation) error {
	if cmd.To != nil && *cmd.To < 0 {
		return exitError{code: exitUsage, err: fmt.Errorf("--to %d: there is no such version; write 0 to revert all", *cmd.To)}
	}
	m, err := cmd.open(inv)
	if err != nil {
		return err
	}
	defer m.db.Close()
	all, err := m.applied(inv.ctx)
	if err != nil {
		return err
	}
	if err := m.known(all); err != nil {
		return err
	}
	remain := max(0, len(all)-1)
	if cmd.To != nil {
		remain = len(slices.DeleteFunc(slices.Clone(all), func(a applied) bool { return a.version > *cmd.To }))
	}
	if remain == len(all) {
		_, err := fmt.Fprintf(inv.Stdout, "nothing to revert: the %s schema has version %d\n", m.set, last(all))
		return err
	}
	if !cmd.Yes {
		if err := m.confirm(inv, len(all)-remain); err != nil {
			return err
		}
	}
	results, err := m.Provider.DownTo(inv.ctx, last(all[:remain]))
	if err := m.print(inv, "reverted", results, err); err != nil {
		return err
	}
	_, err = fmt.Fprintf(inv.Stdout, "%s schema is at version %d\n", m.set, last(all[:remain]))
	return err
}

func last(all []applied) int64 {
	if len(all) == 0 {
		return 0
	}
	return all[len(all)-1].version
}

// confirm asks before data is dropped. Where nobody can answer, --yes must have been given.
func (m *migrator) confirm(inv *invocation, count int) error {
	what := fmt.Sprintf("reverting %d migration(s) of %s in %s drops tables with their data", count, m.set, m.database)
	if !isTerminal(inv.Stdin) {
		return exitError{code: exitUsage, err: errors.New(what + "; repeat the command with --yes to do it")}
	}
	fmt.Fprintf(inv.Stderr, "%s.\nContinue? [y/N] ", what)
	answered := make(chan string, 1)
	go func() { // nothing can end the read before the process ends; a signal must not wait for it
		answer, _ := bufio.NewReader(inv.Stdin).ReadString('\n')
		answered <- strings.ToLower(strings.TrimSpace(answer))
	}()
	select {
	case answer := <-answered:
		if answer == "y" || answer == "yes" {
			return nil
		}
		return exitError{code: exitUsage, err: errors.New("nothing was reverted")}
	case <-inv.ctx.Done():
		return context.Cause(inv.ctx)
	}
}

type migrateStatusCmd struct {
	MigrateFlags
	JSON bool `help:"Print JSON."`
}

// migrateStatus is what migrate status --json prints.
type migrateStatus struct {
	Set        migrations.Set    `json:"set"`
	Version    int64             `json:"version"` // of the database; 0: there are no tables
	Latest     int64             `json:"latest"`  // that this build knows
	Migrations []migrationStatus `json:"migrations"`
}

type migrationStatus struct {
	Version   int64      `json:"version"`
	File      string     `json:"file"`
	AppliedAt *time.Time `json:"applied_at"` // null: pending
}

func (cmd migrateStatusCmd) Run(inv *invocation) error {
	m, err := cmd.open(inv)
	if err != nil {
		return err
	}
	defer m.db.Close()
	all, err := m.applied(inv.ctx)
	if err != nil {
		return err
	}
	s := migrateStatus{Set: m.set, Version: last(all), Latest: m.set.Latest()}
	pending := 0
	for _, source := range m.ListSources() {
		status := migrationStatus{Version: source.Version, File: path.Base(source.Path)}
		if i := slices.IndexFunc(all, func(a applied) bool { return a.version == source.Version }); i >= 0 {
			at := all[i].at.UTC()
			status.AppliedAt = &at
		} else {
			pending++
		}
		s.Migrations = append(s.Migrations, status)
	}
	if err := cmd.print(inv, s); err != nil {
		return err
	}
	if err := m.known(all); err != nil {
		return err
	}
	if pending > 0 {
		return fmt.Errorf("%w: %d of %d migrations are pending; run: outbox-relay migrate up", relay.ErrSchema, pending, len(s.Migrations))
	}
	return nil
}

func (cmd migrateStatusCmd) print(inv *invocation, s migrateStatus) error {
	if cmd.JSON {
		return writeJSON(inv.Stdout, s)
	}
	w := tabwriter.NewWriter(inv.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "VERSION\tFILE\tAPPLIED")
	for _, status := range s.Migrations {
		at := "pending"
		if status.AppliedAt != nil {
			at = status.AppliedAt.Format(time.RFC3339)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\n", status.Version, status.File, at)
	}
	return w.Flush()
}
