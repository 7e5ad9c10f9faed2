package identity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// Guard keeps this relay from working on a copy of its database. The session asks it before it
// registers and now and then afterwards; the pool asks it for every connection, so that no
// statement runs where the session did not look.
type Guard struct {
	cfg Config

	mu sync.Mutex
	// state of the pool.
	state guardState
	// relayID is the number that the session has registered; 0 while it has none.
	relayID int32
	// session counts registrations: each may be on another server, so that connections have to be
	// compared again.
	session int
	// missed is when a connection was first not on the server of the session; zero: none was.
	missed time.Time

	// system and database that were accepted last; 0: unknown.
	system, database int64

	// The rest belongs to the session's goroutine.

	shown     int32               // the number under which this relay is shown as quarantined
	announced string              // the reason that was told; empty: none
	repeated  time.Time           // when the log last told it
	looked    time.Time           // when the last look began
	beats     map[int32]time.Time // of pooled relays, at the look before; nil: there was none
}

type guardState int

const (
	guardPreparing guardState = iota // statements only ask whether the database is fit
	guardShut                        // none but the guard's own is run
	guardOpen                        // on the database that was accepted
)

const (
	// DefaultGrace is how long a relay under a new address looks for another that works here before
	// it raises an alarm: they may be starting together.
	DefaultGrace = 6 * time.Second
	// DefaultUnnoticed is a beat, and what a connection takes to fail.
	DefaultUnnoticed = 10 * time.Second
	// DefaultInterval is how often a relay with a connection to the server itself looks whether it
	// still belongs there: seldom, since no connection leads elsewhere than where it led before.
	DefaultInterval = 30 * time.Second
	// announceInterval is how often the log repeats that a relay is quarantined.
	announceInterval = 10 * time.Minute
	// lookInterval is how often a relay in quarantine looks again.
	lookInterval = time.Second
	// outTimeout bounds how long it may take to leave the list of those in quarantine.
	outTimeout = 2 * time.Second
)

var (
	// ErrGuarded keeps statements of the pool from a database that is not known to be this relay's.
	// It is no failure of the database, and told elsewhere.
	ErrGuarded = errors.New("no statement is run: the database is not, or not yet, accepted as this relay's")
	// errElsewhere says that two connections of one configuration lead to different databases.
	errElsewhere = errors.New("the relay's session is not on the server that this connection leads to; does the address lead to several?")
	// ErrQuarantined ends a session that was accepted before.
	ErrQuarantined = errors.New("quarantined")
)

// Config is what a Guard needs. Its functions must return at once; none but Quarantined may be nil.
type Config struct {
	// Name, Version and Environment of the relay, as in its own configuration.
	Name, Version, Environment string
	// Address of the database as configured, see [Address].
	Address string
	// Interval between two looks of a relay that works and has a connection to the server itself.
	// Behind a pooler every recheck looks. 0: every recheck looks.
	Interval time.Duration
	// Grace is how long a relay under a new address waits for another that works here before it
	// raises an alarm. 0: not at all.
	Grace time.Duration
	// Unnoticed is for how long a session may have ended with its server before the relay knows.
	// Only after that do connections without it lead to another server. 0: they do at once.
	Unnoticed time.Duration
	// AlertEvery is how long after an alert a relay in quarantine asks for it again, as a channel
	// may have failed.
	AlertEvery time.Duration

	// Log receives what the guard finds.
	Log zerolog.Logger
	// Quarantined follows the beginning of a quarantine with its reason, and its end with an empty
	// one. nil: nothing does.
	Quarantined func(reason string)
	// Failed follows a failed statement.
	Failed func(operation string, err error)
	// Alert follows an alert that may be due.
	Alert func()
	// Disown makes the relay forget the number that it had: that belongs to another database.
	Disown func()
}

// NewGuard returns a guard that lets every statement through until Shut is called.
func NewGuard(cfg Config) *Guard { return &Guard{cfg: cfg} }

func (g *Guard) set(state guardState, relayID int32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state, g.relayID, g.missed = state, relayID, time.Time{}
	g.session++
}

// Shut lets the pool run no statement until a session is accepted.
func (g *Guard) Shut() { g.set(guardShut, 0) }

// Admit opens the pool to a relay that has registered as relayID, on the database that await
// accepted.
func (g *Guard) Admit(relayID int32) { g.set(guardOpen, relayID) }

// Prologue returns the statement with which a transaction through a pooler begins, so that it goes
// no further on another database than the one that was accepted.
func (g *Guard) Prologue(ctx context.Context, names, values []string) (statement string, args []any) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.state != guardOpen || ctx.Value(unguardedKey{}) != nil:
		return pg.SetForTransaction, []any{names, values}
	case g.system == 0:
		return setForTransactionThereWithoutControl, []any{names, values, g.database}
	}
	return setForTransactionThere, []any{names, values, g.database, g.system}
}

