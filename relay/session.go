package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/relay/identity"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// session is this relay's standing in the database: one connection that shows by its presence that the relay lives,
// sends its heartbeat, finds dead relays, and receives notifications. Only its own goroutine uses the connection. Through
// a pooler there is no such connection: the heartbeat alone says that the relay lives, and nothing is received.
type session struct {
	*core
	cfg     *Config // what a reload cannot change
	guard   *identity.Guard
	settler *settler
	// meetRoutes applies the routes before it calls alive.
	meetRoutes func(ctx context.Context, alive func()) error

	started time.Time // when the server of the last session started; zero: there was none

	grace    grace
	watchFor time.Duration // how long this relay watches before it believes that another one is silent

	deafUntil time.Time // no session listens before
	deafTime  time.Duration

	// Every login of the database may notify, as often as it likes.
	looks, sweeps, routes throttle
}

const (
	beatInterval = time.Second
	// idleBeatInterval is that of a relay with nothing to do, in a database that shall not notice it.
	idleBeatInterval = 1500 * time.Millisecond
	// heartbeatAge is how old a heartbeat may become before it is written again.
	heartbeatAge = 4 * time.Second
	// afterReconnect is how long a relay that was kept from the database believes that others were too, and are no more dead
	// than itself.
	afterReconnect = 3 * time.Second
	// watchFor is how long a relay must have sent its own heartbeat in time before it believes that another one is silent.
	watchFor = 15 * time.Second
	// leaveTimeout bounds how long a stopping relay waits for its last statements.
	leaveTimeout = 2 * time.Second
)

// A grace is until when other relays may look dead although they live: what kept this relay from the database, or set its
// clock, has mostly met them too, and they have yet to send a heartbeat.
type grace struct{ silent, disconnected time.Time }

// extendGrace gives the other relays time after this one was kept from the database.
func (s *session) extendGrace(now time.Time) {
	s.grace = grace{silent: now.Add(s.watchFor), disconnected: now.Add(afterReconnect)}
}

// run keeps the session, reconnecting for ever, until ctx is done; then it deregisters. ctx outlives everything that
// claims and settles.
func (s *session) run(ctx context.Context) {
	failing := newBackoff()
	// A relay that is away longer than afterReconnect is taken for dead by those that came back before.
	failing.MaxInterval = beatInterval / 2
	for ctx.Err() == nil {
		connected, err := s.keep(ctx)
		instance, _ := s.current()
		s.set(instance, false)
		if connected {
			failing.Reset()
		}
		if err == nil {
			return
		}
		if errors.Is(err, errFlooded) {
			s.cfg.Log.Warn().Dur("for", s.deafTime).Msg("too many notifications: not listening for a while, events are found by polling")
			continue // at once: without a session the relay looks dead
		}
		s.databaseError("session", err)
		// What ended the session has mostly ended the other connections too. Each would cost its next statement a failure.
		s.store.direct.Reset()
		select {
		case <-time.After(failing.NextBackOff()):
		case <-ctx.Done():
		}
	}
}

// A standing is what a session stands on, until it breaks.
type standing struct {
	pg.Pool
	conn   *pgx.Conn // nil: through a pooler, which keeps no session
	schema string
	heard  requests

	listening bool
	flood     int // bytes of notifications since the last beat
}

// requests are what the notifications since the last look ask for.
type requests struct {
	commits       int
	sweep, routes bool
}

// hear remembers what a notification asks for, and nothing else of it. pgx would keep those that arrive during a statement:
// every login may send a million of them at once, of 8 kB each.
func (on *standing) hear(_ *pgconn.PgConn, n *pgconn.Notification) {
	on.flood += notificationBytes + len(n.Payload)
	switch n.Payload {
	case on.schema:
		on.heard.commits++
	case "sweep " + on.schema: // another relay has given back what lies behind the positions
		on.heard.sweep = true
	case "routes " + on.schema:
		on.heard.routes = true
	}
}

// The server answers no statement of a session while it has notifications to send to it: a flood would keep the heartbeat, and
// an UNLISTEN too, until others take the relay for dead. Producers and relays send far less than maxFlood between two beats.
const (
	maxFlood          = 1 << 20 // bytes
	notificationBytes = 32      // without the payload
	deafTime          = 10 * time.Minute
)

var errFlooded = errors.New("too many notifications")

// dam ends a session that is sent too many notifications, so that the next one does not listen, and listens again later.
func (s *session) dam(ctx context.Context, on *standing, now time.Time) error {
	switch {
	case on.listening && on.flood > maxFlood:
		s.deafUntil = now.Add(s.deafTime)
		return errFlooded
	case on.conn != nil && !on.listening && now.After(s.deafUntil):
		if err := s.startListening(ctx, on); err != nil {
			return err
		}
		s.wake.notify(true)
	}
	return nil
}

