package session

import (
	"cmp"
	"context"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// Sleepers do what relays need that are asleep: one connection to each database beats for all of
// them, and listens. They are safe for concurrent use. Make them with [NewSleepers].
type Sleepers struct {
	log zerolog.Logger

	beatEvery, patience time.Duration // 0: [AsleepInterval] and defaultPatience

	mu      sync.Mutex
	shared  map[string]*sharedSession // by connection string
	ctx     context.Context           // of the connections
	end     context.CancelFunc
	running sync.WaitGroup
}

// NewSleepers returns Sleepers without a connection.
func NewSleepers(log zerolog.Logger) *Sleepers {
	s := &Sleepers{log: log, shared: map[string]*sharedSession{}}
	s.ctx, s.end = context.WithCancel(context.Background())
	return s
}

// Close closes the connections, once no relay is asleep any more.
func (s *Sleepers) Close() {
	s.end()
	s.running.Wait()
}

// A sharedSession is what the relays that are asleep in one database have together.
type sharedSession struct {
	pool                *pgxpool.Config
	log                 zerolog.Logger
	beatEvery, patience time.Duration

	mu        sync.Mutex          // guards the fields below
	sleepers  map[string]*sleeper // by schema
	interrupt context.CancelFunc  // ends a wait for notifications

	started time.Time // when the server started to which the last connection led
}

// A sleeper is one relay that is asleep.
type sleeper struct {
	Sleep
	names    *pg.Names
	nextBeat time.Time
	leaving  bool
	ended    chan struct{} // closed when the relay shall wake up, or has left
}

// Sleep is what one relay needs while it is asleep.
type Sleep struct {
	Pool    *pgxpool.Config
	RelayID int32
	Schema  string          // as notifications name it
	Until   time.Time       // wakes it; zero: nothing does
	Wake    <-chan struct{} // wakes it when closed
	Beaten  func(time.Time) // follows each beat
}

// sleeperTimeout bounds what is done for one of many: the next beats of the others wait for it.
const sleeperTimeout = 5 * time.Second

// defaultPatience is how long a database may be away before those who sleep in it wake up, and say
// so.
const defaultPatience = 10 * time.Second

// Sleep returns when the relay shall wake up, because of a notification, because there is something
// to do in its database, or because its database is away; and when ctx is done.
func (s *Sleepers) Sleep(ctx context.Context, what Sleep) {
	one := newSleeper(what)
	shared := s.enter(one)
	select {
	case <-one.ended:
	case <-one.Wake:
		shared.change(func() { shared.end(one) })
	case <-ctx.Done(): // the relay is left to Leave
	}
}

// Leave deregisters a relay that has fallen asleep, and not come back. If that takes more than a
// moment, it is soon taken for dead without a heartbeat.
func (s *Sleepers) Leave(what Sleep) {
	one := newSleeper(what)
	one.leaving = true
	shared := s.enter(one)
	timeout := time.NewTimer(leaveTimeout)
	defer timeout.Stop()
	select {
	case <-one.ended:
	case <-timeout.C:
		shared.change(func() { shared.end(one) })
	}
}

func newSleeper(what Sleep) *sleeper {
	return &sleeper{Sleep: what, names: pg.NewNames(what.Schema, ""), ended: make(chan struct{})}
}

// enter adds a sleeper to those of its database.
func (s *Sleepers) enter(one *sleeper) *sharedSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := one.Pool.ConnString()
	if shared := s.shared[key]; shared != nil {
		shared.change(func() {
			if before := shared.sleepers[one.Schema]; before != nil { // the same schema by another name, or one that leaves now
				shared.end(before)
			}
			shared.sleepers[one.Schema] = one
		})
		return shared
	}
	shared := &sharedSession{
		pool: one.Pool, log: s.log, beatEvery: cmp.Or(s.beatEvery, AsleepInterval), patience: cmp.Or(s.patience, defaultPatience),
		sleepers: map[string]*sleeper{one.Schema: one},
	}
	s.shared[key] = shared
	s.running.Go(func() {
		for !s.remove(key) {
			shared.run(s.ctx)
		}
	})
	return shared
}

// remove forgets a session in which no relay sleeps.
func (s *Sleepers) remove(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.shared[key].isEmpty() {
		return false
	}
	delete(s.shared, key)
	return true
}

func (h *sharedSession) isEmpty() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.sleepers) == 0
}

// change changes what the mutex guards, and ends the wait of listen.
func (h *sharedSession) change(do func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	do()
	if h.interrupt != nil {
		h.interrupt()
	}
}

