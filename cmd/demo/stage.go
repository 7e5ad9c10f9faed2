package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// A stage is what the play takes place on: a throwaway PostgreSQL with the databases of both services, and the processes
// that work on them, each a real one.
type stage struct {
	server  *localpg.Server
	self    string // this program, which plays both services
	relay   string // the outbox-relay binary
	secret  string
	seed    uint64
	absence time.Duration // of a relay that was killed
	history *history

	finance, logistics *pgxpool.Pool

	ctx   context.Context // ends with the play; its cause is what went wrong
	fail  context.CancelCauseFunc
	units sync.WaitGroup

	receiver *unit
	onCrash  func(life string) // called when a receiver has died of its faults; may be nil
}

// The two services and their databases.
const (
	financeName   = "finance"
	logisticsName = "logistics"
)

// patience bounds every wait for something that ought to happen within a second or two.
const patience = 30 * time.Second

// clearEnvironment removes what would make the demo's programs do something else than elsewhere: settings of the
// outbox-relay that its user may have, and libpq's defaults.
func clearEnvironment() {
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); strings.HasPrefix(name, "OUTBOX_") || strings.HasPrefix(name, "PG") {
			_ = os.Unsetenv(name) // fails only on an invalid name
		}
	}
}

// openStage starts PostgreSQL and migrates both databases with the given outbox-relay. ctx ends the play.
func openStage(ctx context.Context, relay string, seed uint64) (s *stage, err error) {
	s = &stage{seed: seed, history: newHistory()}
	s.ctx, s.fail = context.WithCancelCause(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.relay, err = filepath.Abs(relay); err != nil {
		return s, fmt.Errorf("find outbox-relay: %w", err)
	}
	if _, err := os.Stat(s.relay); err != nil {
		return s, fmt.Errorf("find outbox-relay: %w; run: go build -o bin/outbox-relay ./cmd/outbox-relay", err)
	}
	if s.self, err = os.Executable(); err != nil {
		return s, fmt.Errorf("find this program: %w", err)
	}
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	s.secret = "whsec_" + base64.StdEncoding.EncodeToString(secret[:])

	// Commit times make the latency from commit to commit exact, and show an answer that came before its commit.
	options := localpg.Options{Settings: map[string]string{"track_commit_timestamp": "on"}}
	if s.server, err = localpg.Start(s.ctx, options); err != nil {
		return s, err
	}
	if s.finance, err = s.openDatabase(financeName, "outbox", financeTables); err != nil {
		return s, err
	}
	if s.logistics, err = s.openDatabase(logisticsName, "inbox", logisticsTables); err != nil {
		return s, err
	}
	return s, nil
}

const financeTables = `
CREATE TABLE invoices (
    number       text PRIMARY KEY,
    customer     text NOT NULL,
    amount_cents bigint NOT NULL
);

-- What the demo itself notes down: which relay was which, and each claim that a relay lost by dying.
CREATE TABLE demo_relay (instance integer PRIMARY KEY, life text NOT NULL);
CREATE TABLE demo_lost_claim (
    delivery text PRIMARY KEY,
    instance integer NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE FUNCTION demo_note_relay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO demo_relay VALUES (NEW.instance, NEW.name);
    RETURN NULL;
END $$;
CREATE TRIGGER demo_note_relay AFTER INSERT ON outbox_relay FOR EACH ROW EXECUTE FUNCTION demo_note_relay();
CREATE FUNCTION demo_note_lost_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO demo_lost_claim VALUES (format('%s-%s-%s', OLD.event_id, OLD.destination, OLD.claim), OLD.claimed_by);
    RETURN NULL;
END $$;
CREATE TRIGGER demo_note_lost_claim AFTER UPDATE ON outbox_delivery
    FOR EACH ROW WHEN (NEW.claim > OLD.claim AND OLD.claimed_by IS NOT NULL) EXECUTE FUNCTION demo_note_lost_claim();`

const logisticsTables = `
CREATE TABLE shipments (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    invoice         text NOT NULL, -- not unique: a doubled effect must show
    customer        text NOT NULL,
    idempotency_key text NOT NULL
)`

// openDatabase makes a database with one set of migrations, applied as a user would, and the service's own tables.
func (s *stage) openDatabase(name, set, tables string) (*pgxpool.Pool, error) {
	if err := s.server.CreateDatabase(s.ctx, name, ""); err != nil {
		return nil, err
	}
	migrate := process.Command{
		Argv: []string{s.relay, "migrate", "up", "--set", set},
		Env:  []string{"OUTBOX_DATABASE_URL=" + s.server.DSN(name)},
	}
	if err := process.Run(s.ctx, migrate); err != nil {
		return nil, fmt.Errorf("outbox-relay migrate up --set %s: %w", set, err)
	}
	pool, err := pgxpool.New(s.ctx, s.server.DSN(name))
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", name, err)
	}
	if _, err := pool.Exec(s.ctx, tables); err != nil {
		pool.Close()
		return nil, fmt.Errorf("create tables of %s: %w", name, err)
	}
	return pool, nil
}

// await waits for the history to fulfil a condition.
func (s *stage) await(what string, done func(*history) bool) error {
	ctx, cancel := context.WithTimeoutCause(s.ctx, patience, fmt.Errorf("still waiting for %s", what))
	defer cancel()
	return s.history.await(ctx, done)
}

// poll waits for the database to fulfil a condition.
func (s *stage) poll(what string, done func(context.Context) (bool, error)) error {
	return s.pollFor(patience, what, done)
}

func (s *stage) pollFor(patience time.Duration, what string, done func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(s.ctx, patience, fmt.Errorf("still waiting for %s", what))
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
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

// close ends all processes, stops PostgreSQL and removes it. It returns what went wrong on the way.
func (s *stage) close() error {
	s.fail(nil)
	s.units.Wait()
	for _, pool := range []*pgxpool.Pool{s.finance, s.logistics} {
		if pool != nil {
			pool.Close()
		}
	}
	if s.server == nil {
		return nil
	}
	return s.server.Stop()
}
