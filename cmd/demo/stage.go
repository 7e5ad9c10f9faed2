package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
)

// A stage is what the play takes place on: a throwaway PostgreSQL with the databases of both services, and the processes
// that work on them, each a real one.
type stage struct {
	server  *localpg.Server
	self    string // this program, which plays both services
	relay   string // the outbox-relay binary
	secret  string
	seed    uint64
	history *history

	finance, logistics *pgxpool.Pool

	ctx   context.Context // ends with the play; its cause is what went wrong
	fail  context.CancelCauseFunc
	units sync.WaitGroup

	receiver *unit
	mourn    func(life string) // called when a receiver has died; may be nil
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
    FOR EACH ROW WHEN (NEW.rescues > OLD.rescues) EXECUTE FUNCTION demo_note_lost_claim();`

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
	migrate := command{
		argv: []string{s.relay, "migrate", "up", "--set", set},
		env:  []string{"OUTBOX_DATABASE_URL=" + s.server.DSN(name)},
	}
	if err := run(s.ctx, migrate); err != nil {
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

// listen returns what takes the journal of a life.
func (s *stage) listen(life string) func(line string) {
	return func(line string) {
		var e entry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			s.fail(fmt.Errorf("%s wrote %q, which is no journal entry: %w", life, line, err))
			return
		}
		s.history.add(life, e)
	}
}

// fill keeps a role filled until the play ends. When that fails, the play ends.
func (s *stage) fill(u *unit) {
	s.units.Go(func() {
		if err := u.run(s.ctx); err != nil {
			s.fail(err)
		}
	})
}

// openReceiver starts logistics and returns when it listens. Each life dies in the effect that dieAfter gives it; beyond
// the list, lives do not die by themselves.
func (s *stage) openReceiver(f faults, dieAfter ...int) error {
	const role = "logistics"
	share := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	s.receiver = &unit{role: role, ended: func(life string, at time.Time) {
		s.history.died(life, at)
		if s.mourn != nil {
			s.mourn(life)
		}
	}}
	s.receiver.launch = func(life string, number int) (*process, error) {
		argv := []string{
			s.self, role, "--database", s.server.DSN(logisticsName), "--seed", strconv.FormatUint(s.seed, 10),
			"--late", share(f.Late), "--refuse", share(f.Refuse), "--lose", share(f.Lose),
		}
		if addr := s.history.address(); addr != "" {
			argv = append(argv, "--listen", addr) // where the relays look for it
		}
		if number <= len(dieAfter) {
			argv = append(argv, "--die-after", strconv.Itoa(dieAfter[number-1]))
		}
		return start(command{argv: argv, env: []string{"DEMO_SECRET=" + s.secret}, stdout: s.listen(life)})
	}
	s.fill(s.receiver)
	return s.await("logistics to listen", func(h *history) bool { return h.addr != "" })
}

// openRelay starts an outbox-relay and returns when it is registered. env adds to its settings.
func (s *stage) openRelay(role string, rest time.Duration, env ...string) (*unit, error) {
	u := &unit{role: role, rest: rest, ended: func(string, time.Time) {}}
	u.launch = func(life string, _ int) (*process, error) {
		settings := append([]string{
			"OUTBOX_DATABASE_URL=" + s.server.DSN(financeName),
			"OUTBOX_DESTINATION_URL=http://" + s.history.address() + webhookPath + "?relay=" + life,
			"OUTBOX_SIGNING_SECRET=" + s.secret,
			"OUTBOX_NAME=" + life,
		}, env...)
		return start(command{argv: []string{s.relay, "run"}, env: settings})
	}
	s.fill(u)
	return u, s.poll(role+" to register", func(ctx context.Context) (bool, error) {
		life, _ := u.current()
		return s.registered(ctx, life)
	})
}

// An order is what finance is told to issue.
type order struct {
	prefix             string
	invoices           int
	perSecond          float64 // 0: as fast as possible
	rollback, plainSQL float64 // shares
}

// issue runs finance and returns when everything is issued.
func (s *stage) issue(o order) error {
	argv := []string{
		s.self, "finance", "--database", s.server.DSN(financeName), "--seed", strconv.FormatUint(s.seed, 10),
		"--prefix", o.prefix, "--invoices", strconv.Itoa(o.invoices), "--rate", fmt.Sprint(o.perSecond),
		"--rollback", fmt.Sprint(o.rollback), "--plain-sql", fmt.Sprint(o.plainSQL),
	}
	if err := run(s.ctx, command{argv: argv, stdout: s.listen("finance." + o.prefix)}); err != nil {
		return fmt.Errorf("finance: %w", err)
	}
	return nil
}

// behave ends the receiver's faults. When it returns, everything the receiver wrote before has arrived in the history.
func (s *stage) behave() error {
	_, p := s.receiver.current()
	p.signal("USR1")
	return s.await("logistics to behave", func(h *history) bool { return h.behaving })
}

// await waits for the history to fulfil a condition.
func (s *stage) await(what string, done func(*history) bool) error {
	ctx, cancel := context.WithTimeoutCause(s.ctx, patience, fmt.Errorf("still waiting for %s", what))
	defer cancel()
	return s.history.await(ctx, done)
}

// poll waits for the database to fulfil a condition.
func (s *stage) poll(what string, done func(context.Context) (bool, error)) error {
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
