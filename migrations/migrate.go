package migrations

import (
	"context"
	"database/sql"
	"fmt"
	"hash/fnv"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// NewProvider returns a goose provider of the set over db, for applying,
// reverting or listing its migrations. It logs nothing.
//
// Tables are made in the first schema of the connections' search_path. Runs of
// one set in one database exclude each other by an advisory lock, which a
// session holds: db must reach PostgreSQL directly or through a pooler that
// keeps sessions. A run that finds the lock taken asks again every second and
// gives up after five minutes.
//
// db stays the caller's to close; the provider's own Close closes it too.
func NewProvider(db *sql.DB, set Set) (*goose.Provider, error) {
	locker, err := lock.NewPostgresSessionLocker(
		lock.WithLockID(lockID(set)),
		lock.WithLockTimeout(1, 300),
	)
	if err != nil {
		return nil, fmt.Errorf("make migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, set.FS(),
		goose.WithTableName(set.VersionTable()),
		goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true), // an application's own goose migrations are not ours to run
		goose.WithLogger(goose.NopLogger()),
	)
	if err != nil {
		return nil, fmt.Errorf("read %s migrations: %w", set, err)
	}
	return provider, nil
}

// Up applies every migration of the set that db lacks; none is no error. Each
// runs in a transaction of its own, so that an error leaves db at the version
// before the one that failed. It may be called by several processes at once.
func Up(ctx context.Context, db *sql.DB, set Set) error {
	provider, err := NewProvider(db, set)
	if err != nil {
		return err
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("apply %s migrations: %w", set, err)
	}
	return nil
}

// lockID is the advisory lock of a set: its own, so that neither the other set
// nor an application's goose migrations, which use the default, wait for it.
func lockID(set Set) int64 {
	h := fnv.New64a()
	h.Write([]byte("outbox-relay/migrations/" + string(set)))
	return int64(h.Sum64())
}
