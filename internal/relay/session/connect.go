package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Config is how a relay reaches its database, and as what it registers there.
type Config struct {
	// Pool says how to reach the database. At most MaxConns connections of it are opened (when that
	// is 0 or above 3: three).
	Pool *pgxpool.Config
	// Pooler says whether Pool leads through a connection pooler.
	Pooler Pooler
	// Schema that holds the outbox tables. Empty: the first one on the search_path of role and
	// database.
	Schema string
	// AllowSuperuser lets Check pass a superuser's login, see [pg.CheckLogin].
	AllowSuperuser bool
	// Name and Version under which operators see the relay.
	Name, Version string
	// PollInterval of the relay, for the log. Lease is after how long a relay without a session is
	// dead if it does not beat.
	PollInterval, Lease time.Duration
	// Log receives what happens. The zero value discards.
	Log zerolog.Logger
}

// Pooler says whether a connection pooler stands between the relay and its database. The zero value
// finds out.
type Pooler struct {
	// Mode says what Config.Pool leads to. Empty: PoolerAuto.
	Mode PoolerMode
	// Session is how to reach the server itself when Config.Pool leads through a pooler. The relay
	// opens one connection of it, and is with it what it is without a pooler: woken by
	// notifications, rescued within about a second. nil: as Config.Pool.
	Session *pgxpool.Config
}

// PoolerMode says what a database URL leads to.
type PoolerMode string

// What a database URL may lead to.
const (
	// PoolerAuto asks the server whether it got the settings of a session, and works as
	// PoolerTransaction if it did not.
	PoolerAuto PoolerMode = "auto"
	// PoolerNone is the server itself. A relay that finds a pooler there ends with ErrPooler.
	PoolerNone PoolerMode = "none"
	// PoolerTransaction is a pooler that keeps nothing but transactions, as PgBouncer does. Without
	// Pooler.Session, events are found by polling alone, and the work of a relay that crashed waits
	// for its lease.
	PoolerTransaction PoolerMode = "transaction"
)

// Problems returns every mistake in it; path is that of the mode.
func (p Pooler) Problems(path string) []check.Problem {
	var v check.Problems
	known := []PoolerMode{"", PoolerAuto, PoolerNone, PoolerTransaction}
	v.Require(slices.Contains(known, p.Mode), path, "%q is not known; write auto, none or transaction", p.Mode)
	return v
}

const (
	defaultConns = 3
	// pingAfter is how long a connection may be idle before it is tried first.
	pingAfter = time.Minute
)

// PoolConfig returns how to connect to the server itself.
func (c *Config) PoolConfig() *pgxpool.Config {
	cfg := c.Pool.Copy()
	if cfg.MaxConns <= 0 || cfg.MaxConns > defaultConns {
		cfg.MaxConns = defaultConns
	}
	pg.SetDirect(cfg, c.Schema)
	if cfg.ShouldPing == nil {
		// By default every claim of an idle relay would be two queries. A statement on a broken
		// connection is repeated.
		cfg.ShouldPing = func(_ context.Context, p pgxpool.ShouldPingParams) bool { return p.IdleDuration > pingAfter }
	}
	return cfg
}

// A Database is how a relay reaches its database.
type Database struct {
	// Direct are connections to the server, or to the pooler in between.
	Direct *pgxpool.Pool
	// Pool runs statements: Direct, or transactions on it that a pooler can keep.
	Pool pg.Pool
	// Deaf says that no connection lasts: nothing listens for notifications.
	Deaf bool

	sockets *sockets // of Direct
}

// Open makes the pool, which connects at its first use. It fails only for what waiting cannot fix.
// The caller closes Database.
func (s *Session) Open(ctx context.Context) error {
	return s.open(ctx, s.Config.Pooler.Mode == PoolerTransaction)
}

