package migrations

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pressly/goose/v3"
)

// Options bound how long a migration may delay the statements of others. The zero value suits
// production.
type Options struct {
	// LockTimeout is how long a migration waits for one lock. PostgreSQL queues every later
	// statement on the table behind that wait, so this is also the longest pause of a producer.
	// Zero means 200 ms. A file that uses no transaction waits up to RetryFor instead: it only
	// builds or drops indexes concurrently, which delays no producer.
	LockTimeout time.Duration
	// RetryFor is how long the migrator tries one file again whose locks others hold. Zero means 5
	// minutes, less than zero not at all. After it Up and DownTo return a [LockedError].
	RetryFor time.Duration
	// OnWait, if it is set, is called after each attempt that did not get its locks, and once in an
	// attempt that waits longer than a second. It is called on the goroutine that called Up or
	// DownTo.
	OnWait func(*LockedError)
}

const (
	defaultLockTimeout = 200 * time.Millisecond
	defaultRetryFor    = 5 * time.Minute
	firstPause         = 500 * time.Millisecond
	longestPause       = 5 * time.Second
)

// A Migrator applies and reverts the migrations of one set in one database. It logs nothing.
// Several Migrators, also of several processes, may work on one database at once; one Migrator is
// not safe for concurrent use.
type Migrator struct {
	set      Set
	db       *sql.DB
	files    fs.FS
	provider *goose.Provider
	session  *session
	options  Options
}

// New returns a migrator of the set over db.
//
// Tables are made in the first schema of the connections' search_path, which should name no second
// one. Files of one set in one database exclude each other by an advisory lock, which a session
// holds: db must reach PostgreSQL directly or through a pooler that keeps sessions. A second
// connection, if db allows one, finds out who holds a lock.
//
// db stays the caller's to close.
func New(db *sql.DB, set Set, options Options) (*Migrator, error) {
	return newMigrator(db, set, set.FS(), options)
}

func newMigrator(db *sql.DB, set Set, files fs.FS, options Options) (*Migrator, error) {
	options.LockTimeout = cmp.Or(options.LockTimeout, defaultLockTimeout)
	options.RetryFor = cmp.Or(options.RetryFor, defaultRetryFor)
	if options.OnWait == nil {
		options.OnWait = func(*LockedError) {}
	}
	s := &session{versionTable: set.VersionTable(), lockID: lockID(set), patience: max(options.RetryFor, lockPoll)}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(set.VersionTable()),
		goose.WithSessionLocker(s),
		goose.WithDisableGlobalRegistry(true), // an application's own goose migrations are not ours to run
		goose.WithLogger(goose.NopLogger()),
	)
	if err != nil {
		return nil, fmt.Errorf("read %s migrations: %w", set, err)
	}
	return &Migrator{set: set, db: db, files: files, provider: provider, session: s, options: options}, nil
}

// Up applies every migration of the set that db lacks; none is no error. See [Migrator.Up].
func Up(ctx context.Context, db *sql.DB, set Set) error {
	m, err := New(db, set, Options{})
	if err != nil {
		return err
	}
	if _, err := m.Up(ctx); err != nil {
		return fmt.Errorf("apply %s migrations: %w", set, err)
	}
	return nil
}

// Sources returns the files of the set, oldest first.
func (m *Migrator) Sources() []*goose.Source { return m.provider.ListSources() }

// Version returns the newest version that the database has, 0 if it has none.
func (m *Migrator) Version(ctx context.Context) (int64, error) {
	if err := m.session.checkVersionTable(ctx, m.db); err != nil {
		return 0, err
	}
	return m.provider.GetDBVersion(ctx)
}

// Up applies every migration that the database lacks and returns what it applied, also beside an
// error. Each file is applied in its own transaction, so that an error leaves the database at
// the version before the file that failed. A file that does not get a lock within LockTimeout is
// rolled back and tried again for RetryFor.
func (m *Migrator) Up(ctx context.Context) (done []*goose.MigrationResult, err error) {
	if err := m.session.checkVersionTable(ctx, m.db); err != nil {
		return nil, err
	}
	if pending, err := m.provider.HasPending(ctx); err != nil || !pending {
		return nil, err
	}
	statuses, err := m.provider.Status(ctx)
	if err != nil {
		return nil, err
	}
	for _, status := range statuses {
		if status.State == goose.StateApplied {
			continue
		}
		result, err := m.run(ctx, status.Source, true)
		if errors.Is(err, goose.ErrAlreadyApplied) { // another process was faster
			continue
		} else if err != nil {
			return done, err
		}
		done = append(done, result)
	}
	return done, nil
}