// accepted remembers which database a session was accepted on.
func (g *Guard) accepted(id Identity) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.system, g.database = id.SystemIdentifier, id.DatabaseOID
}

type unguardedKey struct{}

// Unguarded lets statements through to a database that is not accepted: the guard's own, and those
// about its alert.
func Unguarded(ctx context.Context) context.Context {
	return context.WithValue(ctx, unguardedKey{}, true)
}

type enteringKey struct{}

// Entering lets the statements of a relay that registers through a pooler reach the database that
// Await accepted, and no other, before Admit lets all of them.
func Entering(ctx context.Context) context.Context {
	return context.WithValue(ctx, enteringKey{}, true)
}

// Watch makes a pool ask the guard for every connection. Connections that sessions share, behind a
// pooler, lead to another place at any time, so that a comparison proves nothing. names are those
// of the pool's statements.
func (g *Guard) Watch(cfg *pgxpool.Config, names *pg.Names, pooled bool) {
	before := cfg.PrepareConn
	if legacy := cfg.BeforeAcquire; before == nil && legacy != nil { //nolint:staticcheck // the pool would ignore it beside PrepareConn
		before = func(ctx context.Context, conn *pgx.Conn) (bool, error) { return legacy(ctx, conn), nil }
	}
	cfg.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
		if before != nil {
			if fit, err := before(ctx, conn); !fit || err != nil {
				return fit, err
			}
		}
		return g.prepareConn(ctx, conn, names, pooled)
	}
}

const comparedKey = "outbox-relay: compared with session"

func (g *Guard) prepareConn(ctx context.Context, conn *pgx.Conn, names *pg.Names, pooled bool) (fit bool, err error) {
	g.mu.Lock()
	state, relayID, session := g.state, g.relayID, g.session
	g.mu.Unlock()
	switch {
	case state == guardPreparing || ctx.Value(unguardedKey{}) != nil:
		return true, nil
	case state == guardShut, relayID == 0 && !(pooled && ctx.Value(enteringKey{}) != nil):
		return true, ErrGuarded
	case pooled:
		return true, nil
	}
	data := conn.PgConn().CustomData()
	if data[comparedKey] == session {
		return true, nil
	}
	same, err := sameDatabase(ctx, names.On(conn), relayID)
	if err == nil && !same {
		err = g.miss(time.Now())
	}
	if err != nil {
		return false, err
	}
	data[comparedKey] = session
	return true, nil
}

// miss returns the error of a connection that is not on the server of the session.
func (g *Guard) miss(now time.Time) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.missed.IsZero() {
		g.missed = now
	}
	if now.Sub(g.missed) < g.cfg.Unnoticed {
		return ErrGuarded
	}
	return errElsewhere
}

// Await returns nil once the database behind h is this relay's: mostly at once, after a quarantine
// when an operator has accepted it, or when ctx is done.
func (g *Guard) Await(ctx context.Context, h pg.DB) error {
	ctx = Unguarded(ctx)
	g.beats = nil // of another connection, perhaps to another server
	differences, err := g.look(ctx, h)
	if err != nil {
		return err
	}
	if len(differences) > 0 {
		if err := g.quarantine(ctx, h, differences); err != nil || ctx.Err() != nil {
			return err
		}
	}
	if g.announced != "" {
		g.announced = ""
		g.cfg.Log.Warn().Msg("the quarantine is over: the database is accepted")
		if g.cfg.Quarantined != nil {
			g.cfg.Quarantined("")
		}
	}
	g.set(guardOpen, 0)
	return resolveQuarantinedAlerts(ctx, h)
}

// Recheck returns an error if the database that was accepted is no longer this relay's. It looks
// now and then: what is recorded may change, and a pooler may lead elsewhere. pool is the one that
// the guard watches; hasSession reports whether h is its own session, so that the two may lead
// to different databases.
func (g *Guard) Recheck(ctx context.Context, h, pool pg.DB, hasSession bool) error {
	pooled, isPooled := pool.(*pg.Transactions)
	if !isPooled && time.Since(g.looked) < g.cfg.Interval {
		return nil
	}
	ctx, cancel := context.WithTimeout(Unguarded(ctx), pg.StatementTimeout)
	defer cancel()
	differences, err := g.look(ctx, h)
	if err != nil {
		return err
	}
	if len(differences) > 0 {
		g.Shut()
		return fmt.Errorf("%w: %s", ErrQuarantined, reasonOf(differences))
	}
	if isPooled && hasSession {
		g.mu.Lock()
		relayID := g.relayID
		g.mu.Unlock()
		same, err := sameDatabase(ctx, pooled, relayID)
		if err == nil && !same {
			g.Shut()
			err = errElsewhere
		}
		return err
	}
	return nil
}

