package identity_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// addressOf returns the address under which a relay with the given DSN is configured.
func addressOf(t testing.TB, dsn string) string {
	t.Helper()
	conn, err := pgx.ParseConfig(dsn)
	relaytest.Must(t, err)
	return identity.Address(conn)
}

// A relay is what a guard needs of one: a session, and a place for what the guard says.
type relay struct {
	*identity.Guard
	db   *relaytest.Database
	conn *pgx.Conn // the session
	stop func()    // leaves, as a relay that stops

	mu      sync.Mutex
	said    []string // the reasons of quarantines, and an empty one for each end
	relayID int32    // 0: it is not accepted
	alerts  int      // how often the guard asked to send alerts
}

// comes starts a relay on a database: it waits until its guard accepts the database, and then
// registers. Settings that a test does not give are those of a relay that works here.
func comes(db *relaytest.Database, cfg identity.Config) *relay {
	db.Helper()
	r := &relay{db: db}
	if cfg.Address == "" {
		cfg.Address = addressOf(db, db.DSN)
	}
	if cfg.Name == "" {
		cfg.Name = "test"
	}
	cfg.AlertEvery = time.Hour
	cfg.Quarantined = func(reason string) { r.change(func() { r.said = append(r.said, reason) }) }
	cfg.Alert = func() { r.change(func() { r.alerts++ }) }
	cfg.Disown = func() { r.change(func() { r.relayID = 0 }) }
	cfg.Failed = func(operation string, err error) { db.Errorf("%s: %v", operation, err) }
	r.Guard = identity.NewGuard(cfg)
	r.Shut()
	conn, err := pgx.Connect(db.Context(), db.DSN)
	relaytest.Must(db, err)
	r.conn = conn
	ctx, cancel := context.WithCancel(context.WithoutCancel(db.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := r.Await(ctx, conn); err != nil {
			db.Errorf("Await: %v", err)
		}
		if ctx.Err() != nil {
			return
		}
		relayID, err := session.Register(ctx, conn, true, cfg.Name, "", time.Hour)
		if err != nil {
			db.Errorf("register: %v", err)
		}
		r.Admit(relayID)
		r.change(func() { r.relayID = relayID })
	})
	r.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		if r.relayID != 0 {
			if err := session.Deregister(context.Background(), conn, r.relayID); err != nil {
				db.Errorf("deregister: %v", err)
			}
		}
		_ = conn.Close(context.Background())
	})
	db.Cleanup(func() { r.stop() })
	return r
}

func (r *relay) change(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// works waits until the relay is accepted, and returns how often it was quarantined before.
func (r *relay) works() (quarantined int) {
	r.db.Helper()
	relaytest.Eventually(r.db, "a relay that is accepted", func() (accepted bool) {
		r.change(func() { accepted, quarantined = r.relayID != 0, (len(r.said)+1)/2 })
		return accepted
	})
	return quarantined
}

// wantQuarantine waits until the relay is quarantined, for a reason that names what.
func (r *relay) wantQuarantine(what string) {
	r.db.Helper()
	reason := ""
	relaytest.Eventually(r.db, "a relay that is quarantined", func() (is bool) {
		r.change(func() {
			if n := len(r.said); n%2 == 1 {
				is, reason = true, r.said[n-1]
			}
		})
		return is
	})
	if !strings.Contains(reason, what) {
		r.db.Errorf("the reason is %q, want it to name %s", reason, what)
	}
}

// visited leaves behind what a relay that worked does: the identity, and no living relay.
func visited(db *relaytest.Database) {
	db.Helper()
	r := comes(db, identity.Config{})
	r.works()
	r.stop()
}

// The first name counts; a relay without one takes part; one with another name waits until an
// operator decides.
func TestEnvironments(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	nameless := comes(db, identity.Config{Name: "nameless"})
	nameless.works()
	const environment = `SELECT environment FROM outbox_identity`
	testkit.Equal(t, "environment", relaytest.Row[string](db, environment), "")
	production := comes(db, identity.Config{Name: "real", Environment: "production"})
	production.works()
	testkit.Equal(t, "environment", relaytest.Row[string](db, environment), "production")
	stray := comes(db, identity.Config{Name: "stray", Environment: "staging"})
	stray.wantQuarantine(`environment is "staging", recorded is "production"`)
	for _, name := range []string{"", "staging"} { // relays that work keep it, whatever a new one says
		if _, err := identity.Accept(t.Context(), db.Pool, poolAddress(db.Pool), name, nil); !errors.Is(err, identity.ErrInUse) || !strings.Contains(err.Error(), "real") {
			t.Errorf("accepting %q while others work: %v", name, err)
		}
	}
	report, err := identity.Compare(t.Context(), db.Pool, poolAddress(db.Pool), "")
	relaytest.Must(t, err)
	testkit.ErrorIs(t, "discarding while others work", report.Discardable(), identity.ErrInUse)
	nameless.stop()
	production.stop()
	id, err := identity.Accept(t.Context(), db.Pool, poolAddress(db.Pool), "", nil)
	if relaytest.Must(t, err); id.Environment != "staging" {
		t.Errorf("accepted %+v", id)
	}
	stray.works()
}

// A relay that works stops when an operator decides for another environment.
func TestDecisionReachesRelaysThatWork(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	seldom := comes(db, identity.Config{Environment: "production", Interval: time.Hour})
	seldom.works()
	r := comes(db, identity.Config{Environment: "production"})
	r.works()
	relaytest.Must(t, r.Recheck(t.Context(), r.conn, db.Pool, true))
	db.Exec(`UPDATE outbox_identity SET environment = 'staging'`)
	err := r.Recheck(t.Context(), r.conn, db.Pool, true)
	if !errors.Is(err, identity.ErrQuarantined) || !strings.Contains(err.Error(), `environment is "production", recorded is "staging"`) {
		t.Errorf("after the decision: %v", err)
	}
	testkit.ErrorIs(t, "a statement is run", watched(r, db.DSN, false).Ping(t.Context()), identity.ErrGuarded)
	if err := seldom.Recheck(t.Context(), seldom.conn, db.Pool, true); err != nil {
		t.Errorf("it looks again before its interval has passed: %v", err)
	}
}

// A new spelling of the address is good while a relay works there, and is remembered; with no relay
// to vouch it is not.
func TestSpellingsOfTheAddress(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	first := comes(db, identity.Config{Address: "one:5432/app"})
	first.works()
	second := comes(db, identity.Config{Address: "two:5432/app"})
	if first.works()+second.works() != 0 {
		t.Errorf("false alarms: %v %v", first.said, second.said)
	}
	first.stop()
	second.stop()
	known := comes(db, identity.Config{Address: "two:5432/app"})
	testkit.Equal(t, "the second address is not remembered", known.works(), 0)
	known.stop()
	// A row without its session is no proof of a living relay, however fresh it is, and whichever
	// session has the pid.
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at, session_pid) VALUES ('copied', '', now() + interval '1 hour', pg_backend_pid())`)
	third := comes(db, identity.Config{Address: "three:5432/app"})
	third.wantQuarantine("its address is three:5432/app, recorded is one:5432/app or two:5432/app")
	comes(db, identity.Config{Address: "one:5432/app"}).works()
	third.works()
}

// Two relays under two addresses start together: the one that comes first waits for the other in
// silence.
func TestWitnessThatStartsLater(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	visited(db)
	early := comes(db, identity.Config{Address: "another:5432/app", Grace: time.Hour})
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
	comes(db, identity.Config{}).works()
	if early.works() != 0 || relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert`) != 0 {
		t.Errorf("a false alarm: %v", early.said)
	}
}