func (s *session) startListening(ctx context.Context, on *standing) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := on.conn.Exec(ctx, listen); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	on.listening = true
	s.wake.hears.Store(true)
	return nil
}

// keep holds one connection until it breaks or ctx is done.
func (s *session) keep(ctx context.Context) (connected bool, err error) {
	on, err := s.connect(ctx)
	if err != nil {
		return false, err
	}
	if on.conn != nil {
		defer func() {
			s.wake.hears.Store(false)
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = on.conn.Close(closing)
		}()
	}
	if err := s.guard.Await(ctx, on); err != nil || ctx.Err() != nil {
		return false, err
	}
	before, _ := s.current()
	if err := s.enter(ctx, on); err != nil {
		return false, err
	}
	s.extendGrace(time.Now())
	if before == 0 {
		s.grace.disconnected = time.Time{} // a relay that was not here before lost no connection together with others
	}
	s.wake.notify(true) // whatever was missed while away

	nextBeat := time.Now()
	for {
		if !time.Now().Before(nextBeat) {
			on.flood = 0
			if err := s.guard.Recheck(ctx, on, s.store.pool, on.conn != nil); err != nil && ctx.Err() == nil {
				return true, err
			}
			if err := s.beat(ctx, on, time.Now()); err != nil && ctx.Err() == nil {
				return true, err
			}
			s.catchUp()
			nextBeat = time.Now().Add(beatInterval)
			if s.wake.idle.Load() {
				nextBeat = time.Now().Add(idleBeatInterval)
			}
		}
		if ctx.Err() != nil {
			return true, s.leave(ctx, on)
		}
		if err := s.listen(ctx, on, nextBeat); err != nil {
			return true, err
		}
		if err := s.dam(ctx, on, time.Now()); err != nil {
			return true, err
		}
	}
}

// listen waits for a notification, until the next beat is due or ctx is done.
func (s *session) listen(ctx context.Context, on *standing, nextBeat time.Time) error {
	waiting, cancel := context.WithDeadline(ctx, nextBeat)
	defer cancel()
	if on.conn == nil {
		<-waiting.Done()
		return nil
	}
	var err error
	if on.heard == (requests{}) { // or a statement has received some
		err = on.conn.PgConn().WaitForNotification(waiting)
	}
	s.answer(on.heard)
	on.heard = requests{}
	if err != nil && (ctx.Err() == nil && !pgconn.Timeout(err) || on.conn.IsClosed()) {
		return fmt.Errorf("wait for notification: %w", err)
	}
	return nil
}

// answer does what notifications ask for, as often as the throttles allow.
func (s *session) answer(asked requests) {
	if asked.commits > 0 && (s.store.armed.Load() || s.looks.allow(time.Now())) { // a relay that polls looks without being asked
		s.wake.commits.Add(int64(asked.commits))
		s.wake.notify(false)
	}
	if asked.sweep && s.sweeps.allow(time.Now()) {
		s.wake.notify(true)
	}
	if asked.routes && s.routes.allow(time.Now()) {
		signal(s.wake.routes)
	}
}

// catchUp does once what refused notifications have asked for.
func (s *session) catchUp() {
	if s.sweeps.takeRefused() {
		s.wake.notify(true)
	}
	if s.routes.takeRefused() {
		signal(s.wake.routes)
	}
}

func (s *session) connect(ctx context.Context) (*standing, error) {
	if pooled, ok := s.store.pool.(*pg.Transactions); ok && s.store.deaf {
		return &standing{Pool: pooled.With("lock_timeout", "0")}, nil // a rescue waits for what a dead relay left running
	}
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	pool := s.sessionConfig()
	pool.ConnConfig.RuntimeParams["lock_timeout"] = "0"
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, pool.ConnConfig); err != nil {
			return nil, fmt.Errorf("before connect: %w", err)
		}
	}
	on := &standing{}
	pool.ConnConfig.OnNotification = on.hear
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
	on.Pool, on.conn = conn, conn
	return on, nil
}

// sessionConfig returns a copy of how to reach the server itself.
func (s *session) sessionConfig() *pgxpool.Config {
	if own := s.cfg.Pooler.Session; own != nil {
		own = own.Copy()
		pg.SetDirect(own, s.cfg.Schema)
		return own
	}
	return s.store.direct.Config()
}

