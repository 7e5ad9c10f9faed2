package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/migrations"
)

type rolesCommand struct {
	config.DatabaseFlags
	Prefix string `placeholder:"NAME_" help:"What the names of the roles begin with: outboxes of applications that do not trust each other need roles of their own. Later runs find it."`
	Print  bool   `help:"Print the script, and run nothing."`
}

func (rolesCommand) Help() string {
	return `Runs migrations/roles.sql, which this program carries: it creates the roles outbox_producer, outbox_relay, outbox_reader, outbox_support, inbox_receiver
and inbox_support where they are absent, and grants them what this version needs on the tables that there are, of producers and receivers. It does
all or nothing, and may run many times. Roles belong to the whole server: with --prefix=billing_ they are billing_outbox_producer and so on. Run it after migrate up, as the owner of the tables or as a superuser; who creates the roles needs CREATEROLE.

  outbox-relay migrate up && outbox-relay migrate roles
  psql -c 'GRANT outbox_relay TO finance_relay' "$OUTBOX_DATABASE_URL"    # once: a role has no login of its own`
}

func (cmd rolesCommand) Run(inv *cli.Invocation) error {
	if cmd.Print {
		_, err := io.WriteString(inv.Stdout, migrations.Roles())
		return err
	}
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	connect := c.ConnConfig()
	connect.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.Severity == "WARNING" {
			fmt.Fprintf(inv.Stderr, "warning: %s\n", output.Printable(n.Message+hintOf(n.Hint)))
		}
	}
	conn, err := pgx.ConnectConfig(inv.Ctx, connect)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(inv.Ctx)) }()
	var outbox, inbox bool
	prefix := cmd.Prefix
	err = pgx.BeginFunc(inv.Ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(inv.Ctx, `SELECT set_config('outbox_relay.role_prefix', $1, true)`, prefix); err != nil {
			return fmt.Errorf("set the prefix of roles: %w", err)
		}
		if _, err := tx.Exec(inv.Ctx, migrations.Roles()); err != nil {
			if refused := new(pgconn.PgError); errors.As(err, &refused) {
				return fmt.Errorf("run migrations/roles.sql: %w%s", err, hintOf(refused.Hint))
			}
			return fmt.Errorf("run migrations/roles.sql: %w", err)
		}
		if err := tx.QueryRow(inv.Ctx, `SELECT to_regclass('outbox') IS NOT NULL, to_regclass('processed_events') IS NOT NULL,
			current_setting('outbox_relay.role_prefix')`).Scan(&outbox, &inbox, &prefix); err != nil {
			return fmt.Errorf("look for the tables: %w", err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	var grants []string
	if outbox {
		grants = append(grants, "GRANT "+prefix+"outbox_relay TO …")
	}
	if inbox {
		grants = append(grants, "GRANT "+prefix+"inbox_receiver TO …", "GRANT "+prefix+"inbox_support TO …")
	}
	_, err = fmt.Fprintf(inv.Stdout, "roles have what this version needs; a login gets one by: %s\n", strings.Join(grants, ", or "))
	return err
}

// hintOf returns what the script says about what to do.
func hintOf(hint string) string {
	if hint == "" {
		return ""
	}
	return "; " + hint
}
