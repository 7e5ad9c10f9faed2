package inbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
)

// An event is worked within milliseconds of being recorded, and not when a worker happens to poll,
// because recording wakes one: in its own process through a channel, and in others by a
// notification of PostgreSQL, but that only when its own process has no worker free. Both may be
// lost. Then the event is found by polling.

// wakeHere wakes the calls of Run in this process. It reports whether one of them has a free
// worker.
func (in *engine) wakeHere() (free bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for s := range in.runners {
		s.wakeUp()
		free = free || s.free.Load() > 0
	}
	return free
}

// coalescer lets one caller do something on behalf of all that ask at the same time.
type coalescer struct {
	waiting atomic.Bool // a caller is about to begin
	turn    sync.Mutex
}

// do runs f, unless another caller waits to run it. That run then counts for this caller too: an f
// that begins later follows everything that happened before do. No caller runs f twice. Otherwise a
// request would not end, nor would Run claim, while events keep coming.
func (c *coalescer) do(f func()) {
	if !c.waiting.CompareAndSwap(false, true) {
		return
	}
	c.turn.Lock()
	defer c.turn.Unlock()
	c.waiting.Store(false)
	f()
}

// wakeOthers notifies the inboxes of other processes. At most one notification of this process is
// under way, however many events are recorded: notifications of one database commit one after the
// other.
func (in *engine) wakeOthers(ctx context.Context) {
	in.notifying.do(func() {
		if err := in.notify(ctx); err != nil {
			in.Logger().DebugContext(ctx, "consumer: cannot wake other processes, they poll", "error", err.Error())
		}
	})
}

// wakeUp makes the runner claim as soon as it has a free worker.
func (s *runner) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default: // a token says that there is work, not how much
	}
}

// Times between attempts to connect.
const (
	// Delays between attempts to connect.
	firstReconnect = 100 * time.Millisecond
	maxReconnect   = 10 * time.Second
)

// wakeInterval is the shortest time between two wake-ups by notifications. Every login of the
// database may notify as often as it likes, and each wake-up costs a claim.
const wakeInterval = 20 * time.Millisecond

// listenForWakes listens for notifications of other processes until ctx ends. It uses its own
// connection, outside the pool, because it keeps it.
func (s *runner) listenForWakes(ctx context.Context) {
	trouble := outage{inbox: s.engine, what: "consumer: inbox cannot listen for events, and finds them by polling until it can"}
	pause := firstReconnect
	for ctx.Err() == nil {
		listened, err := s.listenOnce(ctx, trouble.over)
		if ctx.Err() != nil {
			return
		}
		trouble.began(ctx, err)
		if listened {
			pause = firstReconnect
		}
		_ = sleep.For(ctx, jittered(pause, 1, rand.Float64()))
		pause = min(2*pause, maxReconnect)
	}
}

// listenOnce listens on one connection until it breaks. It calls ready once it listens, and reports
// whether it got that far.
func (s *runner) listenOnce(ctx context.Context, ready func(context.Context)) (listened bool, err error) {
	conn, err := s.connect(ctx)
	if err != nil {
		return false, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), notifyTimeout)
		defer cancel()
		_ = conn.Close(closing)
	}()
	payload, err := s.listen(ctx, conn)
	if err != nil {
		return false, err
	}
	ready(ctx)
	s.wakeUp() // for what was recorded while none listened
	var woken time.Time
	for notified := false; ; {
		notified, err = s.awaitNotification(ctx, conn, payload, notified, woken.Add(wakeInterval))
		if err != nil {
			return true, err
		}
		if now := time.Now(); notified && now.Sub(woken) >= wakeInterval {
			s.wakeUp()
			woken, notified = now, false
		}
	}
}

// awaitNotification waits for a notification and reports whether one with the payload has come. If
// notified is true it waits until the given time only.
func (s *runner) awaitNotification(ctx context.Context, conn *pgx.Conn, payload string, notified bool, until time.Time) (bool, error) {
	waiting, cancel := ctx, context.CancelFunc(func() {})
	if notified {
		waiting, cancel = context.WithDeadline(ctx, until)
	}
	defer cancel()
	notification, err := conn.WaitForNotification(waiting)
	switch {
	case err == nil:
		return notified || notification.Payload == payload, nil
	case notified && ctx.Err() == nil && !conn.IsClosed() && waiting.Err() != nil:
		return true, nil
	}
	return notified, fmt.Errorf("wait for notification: %w", err)
}

func (s *runner) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.CommitTimeout)
	defer cancel()
	cfg := s.pool.Config() // a copy
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return nil, fmt.Errorf("before connect: %w", err)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return conn, nil
}

// outage logs the loss of the database once, and its return once.
type outage struct {
	inbox *engine
	what  string
	since time.Time // zero: there is none
}

func (o *outage) began(ctx context.Context, err error) {
	if err == nil || errors.Is(err, context.Canceled) || !o.since.IsZero() {
		return
	}
	o.since = time.Now()
	o.inbox.Logger().ErrorContext(ctx, o.what, "receiver", o.inbox.Receiver, "source", o.inbox.Source, "error", o.inbox.Redacted(err))
}

func (o *outage) over(ctx context.Context) {
	if o.since.IsZero() {
		return
	}
	o.inbox.Logger().InfoContext(ctx, "consumer: inbox has its database back", "receiver", o.inbox.Receiver, "source", o.inbox.Source, "after", time.Since(o.since).String())
	o.since = time.Time{}
}
