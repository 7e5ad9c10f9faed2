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
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// Sleepers sleep for relays: they share one connection to each database, which beats for all relays that are asleep there, and listens. The
// zero value is ready to use, concurrently.
type Sleepers struct {
	Log zerolog.Logger

	beatEvery, patience time.Duration // 0: [AsleepInterval] and defaultPatience

	mu       sync.Mutex
	bedrooms map[string]*bedroom // by connection string
	running  sync.WaitGroup
}

// Wait waits until the last connection is closed, once nobody is asleep any more.
func (s *Sleepers) Wait() { s.running.Wait() }

// A bedroom is one database in which relays sleep.
type bedroom struct {
	pool                *pgxpool.Config
	log                 zerolog.Logger
	beatEvery, patience time.Duration

	mu        sync.Mutex          // guards the fields below
	sleepers  map[string]*sleeper // by schema
	interrupt context.CancelFunc  // ends a wait for notifications
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
	Pool     *pgxpool.Config
	Instance int32
	Schema   string          // as notifications name it
	Until    time.Time       // wakes it; zero: nothing does
	Wake     <-chan struct{} // wakes it when closed
	Beaten   func(time.Time) // follows each beat
}

// defaultPatience is how long a database may be away before those who sleep in it wake up, and say so.
const defaultPatience = 10 * time.Second

// Sleep returns when the relay shall wake up, because of a notification, because there is something to do in its database, or because
// its database is away; and when ctx is done.
func (s *Sleepers) Sleep(ctx context.Context, what Sleep) {
	one := newSleeper(what)
	room := s.enter(one)
	select {
	case <-one.ended:
	case <-one.Wake:
		room.change(func() { room.end(one) })
	case <-ctx.Done(): // Leave takes its place
	}
}

// Leave deregisters a relay that has fallen asleep, and not come back. If that takes more than a moment, it is soon taken for dead without
// a heartbeat.
func (s *Sleepers) Leave(what Sleep) {
	one := newSleeper(what)
	one.leaving = true
	room := s.enter(one)
	timeout := time.NewTimer(leaveTimeout)
	defer timeout.Stop()
	select {
	case <-one.ended:
	case <-timeout.C:
		room.change(func() { room.end(one) })
	}
}

func newSleeper(what Sleep) *sleeper {
	return &sleeper{Sleep: what, names: pg.NewNames(what.Schema, ""), ended: make(chan struct{})}
}

// enter puts a sleeper to bed, and makes sure that somebody watches.
func (s *Sleepers) enter(one *sleeper) *bedroom {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := one.Pool.ConnString()
	if room := s.bedrooms[key]; room != nil {
		room.change(func() { room.sleepers[one.Schema] = one })
		return room
	}
	room := &bedroom{
		pool: one.Pool, log: s.Log, beatEvery: cmp.Or(s.beatEvery, AsleepInterval), patience: cmp.Or(s.patience, defaultPatience),
		sleepers: map[string]*sleeper{one.Schema: one},
	}
	if s.bedrooms == nil {
		s.bedrooms = map[string]*bedroom{}
	}
	s.bedrooms[key] = room
	s.running.Go(func() {
		for {
			room.watch()
			s.mu.Lock()
			if room.isEmpty() {
				delete(s.bedrooms, key)
				s.mu.Unlock()
				return
			}
			s.mu.Unlock()
		}
	})
	return room
}

func (r *bedroom) isEmpty() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sleepers) == 0
}

// change changes what the mutex guards, and makes watch look at it.
func (r *bedroom) change(do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do()
	if r.interrupt != nil {
		r.interrupt()
	}
}

// end ends a sleep. The caller holds the mutex.
func (r *bedroom) end(one *sleeper) {
	if r.sleepers[one.Schema] == one {
		delete(r.sleepers, one.Schema)
		close(one.ended)
	}
}

// watch watches until nobody is asleep here any more.
func (r *bedroom) watch() {
	failing := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond), backoff.WithMaxInterval(beatInterval), backoff.WithMaxElapsedTime(0))
	worked := time.Now()
	for !r.isEmpty() {
		err := r.listen(&worked)
		if err == nil {
			return
		}
		r.log.Warn().Err(err).Msg("the connection of outboxes that are asleep has ended; trying again")
		if time.Since(worked) < time.Second {
			failing.Reset()
		}
		if time.Since(worked) > r.patience {
			r.change(func() {
				for _, one := range r.sleepers {
					r.end(one)
				}
			})
		}
		_ = sleep.For(context.Background(), failing.NextBackOff())
	}
}

// listen keeps one connection while it lasts and anybody is asleep. What came while there was none is found by the beats that it begins with.
func (r *bedroom) listen(worked *time.Time) error {
	ctx := context.Background()
	conn, err := r.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if err := pg.Exec(ctx, conn, "listen", listen); err != nil {
		return err
	}
	r.change(func() {
		for _, one := range r.sleepers {
			one.nextBeat = time.Time{}
		}
	})
	for {
		*worked = time.Now()
		next, waiting := r.next(ctx)
		switch {
		case next == nil:
			return nil
		case waiting == nil:
			if err := r.tend(ctx, conn, next); err != nil {
				return err
			}
		default:
			err := conn.PgConn().WaitForNotification(waiting)
			r.interrupt()
			if err != nil && (waiting.Err() == nil && !pgconn.Timeout(err) || conn.IsClosed()) {
				return err //nolint:wrapcheck // watch says of what
			}
		}
	}
}

// connect makes the connection. Its statements differ by the schema, so none is prepared.
func (r *bedroom) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	pool := r.pool.Copy()
	pg.SetDirect(pool, "")
	pool.ConnConfig.RuntimeParams["search_path"] = pg.SafePath
	pool.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool.ConnConfig.OnNotification = r.hear
	return dial(ctx, pool)
}

// next returns whose beat is next, and a context that ends when it is due, or when something changes; nil: it is due.
func (r *bedroom) next(ctx context.Context) (next *sleeper, waiting context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.sleepers {
		if next == nil || one.nextBeat.Before(next.nextBeat) {
			next = one
		}
	}
	if next == nil || !time.Now().Before(next.nextBeat) {
		return next, nil
	}
	waiting, r.interrupt = context.WithDeadline(ctx, next.nextBeat)
	return next, waiting
}

// tend does what is due for one sleeper.
func (r *bedroom) tend(ctx context.Context, conn *pgx.Conn, one *sleeper) error {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	on, now := one.names.On(conn), time.Now()
	wake := !one.Until.IsZero() && !now.Before(one.Until)
	var err error
	switch {
	case one.leaving:
		err = Deregister(ctx, on, one.Instance)
	case !wake:
		wake, err = BeatAsleep(ctx, on, one.Instance)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && conn.IsClosed() {
		return err
	}
	if one.leaving || wake || err != nil { // awake, it says what is wrong
		r.end(one)
		return nil
	}
	one.Beaten(now)
	if one.nextBeat = now.Add(r.beatEvery); !one.Until.IsZero() && one.Until.Before(one.nextBeat) {
		one.nextBeat = one.Until
	}
	return nil
}

// hear wakes the relay of the schema that a notification names, whatever else it says. That another relay has come is no reason.
func (r *bedroom) hear(_ *pgconn.PgConn, n *pgconn.Notification) {
	schema := strings.TrimPrefix(strings.TrimPrefix(n.Payload, "sweep "), "routes ")
	r.mu.Lock()
	defer r.mu.Unlock()
	if one := r.sleepers[schema]; one != nil {
		r.end(one)
	}
}