// A relay that is quarantined vouches for no other. What is accepted are the addresses of those
// that wait.
func TestQuarantinedRelayIsNoWitness(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	visited(db)
	var relays []*relay
	for _, address := range []string{"one:5432/app", "two:5432/app", "three:5432/app"} {
		relays = append(relays, comes(db, identity.Config{Address: address}))
	}
	for _, r := range relays {
		r.wantQuarantine("its address is")
	}
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = 'quarantined'`)
	report, err := identity.Compare(t.Context(), db.Pool, poolAddress(db.Pool), "")
	relaytest.Must(t, err)
	if len(report.Differences) != 0 || report.Reason() == "" || len(report.Quarantined) != 3 || len(report.Working) != 0 || report.Discardable() != nil {
		t.Errorf("%+v", report)
	}
	id, err := identity.Accept(t.Context(), db.Pool, poolAddress(db.Pool), "", nil)
	if relaytest.Must(t, err); len(id.Addresses) != 3 { // not that of the operator who accepts
		t.Errorf("accepted %v", id.Addresses)
	}
	for _, r := range relays {
		r.works()
	}
}

// A relay that looks whether an alert has ended may be behind another one that is quarantined.
func TestAlertOfAQuarantineMeetsItsEnd(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	visited(db)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, last_at) VALUES ('quarantined', '', now() - interval '1 minute'), ('quarantined', 'old', now())`)
	pool := pgtest.PoolBefore(t, db.DSN, "SET resolved_at", func() {
		comes(db, identity.Config{Address: "another:5432/app"}).wantQuarantine("its address is")
		relaytest.Becomes(db, true, `SELECT last_at > now() - interval '30 seconds' FROM outbox_alert WHERE subject = ''`)
	})
	guard := identity.NewGuard(identity.Config{Name: "test", Address: addressOf(db, db.DSN)})
	relaytest.Must(t, guard.Await(t.Context(), pool))
	testkit.Equal(t, "open alerts", relaytest.Rows[string](db, `SELECT subject FROM outbox_alert WHERE resolved_at IS NULL`), []string{""})
}

// Many relays start at once on a database that no relay has seen: one of them records it, and those
// that do not agree wait.
func TestFirstRelaysRace(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	byEnvironment := map[string][]*relay{}
	for i := range 6 {
		environment := []string{"production", "staging"}[i%2]
		byEnvironment[environment] = append(byEnvironment[environment], comes(db, identity.Config{Environment: environment}))
	}
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
	relaytest.Becomes(db, 3, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NULL`)
	recorded := relaytest.Row[string](db, `SELECT environment FROM outbox_identity`)
	for environment, relays := range byEnvironment {
		for _, r := range relays {
			if environment == recorded {
				r.works()
			} else {
				r.wantQuarantine("environment")
			}
		}
	}
}

// Behind a pooler no relay has a session: a heartbeat that moves while one looks vouches as well.
func TestHeartbeatIsAWitness(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	visited(db)
	db.Exec(`INSERT INTO outbox_relay (name, version, lease, heartbeat_at) VALUES ('pooled', '', '1 hour', now())`)
	r := comes(db, identity.Config{Address: "another:5432/app"})
	r.wantQuarantine("its address is") // a heartbeat that stands still is copied
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() WHERE name = 'pooled'`)
	r.works()
}
