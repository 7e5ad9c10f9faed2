package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	relay *Relay

	started time.Time // when the server of the last session started; zero: there was none

	deafUntil time.Time // no session listens before
	deafTime  time.Duration

	// Every login of the database may notify, as often as it likes.
	looks, sweeps, routes throttle
}

// presence is as what this relay is registered. It is safe for concurrent use.
type presence struct {
	mu       sync.Mutex
	instance int32
	alive    bool
}

func newSession(r *Relay) *session {
	return &session{
		relay: r, deafTime: deafTime, looks: newThrottle(looksPerSecond, looksPerSecond),
		sweeps: newThrottle(sweepsPerSecond, burstOfSweeps), routes: newThrottle(sweepsPerSecond, burstOfSweeps),
	}
}

const (
	beatInterval = time.Second
	// idleBeatInterval is that of a relay with nothing to do, in a database that shall not notice it.
	idleBeatInterval = 1500 * time.Millisecond
	// heartbeatAge is how old a heartbeat may become before it is written again.
	heartbeatAge = 4 * time.Second
	// afterReconnect is how long a relay that lost its connection believes that others did too, and are no more dead
	// than itself.
	afterReconnect = 3 * time.Second
	// leaveTimeout bounds how long a stopping relay waits for its last statements.
	leaveTimeout = 2 * time.Second
)

// current returns the number under which this relay claims, and whether it counts as alive.
func (s *presence) current() (instance int32, alive bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.instance, s.alive
}

func (s *presence) set(instance int32, alive bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instance, s.alive = instance, alive
}