// end ends a sleep. The caller holds the mutex.
func (h *sharedSession) end(one *sleeper) {
	if h.sleepers[one.Schema] == one {
		delete(h.sleepers, one.Schema)
		close(one.ended)
	}
}

// run beats and listens until no relay is asleep in its database.
func (h *sharedSession) run(ctx context.Context) {
	failing := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond), backoff.WithMaxInterval(beatInterval), backoff.WithMaxElapsedTime(0))
	worked := time.Now()
	for !h.isEmpty() {
		err := h.listen(ctx, &worked)
		if err == nil {
			return
		}
		h.log.Warn().Err(err).Msg("the connection of outboxes that are asleep has ended; trying again")
		if time.Since(worked) < time.Second {
			failing.Reset()
		}
		if time.Since(worked) > h.patience {
			h.change(func() {
				for _, one := range h.sleepers {
					h.end(one)
				}
			})
		}
		_ = sleep.For(ctx, failing.NextBackOff())
	}
}

// listen keeps one connection while it lasts and anybody is asleep. What came while there was none
// is found by the beats that it begins with.
func (h *sharedSession) listen(ctx context.Context, worked *time.Time) error {
	conn, err := h.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if err := pg.Exec(ctx, conn, "listen", listen); err != nil {
		return err
	}
	started, err := rows.Value[time.Time](ctx, conn, "read when the server started", selectStarted)
	if err != nil {
		return err
	}
	h.change(func() {
		for _, one := range h.sleepers {
			if one.nextBeat = (time.Time{}); !h.started.IsZero() && !h.started.Equal(started) { // each relay has to see whether this is its database
				h.end(one)
			}
		}
	})
	h.started = started
	for {
		*worked = time.Now()
		next, waiting := h.next(ctx)
		switch {
		case next == nil:
			return nil
		case waiting == nil:
			if err := h.serve(ctx, conn, next); err != nil {
				return err
			}
		default:
			err := conn.PgConn().WaitForNotification(waiting)
			h.interrupt()
			if err != nil && (waiting.Err() == nil && !pgconn.Timeout(err) || conn.IsClosed()) {
				return err //nolint:wrapcheck // run says of what
			}
		}
	}
}

// connect makes the connection. Its statements differ by the schema, so none is prepared.
func (h *sharedSession) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, sleeperTimeout)
	defer cancel()
	pool := h.pool.Copy()
	pg.SetDirect(pool, "")
	pool.ConnConfig.RuntimeParams["search_path"] = pg.SafePath
	pool.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool.ConnConfig.OnNotification = h.hear
	return dial(ctx, pool)
}

// next returns whose beat is next, and a context that ends when it is due, or when something
// changes; nil: it is due.
func (h *sharedSession) next(ctx context.Context) (next *sleeper, waiting context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range h.sleepers {
		if next == nil || one.nextBeat.Before(next.nextBeat) {
			next = one
		}
	}
	if next == nil || !time.Now().Before(next.nextBeat) {
		return next, nil
	}
	waiting, h.interrupt = context.WithDeadline(ctx, next.nextBeat)
	return next, waiting
}

// serve does what is due for one sleeper.
func (h *sharedSession) serve(ctx context.Context, conn *pgx.Conn, one *sleeper) error {
	ctx, cancel := context.WithTimeout(ctx, sleeperTimeout)
	defer cancel()
	on, now := one.names.On(conn), time.Now()
	wake := !one.Until.IsZero() && !now.Before(one.Until)
	var err error
	switch {
	case one.leaving:
		if err = Deregister(ctx, on, one.RelayID); err == nil {
			err = pg.Exec(ctx, on, "say that routes are withdrawn", requestRoutes)
		}
	case !wake:
		wake, err = BeatAsleep(ctx, on, one.RelayID)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil && conn.IsClosed() {
		return err
	}
	if one.leaving || wake || err != nil { // awake, it says what is wrong
		h.end(one)
		return nil
	}
	one.Beaten(now)
	if one.nextBeat = now.Add(h.beatEvery); !one.Until.IsZero() && one.Until.Before(one.nextBeat) {
		one.nextBeat = one.Until
	}
	return nil
}

// hear wakes the relay of the schema in which an event was committed, or rows or routes have
// changed. That another relay has come is no reason.
func (h *sharedSession) hear(_ *pgconn.PgConn, n *pgconn.Notification) {
	schema := strings.TrimPrefix(strings.TrimPrefix(n.Payload, "sweep "), "routes ")
	h.mu.Lock()
	defer h.mu.Unlock()
	if one := h.sleepers[schema]; one != nil && !one.leaving {
		h.end(one)
	}
}
