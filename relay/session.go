package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// session is this relay's standing in the database: one connection that holds the lock which says that the relay lives,
// sends its heartbeat, finds dead relays, and receives notifications. Only its own goroutine uses the connection.
type session struct {
	relay  *Relay
	routed bool // the routes have been applied

	mu       sync.Mutex
	instance int32
	alive    bool
}

const (
	beatInterval = time.Second
	// afterReconnect is how long a relay that lost its connection believes that others did too, and are no more dead
	// than itself.
	afterReconnect = 3 * time.Second
	// leaveTimeout bounds how long a stopping relay waits for its last statements.
	leaveTimeout = 2 * time.Second
)

// current returns the number under which this relay claims, and whether its lock is held.
func (s *session) current() (instance int32, alive bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.instance, s.alive
}

func (s *session) set(instance int32, alive bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instance, s.alive = instance, alive
}

// run keeps the session, reconnecting for ever, until ctx is done; then it deregisters. ctx outlives everything that
// claims and settles.
func (s *session) run(ctx context.Context) {
	failing := newBackoff()
	// Whoever is away longer than afterReconnect is taken for dead by those who came back before.
	failing.MaxInterval = beatInterval
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
		s.relay.databaseError("session", err)
		select {
		case <-time.After(failing.NextBackOff()):
		case <-ctx.Done():
		}
	}
}

// keep holds one connection until it breaks or ctx is done.
func (s *session) keep(ctx context.Context) (connected bool, err error) {
	conn, err := s.connect(ctx)
	if err != nil {
		return false, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	var findDeadFrom time.Time
	before, _ := s.current()
	schema, err := s.enter(ctx, conn)
	if err != nil {
		return false, err
	}
	if before != 0 {
		findDeadFrom = time.Now().Add(afterReconnect)
	}
	s.relay.wake.notify(true) // whatever was missed while away

	nextBeat := time.Now()
	for {
		if !time.Now().Before(nextBeat) {
			if err := s.beat(ctx, conn, !time.Now().Before(findDeadFrom)); err != nil && ctx.Err() == nil {
				return true, err
			}
			nextBeat = time.Now().Add(beatInterval)
		}
		if ctx.Err() != nil {
			return true, s.leave(ctx, conn)
		}
		waiting, cancel := context.WithDeadline(ctx, nextBeat)
		notification, err := conn.WaitForNotification(waiting)
		cancel()
		switch {
		case err == nil:
			switch notification.Payload {
			case schema:
				s.relay.wake.notify(false)
			case "sweep " + schema: // another relay has given back what lies behind the positions
				s.relay.wake.notify(true)
			}
		case ctx.Err() == nil && !pgconn.Timeout(err):
			return true, fmt.Errorf("wait for notification: %w", err)
		case conn.IsClosed():
			return true, fmt.Errorf("wait for notification: %w", err)
		}
	}
}

func (s *session) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	pool := s.relay.pool.Config()                       // a copy
	pool.ConnConfig.RuntimeParams["lock_timeout"] = "0" // a rescue waits for what a dead relay left running
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, pool.ConnConfig); err != nil {
			return nil, fmt.Errorf("before connect: %w", err)
		}
	}
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
	return conn, nil
}

// enter starts to listen, takes this relay's lock (again the one it had, if nobody took it for dead meanwhile), and
// applies the routes, the first time.
func (s *session) enter(ctx context.Context, conn *pgx.Conn) (schema string, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if err := conn.QueryRow(ctx, currentSchema).Scan(&schema); err != nil {
		return "", fmt.Errorf("read current schema: %w", err)
	}
	if _, err := conn.Exec(ctx, listen); err != nil {
		return "", fmt.Errorf("listen: %w", err)
	}
	instance, _ := s.current()
	resumed := false
	if instance != 0 {
		if resumed, err = resume(ctx, conn, instance); err != nil {
			return "", err
		}
	}
	if !resumed {
		if instance, err = register(ctx, conn, s.relay.cfg.Name, s.relay.cfg.Version); err != nil {
			return "", err
		}
		s.set(instance, false) // to be resumed if the rest fails, or every failure would leave a row behind
	}
	routes := s.relay.applyRoutes
	if s.routed {
		routes = s.relay.compareRoutes
	}
	if err := routes(ctx); err != nil {
		return "", err
	}
	s.routed = true
	s.set(instance, true)
	s.relay.cfg.Log.Info().Int32("instance", instance).Bool("resumed", resumed).Msg("registered")
	return schema, nil
}

var errTakenForDead = errors.New("this relay was taken for dead; registering anew")

// beat says that this relay lives and gives back what dead ones had claimed.
func (s *session) beat(stopping context.Context, conn *pgx.Conn, findDead bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stopping), statementTimeout)
	defer cancel()
	// A beat that is cut off costs the connection, on which this relay has yet to deregister.
	defer context.AfterFunc(stopping, func() { time.AfterFunc(leaveTimeout, cancel) })()
	instance, _ := s.current()
	registered, dead, err := heartbeat(ctx, conn, instance, findDead)
	if err != nil {
		return err
	}
	if !registered {
		return errTakenForDead
	}
	for _, other := range dead {
		deliveries, err := rescue(ctx, conn, other)
		if err != nil {
			return err
		}
		s.relay.cfg.Log.Warn().Int32("dead_instance", other).Int("deliveries", deliveries).Msg("rescued the claims of a dead relay")
		if hook := s.relay.cfg.Hooks.Rescued; hook != nil {
			hook(other, deliveries)
		}
		s.relay.wake.notify(true)
	}
	return nil
}

// leave removes this relay from the living: everything it had claimed is settled or given back.
func (s *session) leave(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	instance, _ := s.current()
	return deregister(ctx, conn, instance)
}
