package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A Session is a relay's standing in its database: one connection that shows by its presence that
// the relay lives, sends its heartbeat, finds dead relays, and receives notifications. Through a
// pooler there is no such connection: the heartbeat alone says that the relay lives, and nothing is
// received. Set all exported fields, [Session.Open] it and then [Session.Run] it; what it calls
// runs on the goroutine of Run, and must return at once, except Restore and Enter.
type Session struct {
	Config    Config
	Guard     *identity.Guard
	Presence  *Presence  // is kept up to date
	Producers *Producers // each beat keeps those notifying that were armed
	Database  Database   // is set by Open and Check

	// Restore is called for each registration, with the session's connection, while Database lets
	// no statement through: what a crash has undone is written again before anything else is. An
	// error of it, or of Enter, ends the session, which then tries again.
	Restore func(ctx context.Context, on pg.Pool, relayID int32) error
	// Enter is called then, before the registration counts as alive, and calls alive as its last
	// step. resumed says that the relay has the number with which it entered before.
	Enter func(ctx context.Context, resumed bool, alive func()) error
	// Beaten follows every beat that the database has taken, which began at the given time, with
	// what it found.
	Beaten func(began time.Time, relayID int32, found News)
	// Wake says what to look for, as notifications and rescues ask.
	Wake func(Requests)
	// Listening says whether the session listens for notifications from now on.
	Listening func(bool)
	// Waits returns the destinations that have asked the relay to wait; nil: none has.
	Waits func() []string
	// Idle reports whether the relay has nothing to do: then the session beats a little less often.
	Idle func() bool
	// SleepAfter is how long there must have been nothing to do for FallAsleep to be called. 0: it
	// never is.
	SleepAfter time.Duration
	// FallAsleep asks the relay to end, and to remain registered. schema is where its tables are.
	FallAsleep func(relayID int32, schema string)
	// Rescued follows the end of a dead relay's claims.
	Rescued func(relayID int32)
	// Failed follows a failed statement, which will be repeated.
	Failed func(operation string, err error)

	// WatchFor is how long this relay must have sent its own heartbeat in time before it believes
	// that another one is silent. 0: 15 s.
	WatchFor time.Duration
	// DeafFor is how long no session listens after one was sent too many notifications. 0: 10 min.
	DeafFor time.Duration

	names     *pg.Names // of what statements of Database mean
	started   time.Time // when the server of the last session started; zero: there was none
	grace     grace
	deafUntil time.Time // no session listens before
	entered   int32     // the number with which the relay entered last; 0: it has not
	busyAt    time.Time // when there was something to do

	// Every login of the database may notify, as often as it likes.
	looks, sweeps, routes throttle
}

// Requests are what notifications ask a relay to look for.
type Requests struct {
	// Commits is how many producers have announced one.
	Commits int
	// Sweep asks for what lies behind the positions of claims.
	Sweep bool
	// Routes asks for the stored routes, which others may have changed.
	Routes bool
}

const (
	beatInterval = time.Second
	// idleBeatInterval is that of a relay with nothing to do, in a database that shall not notice
	// it.
	idleBeatInterval = 1500 * time.Millisecond
	// calmBeatInterval is that of an idle relay that is alone, and whose last beat found nothing.
	// It is shorter than producers notify after a beat, and than others take a heartbeat for that
	// of a living relay; both last ten seconds.
	calmBeatInterval = 4500 * time.Millisecond
	// heartbeatAge is how old a heartbeat may become before it is written again.
	heartbeatAge   = 4 * time.Second
	defaultDeafFor = 10 * time.Minute
	// leaveTimeout bounds how long a stopping relay waits for its last statements, and leaveSilent
	// where the database has not answered before.
	leaveTimeout = 2 * time.Second
	leaveSilent  = 250 * time.Millisecond
)

// ErrSilent as the cause for which Run is to end says that the database does not answer.
var ErrSilent = errors.New("the database does not answer")

