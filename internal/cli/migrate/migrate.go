package migrate

import (
	"fmt"
	"io"
	"path"
	"slices"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Command is the command migrate.
type Command struct {
	Up     upCommand     `cmd:"" help:"Apply what is missing. May run many times, and in several places at once."`
	Down   downCommand   `cmd:"" help:"Revert the last migration. Drops data."`
	Roles  rolesCommand  `cmd:"" help:"Create the roles of migrations/roles.sql, and grant and revoke what this version needs."`
	Status statusCommand `cmd:"" help:"List the migrations; exit 5 unless the schema is the one this version needs."`
}

// setFlags choose what to migrate.
type setFlags struct {
	config.DatabaseFlags
	Set migrations.Set `enum:"outbox,inbox" default:"outbox" help:"outbox (a producer's tables) or inbox (a receiver's)."`
}

// lockFlags bound how long a migration may delay the statements of others.
type lockFlags struct {
	LockTimeout time.Duration `default:"200ms" placeholder:"DURATION" help:"Longest wait for one lock, and so the longest pause of producers (200ms). What does not get its locks is rolled back and tried again."`
	RetryFor    time.Duration `default:"5m" placeholder:"DURATION" help:"How long to try a migration again whose locks other sessions hold (5m)."`
}

// options returns them for the migrator. What it waits for goes to stderr, once.
func (flags lockFlags) options(inv *cli.Invocation) (migrations.Options, error) {
	if flags.LockTimeout <= 0 || flags.RetryFor <= 0 {
		return migrations.Options{}, cli.Usagef("--lock-timeout and --retry-for must be above zero: without a limit producers wait for as long as the migration does")
	}
	told := ""
	return migrations.Options{LockTimeout: flags.LockTimeout, RetryFor: flags.RetryFor, OnWait: func(wait *migrations.LockedError) {
		if text := wait.Waiting(); text != told && len(wait.Holders) > 0 {
			told = text
			fmt.Fprintln(inv.Stderr, output.Printable(text))
		}
	}}, nil
}

type upCommand struct {
	setFlags
	lockFlags
}

func (cmd upCommand) Run(inv *cli.Invocation) error {
	options, err := cmd.options(inv)
	if err != nil {
		return err
	}
	m, err := cmd.open(inv, options)
	if err != nil {
		return err
	}
	defer m.db.Close()
	if err := m.checkEncoding(inv.Ctx); err != nil {
		return err
	}
	if err := m.createSchema(inv.Ctx); err != nil {
		return err
	}
	if err := m.warnOfOpenSchema(inv.Ctx, inv.Stderr); err != nil {
		return err
	}
	all, err := m.applied(inv.Ctx)
	if err != nil {
		return err
	}
	if err := m.known(all); err != nil {
		return err
	}
	results, err := m.Up(inv.Ctx)
	if err := m.print(inv, "applied", results, err); err != nil {
		return err
	}
	_, err = fmt.Fprintf(inv.Stdout, "%s schema is up to date: version %d\n", m.set, m.set.Latest())
	return err
}

// print tells what was done, also when an error ended it.
func (m *migrator) print(inv *cli.Invocation, done string, results []*goose.MigrationResult, err error) error {
	for _, r := range results {
		fmt.Fprintf(inv.Stdout, "%s %s in %s\n", done, path.Base(r.Source.Path), r.Duration.Round(time.Millisecond))
	}
	if err != nil {
		return fmt.Errorf("migrate %s: %w", m.set, err)
	}
	return nil
}

type downCommand struct {
	setFlags
	lockFlags
	To  *int64 `placeholder:"N" help:"Revert every migration above version N; 0 reverts all."`
	Yes bool   `short:"y" help:"Do not ask."`
}

func (cmd downCommand) Run(inv *cli.Invocation) error {
	if cmd.To != nil && *cmd.To < 0 {
		return cli.Usagef("--to %d: there is no such version; write 0 to revert all", *cmd.To)
	}
	options, err := cmd.options(inv)
	if err != nil {
		return err
	}
	m, err := cmd.open(inv, options)
	if err != nil {
		return err
	}
	defer m.db.Close()
	all, err := m.applied(inv.Ctx)
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
		what := fmt.Sprintf("reverting %s of %s in %s drops tables with their data", plain.Plural(len(all)-remain, "migration", "migrations"), m.set, m.database)
		if err := inv.Confirm(what, "nothing was reverted"); err != nil {
			return err
		}
	}
	results, err := m.DownTo(inv.Ctx, last(all[:remain]))
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

type statusCommand struct {
	setFlags
	JSON bool `help:"Print JSON."`
}

// Status is what migrate status --json prints.
type Status struct {
	Set        migrations.Set    `json:"set"`
	Version    int64             `json:"version"` // of the database; 0: there are no tables
	Latest     int64             `json:"latest"`  // that this build knows
	Migrations []MigrationStatus `json:"migrations"`
}

// MigrationStatus is one migration in it.
type MigrationStatus struct {
	Version   int64      `json:"version"`
	File      string     `json:"file"`
	AppliedAt *time.Time `json:"applied_at"` // null: pending
}

func (cmd statusCommand) Run(inv *cli.Invocation) error {
	m, err := cmd.open(inv, migrations.Options{})
	if err != nil {
		return err
	}
	defer m.db.Close()
	all, err := m.applied(inv.Ctx)
	if err != nil {
		return err
	}
	s := Status{Set: m.set, Version: last(all), Latest: m.set.Latest()}
	pending := 0
	for _, source := range m.Sources() {
		status := MigrationStatus{Version: source.Version, File: path.Base(source.Path)}
		if i := slices.IndexFunc(all, func(a applied) bool { return a.version == source.Version }); i >= 0 {
			at := all[i].at.UTC()
			status.AppliedAt = &at
		} else {
			pending++
		}
		s.Migrations = append(s.Migrations, status)
	}
	if err := output.Show(inv.Stdout, cmd.JSON, s, printMigrations); err != nil {
		return err
	}
	if err := m.known(all); err != nil {
		return err
	}
	if pending > 0 {
		return fmt.Errorf("%w: %d of %d migrations are pending; run: outbox-relay migrate up", pg.ErrSchema, pending, len(s.Migrations))
	}
	return nil
}

func printMigrations(w io.Writer, s Status) error {
	return output.Table(w, "", "VERSION\tFILE\tAPPLIED", s.Migrations, func(m MigrationStatus) []any {
		if m.AppliedAt == nil {
			return []any{m.Version, m.File, "pending"}
		}
		return []any{m.Version, m.File, m.AppliedAt}
	})
}