// DownTo reverts every migration above version, newest first, in the same way as Up applies them.
func (m *Migrator) DownTo(ctx context.Context, version int64) (done []*goose.MigrationResult, err error) {
	if err := m.session.checkVersionTable(ctx, m.db); err != nil {
		return nil, err
	}
	statuses, err := m.provider.Status(ctx)
	if err != nil {
		return nil, err
	}
	for _, status := range slices.Backward(statuses) {
		if status.State != goose.StateApplied || status.Source.Version <= version {
			continue
		}
		result, err := m.run(ctx, status.Source, false)
		if errors.Is(err, goose.ErrNotApplied) {
			continue
		} else if err != nil {
			return done, err
		}
		done = append(done, result)
	}
	return done, nil
}

// run applies or reverts one file, again and again while others hold its locks.
func (m *Migrator) run(ctx context.Context, source *goose.Source, up bool) (result *goose.MigrationResult, err error) {
	file := path.Base(source.Path)
	concurrent, err := withoutTransaction(m.files, source.Path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	start, tries := time.Now(), 0
	var holders []Session
	pauses := &pauses{BackOff: backoff.NewExponentialBackOff(backoff.WithInitialInterval(firstPause), backoff.WithMaxInterval(longestPause),
		backoff.WithMaxElapsedTime(m.options.RetryFor))}
	attempt := func() error {
		tries++
		locked := &LockedError{File: file, Tries: tries, Holders: holders} // those of the attempt before, unless this one sees any
		timeout := m.options.LockTimeout
		if concurrent {
			timeout = max(timeout, m.options.RetryFor-time.Since(start))
		}
		result, err = m.attempt(ctx, source.Version, up, timeout, locked)
		if err == nil || !isLocked(err) {
			return backoff.Permanent(err) // nil if err is
		}
		holders, locked.Waited, locked.Err = locked.Holders, time.Since(start), unwrapped(err)
		m.options.OnWait(locked)
		for _, holder := range holders {
			if holder.Kind == autovacuum && m.session.interrupt(ctx, m.db, holder) == nil { // else the next attempts wait for its end
				pauses.skip = true
			}
		}
		return locked
	}
	err = backoff.Retry(attempt, backoff.WithContext(pauses, ctx))
	if partial := new(goose.PartialError); errors.As(err, &partial) {
		return nil, fmt.Errorf("%s: %w%s", file, partial.Err, m.inTheWay(ctx, partial.Err))
	}
	return result, err
}

// pauses are the times between attempts. There is none after autovacuum was interrupted: its next
// worker might lock the table again before the attempt does.
type pauses struct {
	backoff.BackOff
	skip bool // the next one
}

// NextBackOff returns how long to wait for the next attempt.
func (p *pauses) NextBackOff() time.Duration {
	next, skip := p.BackOff.NextBackOff(), p.skip
	p.skip = false
	if skip && next != backoff.Stop {
		return 0
	}
	return next
}

// attempt runs one file once. Beside it, it looks who holds the locks that the file waits for:
// afterwards it would be too late to ask.
func (m *Migrator) attempt(ctx context.Context, version int64, up bool, timeout time.Duration, locked *LockedError) (result *goose.MigrationResult, err error) {
	m.session.lockTimeout = timeout
	m.session.pid.Store(0)
	watching, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	running.Go(func() {
		defer stop()
		result, err = m.provider.ApplyVersion(ctx, version, up)
	})
	m.watch(watching, timeout, locked)
	running.Wait()
	return result, err
}

// watch writes the sessions that the migration waits for into locked, until ctx ends.
func (m *Migrator) watch(ctx context.Context, timeout time.Duration, locked *LockedError) {
	look := time.NewTicker(min(timeout/4, time.Second))
	defer look.Stop()
	for reported := timeout <= time.Second; ; { // a short attempt is reported when it ends
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		// An error is left to the migration, which works in the same database.
		if holders, err := m.session.holders(ctx, m.db); err == nil && len(holders) > 0 {
			locked.Holders = holders
			if !reported {
				reported = true
				m.options.OnWait(locked)
			}
		}
	}
}

// unwrapped removes goose's own words from an error of a file: they name the version, which the
// file's name says too.
func unwrapped(err error) error {
	if partial := new(goose.PartialError); errors.As(err, &partial) {
		return partial.Err
	}
	return err
}

// isLocked reports whether a lock was not to be had in time. A deadlock is another way to find out.
func isLocked(err error) bool {
	pgErr := new(pgconn.PgError)
	return errors.As(err, &pgErr) && (pgErr.Code == "55P03" || pgErr.Code == "40P01") // lock_not_available, deadlock_detected
}