// ErrAsleep as that cause says that the relay falls asleep: it stays registered.
var ErrAsleep = errors.New("the relay falls asleep")

// leaveWithin returns how long a relay waits that stops as the context says.
func leaveWithin(stopping context.Context) time.Duration {
	if errors.Is(context.Cause(stopping), ErrSilent) {
		return leaveSilent
	}
	return leaveTimeout
}

func (s *Session) deafFor() time.Duration { return cmp.Or(s.DeafFor, defaultDeafFor) }

// Run keeps the session, reconnecting for ever, until ctx is done; then it deregisters. ctx
// outlives everything that claims and settles.
func (s *Session) Run(ctx context.Context) {
	s.throttle()
	// A relay that is away longer than afterReconnect is taken for dead by those that came back
	// before.
	failing := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond), backoff.WithMaxInterval(beatInterval/2), backoff.WithMaxElapsedTime(0))
	for ctx.Err() == nil {
		connected, err := s.keep(ctx)
		relayID, _ := s.Presence.Current()
		s.Presence.Set(relayID, false)
		if connected {
			failing.Reset()
		}
		if err == nil {
			return
		}
		if s.Config.Pooler.Mode == PoolerTransaction { // without one, each new connection is compared with the session
			s.Guard.Shut()
		}
		if errors.Is(err, errFlooded) {
			s.Config.Log.Warn().Dur("for", s.deafFor()).Msg("too many notifications: not listening for a while, events are found by polling")
			continue // at once: without a session the relay looks dead
		}
		s.Failed("session", err)
		// What ended the session has mostly ended the other connections too. Each would cost its
		// next statement a failure.
		s.Database.Direct.Reset()
		_ = sleep.For(ctx, failing.NextBackOff())
	}
}

func (s *Session) throttle() {
	s.looks = newThrottle(looksPerSecond, looksPerSecond)
	s.sweeps, s.routes = newThrottle(sweepsPerSecond, burstOfSweeps), newThrottle(sweepsPerSecond, burstOfSweeps)
}

// A standing is what a session stands on, until it breaks.
type standing struct {
	pg.Pool
	conn   *pgx.Conn // nil: through a pooler, which keeps no session
	schema string
	heard  Requests
	beaten time.Time // when the last beat ended
	calm   bool      // nothing has been found or heard since the beat before
	asked  bool      // a notification has asked for something

	listening bool
	flood     int // bytes of notifications since the last beat
}

// hear remembers what a notification asks for, and nothing else of it. pgx would keep those that
// arrive during a statement: every login may send a million of them at once, of 8 kB each.
func (on *standing) hear(_ *pgconn.PgConn, n *pgconn.Notification) {
	on.flood += notificationBytes + len(n.Payload)
	on.calm = false // also if another relay is registered
	switch n.Payload {
	case on.schema:
		on.heard.Commits++
	case "sweep " + on.schema: // another relay has given back what lies behind the positions
		on.heard.Sweep = true
	case "routes " + on.schema:
		on.heard.Routes = true
	default:
		return
	}
	on.asked = true
}

// The server answers no statement of a session while it has notifications to send to it: a flood
// would keep the heartbeat, and an UNLISTEN too, until others take the relay for dead. Producers
// and relays send far less than maxFlood between two beats.
const (
	maxFlood          = 1 << 20 // bytes
	notificationBytes = 32      // without the payload
)

var errFlooded = errors.New("too many notifications")

// dam ends a session that is sent too many notifications, so that the next one does not listen, and
// listens again later.
func (s *Session) dam(ctx context.Context, on *standing, now time.Time) error {
	switch {
	case on.listening && on.flood > maxFlood:
		s.deafUntil = now.Add(s.deafFor())
		return errFlooded
	case on.conn != nil && !on.listening && now.After(s.deafUntil):
		if err := s.startListening(ctx, on); err != nil {
			return err
		}
		s.Wake(Requests{Sweep: true})
	}
	return nil
}

