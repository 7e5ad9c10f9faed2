package receivertest

import (
	"context"
	"database/sql"
	"net/http"
	"net/url"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A Flavour is one of the two drivers; every behaviour is tested through both.
type Flavour struct {
	Name string
	Wrap func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler
	call func(t testing.TB, dsn string, cfg consumer.Config, handle HandlerFunc) http.Handler
	Exec func(ctx context.Context, query string, args ...any) error // in the handler's transaction
	Once func(ctx context.Context, e *Env, source, key string, hold func()) (bool, error)

	Prune func(ctx context.Context, e *Env, cfg consumer.PruneConfig) (consumer.Pruned, error)
}

// Flavours returns both, pgx first.
func Flavours() []Flavour { return []Flavour{PGX(), SQL()} }

// PGX returns the flavour of package consumer.
func PGX() Flavour {
	return Flavour{
		Name: "pgx",
		Wrap: func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler {
			return Must(consumer.Middleware(pgtest.Pool(t, dsn), cfg))
		},
		call: func(t testing.TB, dsn string, cfg consumer.Config, handle HandlerFunc) http.Handler {
			return Must(consumer.New(pgtest.Pool(t, dsn), cfg, func(ctx context.Context, _ pgx.Tx, event consumer.Event) error { return handle(ctx, event) }))
		},
		Exec: func(ctx context.Context, query string, args ...any) error {
			_, err := consumer.Tx(ctx).Exec(ctx, query, args...)
			return err
		},
		Once: func(ctx context.Context, e *Env, source, key string, hold func()) (first bool, err error) {
			err = pgx.BeginFunc(ctx, e.Pool, func(tx pgx.Tx) error {
				first, err = consumer.Once(ctx, tx, consumer.Event{Receiver: "test", Source: source, IdempotencyKey: key})
				hold()
				return err
			})
			return first, err
		},
		Prune: func(ctx context.Context, e *Env, cfg consumer.PruneConfig) (consumer.Pruned, error) {
			return consumer.Prune(ctx, e.Pool, cfg)
		},
	}
}

// SQL returns the flavour of package sqlconsumer.
func SQL() Flavour {
	return Flavour{
		Name: "database/sql",
		Wrap: func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler {
			return Must(sqlconsumer.Middleware(OpenSQL(t, dsn), cfg))
		},
		call: func(t testing.TB, dsn string, cfg consumer.Config, handle HandlerFunc) http.Handler {
			return Must(sqlconsumer.New(OpenSQL(t, dsn), cfg, func(ctx context.Context, _ *sql.Tx, event consumer.Event) error { return handle(ctx, event) }))
		},
		Exec: func(ctx context.Context, query string, args ...any) error {
			_, err := sqlconsumer.Tx(ctx).ExecContext(ctx, query, args...)
			return err
		},
		Once: func(ctx context.Context, e *Env, source, key string, hold func()) (bool, error) {
			tx, err := OpenSQL(e.T, e.DSN).BeginTx(ctx, nil)
			if err != nil {
				return false, err
			}
			defer tx.Rollback()
			first, err := sqlconsumer.Once(ctx, tx, consumer.Event{Receiver: "test", Source: source, IdempotencyKey: key})
			hold()
			if err != nil {
				return false, err
			}
			return first, tx.Commit()
		},
		Prune: func(ctx context.Context, e *Env, cfg consumer.PruneConfig) (consumer.Pruned, error) {
			db := OpenSQL(e.T, e.DSN)
			defer db.Close() // some tests prune very often
			return sqlconsumer.Prune(ctx, db, cfg)
		},
	}
}

// OpenSQL returns a database that is closed when t ends.
func OpenSQL(t testing.TB, dsn string) *sql.DB {
	db, err := sql.Open("pgx", dsn)
	pgtest.Must(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// WithSetting adds a parameter to a DSN.
func WithSetting(dsn, name, value string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	return u.String()
}

// EachFlavour runs test once per driver, in parallel. In make test it runs it with pgx alone.
func EachFlavour(t *testing.T, test func(t *testing.T, f Flavour)) {
	EachFlavourAlways(t, func(t *testing.T, f Flavour) {
		if f.Name != "pgx" {
			testsize.Long(t)
		}
		test(t, f)
	})
}

// EachFlavourAlways is EachFlavour for what is promised first: make test runs it with both drivers.
func EachFlavourAlways(t *testing.T, test func(t *testing.T, f Flavour)) {
	t.Parallel()
	for _, f := range Flavours() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			test(t, f)
		})
	}
}

// PoolOf returns a pool of exactly n connections.
func PoolOf(t testing.TB, dsn string, n int) *pgxpool.Pool {
	t.Helper()
	return pgtest.Pool(t, WithSetting(dsn, "pool_max_conns", strconv.Itoa(n)))
}
