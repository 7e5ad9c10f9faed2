package process

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
)

// A Stage is what a demonstration takes place on: a throwaway PostgreSQL, and the processes that
// work on its databases.
type Stage struct {
	Server *localpg.Server
	Self   string        // this program, which plays the services
	Relay  string        // the outbox-relay program
	Secret string        // signs the events
	Grace  time.Duration // how long a process may take to stop in order at the end

	Ctx    context.Context // ends with the play; its cause is what went wrong
	fail   context.CancelCauseFunc
	actors sync.WaitGroup
	pools  []*pgxpool.Pool
}

// OpenStage starts PostgreSQL. ctx ends the play. Also after an error the stage has to be closed.
func OpenStage(ctx context.Context, relay string, options localpg.Options) (s *Stage, err error) {
	s = &Stage{Grace: 3 * time.Second}
	s.Ctx, s.fail = context.WithCancelCause(ctx)
	if s.Relay, err = filepath.Abs(relay); err == nil {
		_, err = os.Stat(s.Relay)
	}
	if err != nil {
		return s, fmt.Errorf("find outbox-relay: %w; run: go build -o bin/outbox-relay ./cmd/outbox-relay", err)
	}
	if s.Self, err = os.Executable(); err != nil {
		return s, fmt.Errorf("find this program: %w", err)
	}
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	s.Secret = "whsec_" + base64.StdEncoding.EncodeToString(secret[:])
	s.Server, err = localpg.Start(s.Ctx, options)
	return s, err
}

// ClearEnvironment removes what would make the programs of a demonstration do something else than
// elsewhere: settings of the outbox-relay that its user may have, and libpq's defaults.
func ClearEnvironment() {
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); strings.HasPrefix(name, "OUTBOX_") || strings.HasPrefix(name, "PG") {
			_ = os.Unsetenv(name) // fails only on an invalid name
		}
	}
}

// Database makes a database with one set of migrations, applied as a user would, and the service's
// own tables. Close closes the pool.
func (s *Stage) Database(name, set, tables string) (*pgxpool.Pool, error) {
	if err := s.Server.CreateDatabase(s.Ctx, name, ""); err != nil {
		return nil, err
	}
	migrate := Command{Argv: []string{s.Relay, "migrate", "up", "--set", set}, Env: []string{"OUTBOX_DATABASE_URL=" + s.Server.DSN(name)}}
	if err := Run(s.Ctx, migrate); err != nil {
		return nil, fmt.Errorf("outbox-relay migrate up --set %s: %w", set, err)
	}
	pool, err := pgxpool.New(s.Ctx, s.Server.DSN(name))
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", name, err)
	}
	s.pools = append(s.pools, pool)
	if _, err := pool.Exec(s.Ctx, tables); err != nil {
		return nil, fmt.Errorf("create tables of %s: %w", name, err)
	}
	return pool, nil
}

// Go runs a part of the play. Its failure ends the play.
func (s *Stage) Go(part func(ctx context.Context) error) {
	s.actors.Go(func() {
		if err := part(s.Ctx); err != nil {
			s.Fail(err)
		}
	})
}

// Fail ends the play.
func (s *Stage) Fail(reason error) { s.fail(reason) }

// Fill keeps a role filled until the play ends.
func (s *Stage) Fill(u *Unit) {
	s.Go(func(ctx context.Context) error { return u.run(ctx, s.Grace) })
}

// Poll asks until the answer is yes, for at most so long, and the more often the shorter that is.
func (s *Stage) Poll(patience time.Duration, what string, done func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(s.Ctx, patience, fmt.Errorf("still waiting for %s", what))
	defer cancel()
	tick := time.NewTicker(patience / 3000)
	defer tick.Stop()
	for {
		yes, err := done(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil || yes:
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// Reason returns what ended the play, of which an error is only the consequence, or else the error.
func (s *Stage) Reason(err error) error {
	if cause := context.Cause(s.Ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// End ends the play and returns when its processes are gone. PostgreSQL still runs.
func (s *Stage) End() {
	s.fail(nil)
	s.actors.Wait()
}

// Close ends the play, stops PostgreSQL and removes it. It returns what went wrong on the way.
func (s *Stage) Close() error {
	s.End()
	for _, pool := range s.pools {
		pool.Close()
	}
	if s.Server == nil {
		return nil
	}
	return s.Server.Stop()
}

// A Querier is a database, or a transaction.
type Querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// One returns the only value of a query.
func One[T any](ctx context.Context, db Querier, query string, args ...any) (T, error) {
	rows, _ := db.Query(ctx, query, args...) // its error comes with the row
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
}

// PrintTable prints what happened: rows of a name, a figure and a remark.
func PrintTable(w io.Writer, rows [][3]string) {
	fmt.Fprintln(w, "\nWhat happened")
	for _, row := range rows {
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("  %-36s %13s   %s", row[0], row[1], row[2]), " "))
	}
}