func (s *Session) startListening(ctx context.Context, on *standing) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if _, err := on.conn.Exec(ctx, listen); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	on.listening = true
	s.Listening(true)
	return nil
}

// keep holds one connection until it breaks or ctx is done.
func (s *Session) keep(ctx context.Context) (connected bool, err error) {
	on, err := s.connect(ctx)
	if err != nil {
		return false, err
	}
	if on.conn != nil {
		defer func() {
			s.Listening(false)
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(time.Second, leaveWithin(ctx)))
			defer cancel()
			_ = on.conn.Close(closing)
		}()
	}
	if err := s.Guard.Await(ctx, on); err != nil || ctx.Err() != nil {
		return false, err
	}
	before, _ := s.Presence.Current()
	if err := s.enter(ctx, on); err != nil {
		return false, err
	}
	s.busyAt = time.Now()
	s.startGrace(s.busyAt, before != 0)
	s.Wake(Requests{Sweep: true}) // whatever was missed while away

	for {
		if !time.Now().Before(s.nextBeat(on)) {
			on.flood = 0
			if err := s.Guard.Recheck(ctx, on, s.Database.Pool, on.conn != nil); err != nil && ctx.Err() == nil {
				return true, err
			}
			if err := s.beat(ctx, on, time.Now()); err != nil && ctx.Err() == nil {
				return true, err
			}
			s.catchUp()
			on.beaten = time.Now()
			if err := s.maySleep(ctx, on, on.beaten); err != nil && ctx.Err() == nil {
				return true, err
			}
		}
		if ctx.Err() != nil {
			return true, s.leave(ctx, on)
		}
		if err := s.listen(ctx, on, s.nextBeat(on)); err != nil {
			return true, err
		}
		if err := s.dam(ctx, on, time.Now()); err != nil {
			return true, err
		}
	}
}

// nextBeat returns when the next beat is due.
func (s *Session) nextBeat(on *standing) time.Time {
	switch idle := s.Idle(); {
	case on.beaten.IsZero():
		return time.Time{}
	case idle && on.calm && on.conn != nil && (s.SleepAfter == 0 || s.SleepAfter > calmBeatInterval):
		return on.beaten.Add(calmBeatInterval)
	case idle:
		return on.beaten.Add(idleBeatInterval)
	}
	return on.beaten.Add(beatInterval)
}

// listen waits for a notification, until the next beat is due or ctx is done.
func (s *Session) listen(ctx context.Context, on *standing, nextBeat time.Time) error {
	waiting, cancel := context.WithDeadline(ctx, nextBeat)
	defer cancel()
	if on.conn == nil {
		<-waiting.Done()
		return nil
	}
	var err error
	if on.heard == (Requests{}) { // or a statement has received some
		err = on.conn.PgConn().WaitForNotification(waiting)
	}
	s.answer(on.heard)
	on.heard = Requests{}
	if err != nil && (ctx.Err() == nil && !pgconn.Timeout(err) || on.conn.IsClosed()) {
		return fmt.Errorf("wait for notification: %w", err)
	}
	return nil
}

// answer does what notifications ask for, as often as the throttles allow.
func (s *Session) answer(asked Requests) {
	if asked.Commits > 0 && !s.Producers.Armed() && !s.looks.allow(time.Now()) { // a relay that polls looks without being asked
		asked.Commits = 0
	}
	asked.Sweep = asked.Sweep && s.sweeps.allow(time.Now())
	asked.Routes = asked.Routes && s.routes.allow(time.Now())
	s.Wake(asked)
}

// catchUp does once what refused notifications have asked for.
func (s *Session) catchUp() {
	s.Wake(Requests{Sweep: s.sweeps.takeRefused(), Routes: s.routes.takeRefused()})
}