// enter starts to listen, registers this relay, and applies the routes, the first time.
func (s *session) enter(ctx context.Context, on *standing) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	var started time.Time
	if err := on.QueryRow(ctx, selectServer).Scan(&on.schema, &started); err != nil {
		return fmt.Errorf("read current schema: %w", err)
	}
	if on.conn != nil {
		if time.Now().After(s.deafUntil) {
			if err := s.startListening(ctx, on); err != nil {
				return err
			}
		}
		if err := s.sameDatabase(ctx, on); err != nil {
			return err
		}
	}
	instance, resumed, err := s.register(ctx, on)
	if err != nil {
		return err
	}
	s.guard.Admit(instance)
	if before := s.started; !before.IsZero() && !before.Equal(started) {
		s.store.direct.Reset() // a connection made meanwhile may have reached the server while it was stopping
	}
	s.started = started
	if err := s.settler.resettle(ctx, on, instance); err != nil {
		return err
	}
	if err := s.meetRoutes(ctx, func() {
		s.markBeat() // the database has just taken the registration
		s.set(instance, true)
	}); err != nil {
		return err
	}
	s.cfg.Log.Info().Int32("instance", instance).Bool("resumed", resumed).Bool("session", on.conn != nil).Msg("registered")
	return nil
}

// register makes this relay known, under the number it had if no other took it for dead meanwhile.
func (s *session) register(ctx context.Context, on *standing) (instance int32, resumed bool, err error) {
	cfg, isSession := s.cfg, on.conn != nil
	if instance, _ = s.current(); instance != 0 {
		resumed, err = resume(ctx, on, isSession, instance)
		if err != nil || resumed {
			return instance, resumed, err
		}
	}
	instance, err = register(ctx, on, isSession, cfg.Name, cfg.Version, cfg.Lease)
	if err != nil {
		return 0, false, err
	}
	s.set(instance, false) // to be resumed if the rest fails, or every failure would leave a row behind
	return instance, false, nil
}

// sameDatabase keeps a session with a URL of its own from saying that a relay lives where it does not work.
func (s *session) sameDatabase(ctx context.Context, on *standing) error {
	if s.cfg.Pooler.Session == nil {
		return nil
	}
	here, err := whereabouts(ctx, on.conn)
	if err != nil {
		return err
	}
	there, err := whereabouts(identity.Unguarded(ctx), s.store.pool)
	if err != nil {
		return err
	}
	if here != there {
		return pg.ErrTwoDatabases // as it may be for a moment in a failover
	}
	return nil
}

// beat says that this relay lives, passes on what there is to do, and gives back what dead relays had claimed.
func (s *session) beat(stopping context.Context, on *standing, now time.Time) error {
	limit := pg.StatementTimeout
	if on.conn == nil {
		limit = min(limit, s.cfg.Lease/2) // a relay whose heartbeat hangs is dead to others, and stops claiming
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stopping), limit)
	defer cancel()
	// A beat that is cut off costs the connection, on which this relay has yet to deregister.
	defer context.AfterFunc(stopping, func() { time.AfterFunc(leaveTimeout, cancel) })()
	p := pulse{
		writeAfter: heartbeatAge, armed: s.store.armed.Load(),
		findSilent: !now.Before(s.grace.silent), findDisconnected: !now.Before(s.grace.disconnected),
	}
	p.instance, _ = s.current()
	if on.conn == nil {
		p.writeAfter = min(p.writeAfter, s.cfg.Lease/5)
	}
	e, err := heartbeat(ctx, on, p)
	if err != nil {
		return err
	}
	if !e.registered {
		return pg.ErrTakenForDead
	}
	s.markBeat()
	s.settler.recent.forgetDurable(now)
	if s.lanes.applyStates(now, time.Now(), e.states, p.instance) {
		s.wake.notify(true)
	}
	if e.unheard {
		s.wake.notify(false)
	}
	if e.alerts {
		signal(s.wake.alerts)
	}
	if e.parked {
		signal(s.wake.parked)
	}
	if e.late {
		s.extendGrace(time.Now())
		return nil
	}
	for _, other := range e.dead {
		s.rescue(ctx, other)
	}
	return nil
}

// rescue takes over from a dead relay. If that fails, the next beat tries again: a session that ended of it would make
// this relay look dead too.
func (s *session) rescue(ctx context.Context, other int32) {
	dead, lasting, err := s.store.rescue(ctx, other)
	if err != nil {
		s.databaseError("rescue", err)
	}
	if !dead {
		return
	}
	s.cfg.Log.Warn().Int32("dead_instance", other).Msg("rescued the claims of a dead relay")
	if hook := s.cfg.Hooks.Rescued; hook != nil {
		hook(other)
	}
	s.wake.notify(true)
	signal(s.wake.routes)
	if err := s.store.endSession(ctx, other, lasting); err != nil && !pg.HasCode(err, pg.LacksPrivilege) {
		s.databaseError("end session", err)
	}
}

// leave deregisters this relay: everything it had claimed is settled or given back.
func (s *session) leave(ctx context.Context, on *standing) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	instance, _ := s.current()
	return deregister(ctx, on, instance)
}