// look compares the database with what is recorded in it, records what may be, and returns the
// differences that are left.
func (g *Guard) look(ctx context.Context, h pg.DB) ([]Difference, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	g.looked = time.Now()
	for range 5 { // a round that records something is followed by another, which finds nothing more to record
		f, err := readFacts(ctx, h)
		if err != nil {
			return nil, err
		}
		if f.standby {
			return nil, pg.ErrReadOnly
		}
		found := f.Identity
		found.Environment, found.Addresses = g.cfg.Environment, []string{g.cfg.Address}
		if f.recorded == nil {
			if err := recordFirst(ctx, h, found); err != nil {
				return nil, err
			}
			continue
		}
		differences := found.differences(*f.recorded)
		if onlyAddress(differences) {
			known, err := g.witnessed(ctx, h)
			if err != nil {
				return nil, err
			}
			if known {
				g.cfg.Log.Info().Str("address", g.cfg.Address).Msg("new address of the database, where another relay works")
				differences = nil
			}
		}
		if len(differences) > 0 {
			return differences, nil
		}
		if !found.news(*f.recorded) {
			g.accepted(found)
			return nil, nil
		}
		if found.Timeline != f.recorded.Timeline {
			g.cfg.Log.Warn().Int32("from", f.recorded.Timeline).Int32("to", found.Timeline).
				Msg("the database's timeline changed, as after a failover or a recovery: what was settled shortly before may be sent again")
		}
		if err := recordNews(ctx, h, found); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("record identity of the database: it does not stay recorded")
}

// witnessed reports whether a relay works on this very server: its session is here, or its
// heartbeat moves.
func (g *Guard) witnessed(ctx context.Context, h pg.DB) (bool, error) {
	if known, err := sessionWitnessed(ctx, h); known || err != nil {
		return known, err
	}
	beats, err := heartbeats(ctx, h)
	if err != nil {
		return false, err
	}
	before := g.beats
	g.beats = beats
	for relayID, at := range beats {
		if last, seen := before[relayID]; seen && at.After(last) {
			return true, nil
		}
	}
	return false, nil
}

// quarantine does nothing but show itself and look again, until there is no difference left or ctx
// is done.
func (g *Guard) quarantine(ctx context.Context, h pg.DB, differences []Difference) (err error) {
	g.Shut()
	g.cfg.Disown()
	defer func() {
		leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), outTimeout)
		defer cancel()
		if leaveErr := deregisterQuarantined(leaving, h, g.shown, g.cfg.Name); leaveErr == nil && err == nil {
			g.shown = 0
			err = resolveQuarantinedAlerts(leaving, h)
		}
	}()
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	began, told := time.Now(), time.Now()
	for len(differences) > 0 {
		reason := reasonOf(differences)
		if err := g.show(ctx, h, reason); err != nil {
			return err
		}
		if !onlyAddress(differences) || time.Since(began) >= g.cfg.Grace || g.announced != "" {
			g.announce(ctx, h, reason)
		}
		if time.Since(told) >= g.cfg.AlertEvery { // a channel may have failed; there is no beat to say so
			told = time.Now()
			g.cfg.Alert()
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		if differences, err = g.look(ctx, h); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// show registers this relay among the others as one that does nothing.
func (g *Guard) show(ctx context.Context, h pg.DB, reason string) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	shown, err := registerQuarantined(ctx, h, g.shown,
		QuarantinedRelay{Name: g.cfg.Name, Reason: reason, Environment: g.cfg.Environment, Address: g.cfg.Address}, g.cfg.Version)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the relay is stopping
	}
	g.shown = shown
	return err
}

// announce tells about a quarantine: the hook and an alert once, the log now and then.
func (g *Guard) announce(ctx context.Context, h pg.DB, reason string) {
	cfg := g.cfg
	if reason != g.announced || time.Since(g.repeated) >= announceInterval {
		g.repeated = time.Now()
		cfg.Log.Error().Str("reason", reason).Str("address", cfg.Address).Str("environment", cfg.Environment).Msg("quarantined: " + decide)
	}
	if reason == g.announced {
		return
	}
	g.announced = reason
	if cfg.Quarantined != nil {
		cfg.Quarantined(reason)
	}
	firing, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	err := fireQuarantinedAlert(firing, h, cfg.Environment, reason, fmt.Sprintf("%s, database %s; %s", cfg.Name, cfg.Address, decide))
	if err != nil && ctx.Err() == nil {
		cfg.Failed("alert of a quarantine", err)
	}
	cfg.Alert()
}