// enter starts to listen, registers this relay, and lets it enter.
func (s *Session) enter(ctx context.Context, on *standing) error {
	ctx, cancel := context.WithTimeout(identity.Entering(ctx), pg.StatementTimeout)
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
	relayID, resumed, err := s.register(ctx, on)
	if err != nil {
		return err
	}
	if err := s.Restore(ctx, on, relayID); err != nil {
		return err
	}
	s.Guard.Admit(relayID)
	if before := s.started; !before.IsZero() && !before.Equal(started) {
		s.Database.Direct.Reset() // a connection made meanwhile may have reached the server while it was stopping
	}
	s.started = started
	if err := s.Enter(ctx, resumed && relayID == s.entered, func() { s.Presence.Set(relayID, true) }); err != nil {
		return err
	}
	s.entered = relayID
	s.Config.Log.Info().Int32("relay_id", relayID).Bool("resumed", resumed).Bool("session", on.conn != nil).Msg("registered")
	return nil
}

// register makes this relay known, under the number it had if no other took it for dead meanwhile.
func (s *Session) register(ctx context.Context, on *standing) (relayID int32, resumed bool, err error) {
	cfg, isSession := &s.Config, on.conn != nil
	if relayID, _ = s.Presence.Current(); relayID != 0 {
		resumed, err = resume(ctx, on, isSession, relayID, cfg.Lease)
		if err != nil || resumed {
			return relayID, resumed, err
		}
	}
	relayID, err = Register(ctx, on, isSession, cfg.Name, cfg.Version, cfg.Lease)
	if err != nil {
		return 0, false, err
	}
	s.Presence.Set(relayID, false) // to be resumed if the rest fails, or every failure would leave a row behind
	return relayID, false, nil
}

// sameDatabase keeps a session with its own URL from saying that a relay lives where it does
// not work.
func (s *Session) sameDatabase(ctx context.Context, on *standing) error {
	if s.Config.Pooler.Session == nil {
		return nil
	}
	here, err := whereabouts(ctx, on)
	if err != nil {
		return err
	}
	there, err := whereabouts(identity.Unguarded(ctx), s.Database.Pool)
	if err != nil {
		return err
	}
	if here != there {
		return pg.ErrTwoDatabases // as it may be for a moment in a failover
	}
	return nil
}

// beat says that this relay lives, passes on what there is to do, and gives back what dead relays
// had claimed.
func (s *Session) beat(stopping context.Context, on *standing, now time.Time) error {
	limit := pg.StatementTimeout
	if on.conn == nil {
		limit = min(limit, s.Config.Lease/2) // a relay whose heartbeat hangs is dead to others, and stops claiming
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stopping), limit)
	defer cancel()
	// A beat that is cut off costs the connection, on which this relay has yet to deregister.
	defer context.AfterFunc(stopping, func() { time.AfterFunc(leaveWithin(stopping), cancel) })()
	p := pulse{
		writeAfter: heartbeatAge, armed: s.Producers.Armed(), waits: s.Waits(),
	}
	p.relayID, _ = s.Presence.Current()
	p.findSilent, p.findDisconnected = s.grace.isOver(now)
	on.calm = true // unless a notification comes with the answer
	if on.conn == nil {
		p.writeAfter = min(p.writeAfter, s.Config.Lease/5)
	}
	e, err := heartbeat(ctx, on, p)
	if err != nil {
		return err
	}
	if !e.registered {
		return pg.ErrTakenForDead
	}
	on.calm = on.calm && e.calm
	s.Beaten(now, p.relayID, e.News)
	s.rescueDead(ctx, e)
	return nil
}

// leave deregisters this relay, unless it falls asleep: everything it had claimed is settled or
// given back.
func (s *Session) leave(ctx context.Context, on *standing) error {
	asleep := errors.Is(context.Cause(ctx), ErrAsleep)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin(ctx))
	defer cancel()
	relayID, _ := s.Presence.Current()
	if asleep {
		return fallAsleep(ctx, on, relayID)
	}
	return Deregister(ctx, on, relayID)
}