// run keeps the session, reconnecting for ever, until ctx is done; then it deregisters. ctx outlives everything that
// claims and settles.
func (s *session) run(ctx context.Context) {
	failing := newBackoff()
	// A relay that is away longer than afterReconnect is taken for dead by those that came back before.
	failing.MaxInterval = beatInterval / 2
	for ctx.Err() == nil {
		connected, err := s.keep(ctx)
		instance, _ := s.relay.presence.current()
		s.relay.presence.set(instance, false)
		if connected {
			failing.Reset()
		}
		if err == nil {
			return
		}
		if errors.Is(err, errFlooded) {
			s.relay.cfg.Log.Warn().Dur("for", s.deafTime).Msg("too many notifications: not listening for a while, events are found by polling")
			continue // at once: without a session the relay looks dead
		}
		s.relay.databaseError("session", err)
		// What ended the session has mostly ended the other connections too. Each would cost its next statement a failure.
		s.relay.pool.Reset()
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
		s.relay.wake.notify(true)
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
	s.relay.wake.hears.Store(true)
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
			s.relay.wake.hears.Store(false)
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = on.conn.Close(closing)
		}()
	}
	if err := s.relay.guard.Await(ctx, on); err != nil || ctx.Err() != nil {
		return false, err
	}
	var findDeadFrom time.Time
	before, _ := s.relay.presence.current()
	if err := s.enter(ctx, on); err != nil {
		return false, err
	}
	if before != 0 {
		findDeadFrom = time.Now().Add(afterReconnect)
	}
	s.relay.wake.notify(true) // whatever was missed while away

	nextBeat := time.Now()
	for {
		if !time.Now().Before(nextBeat) {
			on.flood = 0
			if err := s.relay.guard.Recheck(ctx, on, s.relay.store.pool, on.conn != nil); err != nil && ctx.Err() == nil {
				return true, err
			}
			if err := s.beat(ctx, on, !time.Now().Before(findDeadFrom)); err != nil && ctx.Err() == nil {
				return true, err
			}
			s.catchUp()
			nextBeat = time.Now().Add(beatInterval)
			if s.relay.wake.idle.Load() {
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
	if asked.commits > 0 && (s.relay.store.armed.Load() || s.looks.allow(time.Now())) { // a relay that polls looks without being asked
		s.relay.wake.commits.Add(int64(asked.commits))
		s.relay.wake.notify(false)
	}
	if asked.sweep && s.sweeps.allow(time.Now()) {
		s.relay.wake.notify(true)
	}
	if asked.routes && s.routes.allow(time.Now()) {
		signal(s.relay.wake.routes)
	}
}

// catchUp does once what refused notifications have asked for.
func (s *session) catchUp() {
	if s.sweeps.takeRefused() {
		s.relay.wake.notify(true)
	}
	if s.routes.takeRefused() {
		signal(s.relay.wake.routes)
	}
}

func (s *session) connect(ctx context.Context) (*standing, error) {
	if pooled, ok := s.relay.store.pool.(*pg.Transactions); ok && s.relay.store.deaf {
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
	if own := s.relay.cfg.Pooler.Session; own != nil {
		own = own.Copy()
		pg.SetDirect(own, s.relay.cfg.Schema)
		return own
	}
	return s.relay.pool.Config()
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
	s.relay.guard.Admit(instance)
	if before := s.started; !before.IsZero() && !before.Equal(started) {
		s.relay.pool.Reset() // a connection made meanwhile may have reached the server while it was stopping
	}
	s.started = started
	if err := s.relay.settler.resettle(ctx, on, instance); err != nil {
		return err
	}
	if err := s.relay.meetRoutes(ctx, func() { s.relay.presence.set(instance, true) }); err != nil {
		return err
	}
	s.relay.cfg.Log.Info().Int32("instance", instance).Bool("resumed", resumed).Bool("session", on.conn != nil).Msg("registered")
	return nil
}

// register makes this relay known, under the number it had if no other took it for dead meanwhile.
func (s *session) register(ctx context.Context, on *standing) (instance int32, resumed bool, err error) {
	cfg, isSession := &s.relay.cfg, on.conn != nil
	if instance, _ = s.relay.presence.current(); instance != 0 {
		resumed, err = resume(ctx, on, isSession, instance)
		if err != nil || resumed {
			return instance, resumed, err
		}
	}
	instance, err = register(ctx, on, isSession, cfg.Name, cfg.Version, cfg.Lease)
	if err != nil {
		return 0, false, err
	}
	s.relay.presence.set(instance, false) // to be resumed if the rest fails, or every failure would leave a row behind
	return instance, false, nil
}

// sameDatabase keeps a session with a URL of its own from saying that a relay lives where it does not work.
func (s *session) sameDatabase(ctx context.Context, on *standing) error {
	if s.relay.cfg.Pooler.Session == nil {
		return nil
	}
	here, err := whereabouts(ctx, on.conn)
	if err != nil {
		return err
	}
	there, err := whereabouts(identity.Unguarded(ctx), s.relay.store.pool)
	if err != nil {
		return err
	}
	if here != there {
		return pg.ErrTwoDatabases // as it may be for a moment in a failover
	}
	return nil
}

var errTakenForDead = errors.New("this relay was taken for dead; registering anew")

// beat says that this relay lives, passes on what there is to do, and gives back what dead relays had claimed.
func (s *session) beat(stopping context.Context, on *standing, findDead bool) error {
	limit := pg.StatementTimeout
	if on.conn == nil {
		limit = min(limit, s.relay.cfg.Lease/2) // a relay whose heartbeat hangs is dead to others, and stops claiming
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stopping), limit)
	defer cancel()
	// A beat that is cut off costs the connection, on which this relay has yet to deregister.
	defer context.AfterFunc(stopping, func() { time.AfterFunc(leaveTimeout, cancel) })()
	p := pulse{writeAfter: heartbeatAge, findDead: findDead, armed: s.relay.store.armed.Load()}
	p.instance, _ = s.relay.presence.current()
	if on.conn == nil {
		p.writeAfter = min(p.writeAfter, s.relay.cfg.Lease/5)
	}
	asked := time.Now()
	e, err := heartbeat(ctx, on, p)
	if err != nil {
		return err
	}
	if !e.registered {
		return errTakenForDead
	}
	s.relay.settler.recent.forgetDurable(asked)
	s.relay.applyStates(asked, e.states)
	if e.alerts {
		signal(s.relay.wake.alerts)
	}
	if e.parked {
		signal(s.relay.wake.parked)
	}
	for _, other := range e.dead {
		s.rescue(ctx, other)
	}
	return nil
}

// rescue takes over from a dead relay. If that fails, the next beat tries again: a session that ended of it would make
// this relay look dead too.
func (s *session) rescue(ctx context.Context, other int32) {
	dead, lasting, err := s.relay.store.rescue(ctx, other)
	if err != nil {
		s.relay.databaseError("rescue", err)
	}
	if !dead {
		return
	}
	s.relay.cfg.Log.Warn().Int32("dead_instance", other).Msg("rescued the claims of a dead relay")
	if hook := s.relay.cfg.Hooks.Rescued; hook != nil {
		hook(other)
	}
	s.relay.wake.notify(true)
	signal(s.relay.wake.routes)
	if err := s.relay.store.endSession(ctx, other, lasting); err != nil && !pg.HasCode(err, pg.LacksPrivilege) {
		s.relay.databaseError("end session", err)
	}
}

// leave deregisters this relay: everything it had claimed is settled or given back.
func (s *session) leave(ctx context.Context, on *standing) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	instance, _ := s.relay.presence.current()
	return deregister(ctx, on, instance)
}
