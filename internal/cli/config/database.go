package config

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay"
)

// connectTimeout bounds how long a command waits for a database that does not answer, unless the
// URL says otherwise.
const connectTimeout = 10 * time.Second

// ConnConfig returns how a command other than run connects: past a pooler if it can, to the schema
// that holds the tables, impatiently.
func (c *Config) ConnConfig() *pgx.ConnConfig {
	conn := c.Pool.ConnConfig.Copy()
	if c.Direct != nil {
		conn = c.Direct.ConnConfig.Copy()
	} else if c.Relay.Pooler.Mode != relay.PoolerNone && conn.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		conn.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // prepares nothing that outlives a transaction
	}
	for _, name := range []string{"datestyle", "timezone", "standard_conforming_strings"} { // which poolers know, too
		conn.RuntimeParams[name] = pg.SessionSettings()[name]
	}
	if schema := c.Relay.Schema; schema != "" {
		conn.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	}
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = connectTimeout
	}
	return conn
}

// PoolConfig returns a pool of at most so many connections like [Config.ConnConfig], none of which
// is kept open.
func (c *Config) PoolConfig(connections int32) *pgxpool.Config {
	cfg := c.Pool.Copy()
	if c.Direct != nil {
		cfg = c.Direct.Copy()
	}
	cfg.ConnConfig = c.ConnConfig()
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = connections, 0, 0
	return cfg
}

// Open returns a pool of one connection. It connects at the first use.
func (c *Config) Open(ctx context.Context) (*pgxpool.Pool, error) {
	pool, err := pgxpool.NewWithConfig(ctx, c.PoolConfig(1))
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return pool, nil
}

// WithOutbox connects, checks the schema and lets f work.
func (c *Config) WithOutbox(ctx context.Context, f func(*ops.Outbox) error) error {
	pool, err := c.Open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	outbox := ops.New(pool)
	if err := outbox.CheckSchema(ctx); err != nil {
		return err
	}
	return f(outbox)
}

// DatabaseName names the database in messages: its URL without password and parameters.
func (c *Config) DatabaseName() string { return databaseName(c.Pool.ConnConfig) }

func databaseName(conn *pgx.ConnConfig) string {
	hosts := []string{hostPort(conn.Host, conn.Port)}
	for _, fallback := range conn.Fallbacks { // the other hosts, and each of them again without TLS
		if host := hostPort(fallback.Host, fallback.Port); host != hosts[len(hosts)-1] {
			hosts = append(hosts, host)
		}
	}
	user := url.PathEscape(conn.User)
	if conn.Password != "" {
		user += ":" + settings.Mask
	}
	if user != "" {
		user += "@"
	}
	name := "postgres://" + user
	if strings.HasPrefix(conn.Host, "/") {
		return name + "/" + url.PathEscape(conn.Database) + "?host=" + conn.Host
	}
	return name + strings.Join(hosts, ",") + "/" + url.PathEscape(conn.Database)
}

func hostPort(host string, port uint16) string {
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// Ask connects, checks the schema and lets f ask its questions.
func Ask(inv *cli.Invocation, f func(context.Context, *ops.Outbox) error) error {
	c, err := Read(inv, "database")
	if err != nil {
		return err
	}
	return c.Ask(inv, f)
}

// Ask is the function [Ask] for commands that need more of the configuration.
func (c *Config) Ask(inv *cli.Invocation, f func(context.Context, *ops.Outbox) error) error {
	return c.WithOutbox(inv.Ctx, func(outbox *ops.Outbox) error {
		if err := warnQuarantined(inv, outbox, c.Relay.Environment); err != nil {
			return err
		}
		return f(inv.Ctx, outbox.As(inv.Actor()))
	})
}

// warnQuarantined says beside what a command prints that nothing will move.
func warnQuarantined(inv *cli.Invocation, outbox *ops.Outbox, environment string) error {
	report, err := outbox.Identity(inv.Ctx, environment)
	if err != nil {
		return err
	}
	if reason := report.Reason(); reason != "" {
		fmt.Fprintf(inv.Stderr, "warning: nothing is claimed or sent: %s; see: outbox-relay identity show\n", output.Printable(reason))
	}
	return nil
}

// DirectURL returns the URL that leads past a pooler, with its password; that of the pooler if
// there is no other.
func (c *Config) DirectURL() string {
	return string(cmp.Or(c.listenURL, c.databaseURL))
}

// OpenMigrator returns what migrates the database, with its own connection. The caller closes
// that.
func (c *Config) OpenMigrator(set migrations.Set, options migrations.Options) (*sql.DB, *migrations.Migrator, error) {
	if c.Direct == nil && c.Relay.Pooler.Mode == relay.PoolerTransaction {
		return nil, nil, cli.ExitError{Code: cli.ExitConfig, Err: errors.New("migrations need a connection past the pooler: set database.listen_url (OUTBOX_DATABASE_LISTEN_URL)")}
	}
	db := stdlib.OpenDB(*c.ConnConfig())
	m, err := migrations.New(db, set, options)
	if err != nil {
		return nil, nil, errors.Join(err, db.Close())
	}
	return db, m, nil
}