func (s *Session) open(ctx context.Context, pooled bool) error {
	cfg := s.Config.PoolConfig()
	var settings map[string]string
	s.names = pg.NewNames(s.Config.Schema, "outbox_schema_version")
	if pooled {
		settings = pg.SetPooled(cfg, s.Config.Schema)
	} else {
		s.names.Pin(cfg)
	}
	s.Guard.Watch(cfg, s.names, pooled)
	opened := &sockets{}
	cfg.ConnConfig.DialFunc = opened.dial(cfg.ConnConfig.DialFunc)
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		return fmt.Errorf("open database pool: %w", err)
	}
	s.Database = Database{Direct: pool, Pool: s.names.On(pool), sockets: opened}
	if pooled {
		delete(settings, "search_path") // which names add
		s.Database.Pool = pg.NewTransactions(pool, settings, s.Guard.Prologue, identity.Explain).Naming(s.names)
		s.Database.Deaf = s.Config.Pooler.Session == nil
	}
	return nil
}

// Check finds out what the connections lead to, and whether the relay can work there. Behind a
// pooler it replaces Database. An error that wraps [pg.ErrSchema], [pg.ErrPooler], [pg.ErrEncoding]
// or [pg.ErrSuperuser] stays until an operator changes something.
func (s *Session) Check(ctx context.Context) error {
	err := pg.CheckSession(ctx, s.Database.Pool)
	if _, pooled := s.Database.Pool.(*pg.Transactions); errors.Is(err, pg.ErrPooler) && !pooled {
		if s.Config.Pooler.Mode == PoolerNone {
			return fmt.Errorf("%w; give the relay a direct connection, or set database.pooler to transaction", err)
		}
		s.Database.Close()
		if err := s.open(ctx, true); err != nil {
			return err
		}
		err = pg.CheckSession(ctx, s.Database.Pool)
	}
	if err != nil {
		return err
	}
	newer, err := pg.CheckSchema(ctx, s.Database.Pool)
	if err != nil {
		return err
	}
	if err := pg.CheckHistory(ctx, s.Database.Pool); err != nil {
		return err
	}
	if !s.Config.AllowSuperuser {
		if err := pg.CheckLogin(ctx, s.Database.Pool); err != nil {
			return err
		}
	}
	if newer != 0 {
		s.Config.Log.Warn().Int64("database", newer).Int64("known", migrations.Outbox.Latest()).
			Msg("the schema is newer than this version, and works with it; upgrade this relay soon")
	}
	creators, err := pg.FindSchemaCreators(ctx, s.Database.Pool)
	if err != nil {
		return err
	}
	if len(creators.Roles) > 0 {
		s.Config.Log.Warn().Strs("roles", creators.Roles).Str("run", creators.Revoke()).
			Msg("roles other than the owner may create objects in the schema, and so run code with the rights of producers and migrations; revoke that right as a superuser or as the owner of the schema")
	}
	if s.Database.Deaf {
		s.Config.Log.Warn().Dur("poll_interval", s.Config.PollInterval).Dur("lease", s.Config.Lease).
			Msg("working through a connection pooler: events are found by polling, and the work of a relay that crashes waits for its lease; a direct connection in database.listen_url makes both instant")
	}
	return nil
}

func (s *Session) connect(ctx context.Context) (*standing, error) {
	if pooled, ok := s.Database.Pool.(*pg.Transactions); ok && s.Database.Deaf {
		return &standing{Pool: pooled.With("lock_timeout", "0")}, nil // a rescue waits for what a dead relay left running
	}
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	pool := s.sessionConfig()
	pool.ConnConfig.RuntimeParams["lock_timeout"] = "0"
	on := &standing{}
	pool.ConnConfig.OnNotification = on.hear
	conn, err := dial(ctx, pool)
	if err != nil {
		return nil, err
	}
	on.Pool, on.conn = s.names.On(conn), conn
	return on, nil
}

// dial makes a connection as a pool would.
func dial(ctx context.Context, pool *pgxpool.Config) (*pgx.Conn, error) {
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, pool.ConnConfig); err != nil {
			return nil, fmt.Errorf("before connect: %w", err)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, pool.ConnConfig)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if pool.AfterConnect != nil {
		if err := pool.AfterConnect(ctx, conn); err != nil {
			_ = conn.Close(ctx)
			return nil, fmt.Errorf("after connect: %w", err)
		}
	}
	return conn, nil
}

// sessionConfig returns a copy of how to reach the server itself.
func (s *Session) sessionConfig() *pgxpool.Config {
	if own := s.Config.Pooler.Session; own != nil {
		own = own.Copy()
		pg.SetDirect(own, s.Config.Schema)
		s.names.Pin(own)
		return own
	}
	return s.Database.Direct.Config()
}
