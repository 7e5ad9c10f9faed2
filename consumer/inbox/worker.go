package inbox

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/breaker"
)

// ticket is a claimed event that its worker has not read yet.
type ticket struct {
	key       string
	fence     int64
	eventType string
	place     string // of the row in the table
	pass      breaker.Pass

	promoted bool // when it has ended: it let another event go
	reported bool // to the breaker
}

// runner is one call of Run. One goroutine claims, for all workers together, and owns what is not
// said to be shared.
//
//	recording ─┐                       ┌─▶ worker: begin, handler, finish ─┐
//	NOTIFY ────┼─ wake ─▶ claim ─ tickets ─▶ worker …                       ├─ ended ─▶ claim again
//	every second: inspect ─▶ rescue    └─▶ worker …                        ─┘
type runner struct {
	*engine
	wake  chan struct{} // holds at most one token
	ended chan *ticket  // from workers; has room for all of them
	free  atomic.Int64  // workers; read by recorders

	behind atomic.Bool // the last claim left something due, as far as it knows; read by recorders

	handling context.Context // of the handlers: ends when Run does not wait for them any longer
	abandon  context.CancelCauseFunc
	working  sync.WaitGroup

	tickets map[*ticket]bool // what this runner works: an event twice, while one that was cut off has not noticed
	limited map[string]int   // by type, of those that have a limit: how many are being worked
	more    bool             // there may be something to claim
	last    string           // type that the last claim ended with
	passed  time.Time        // when others last heard that this process cannot take everything

	heldUntil time.Time // the breaker lets nothing be claimed before

	suspects  map[string]int64 // what the last inspection found without a worker: key and fence
	polled    time.Time
	inspected time.Time
	swept     time.Time
	sweptTo   string // ordering key
	trouble   outage
}

// Times of what Run does unasked.
const (
	// Intervals of the periodic work of Run.
	inspectInterval = time.Second      // between searches for events whose workers have died
	sweepInterval   = 30 * time.Second // between searches for ordering keys to release
	passInterval    = 50 * time.Millisecond
)

// Run works events until ctx ends, as many at once as Config.Workers. Each event has its own
// transaction, which commits the handler's writes together with the event's state. Run may be
// called in any number of processes, and more than once in each. No event is worked by two workers
// at once, and events of one ordering key are worked one at a time.
//
// An outage of the database does not end Run, however long it lasts. When ctx ends, Run claims no
// more events, waits at most Config.DrainTimeout for the running handlers, gives back what has not
// begun, and returns nil. It returns an error only when a handler does not return after its context
// has ended. That handler's writes are committed only if it returns nil while the process lives.
func (in *Inbox) Run(ctx context.Context) error { return in.engine.run(ctx) }

func (in *engine) run(ctx context.Context) error {
	s := &runner{
		engine:   in,
		wake:     make(chan struct{}, 1),
		ended:    make(chan *ticket, in.cfg.Workers),
		tickets:  map[*ticket]bool{},
		limited:  map[string]int{},
		suspects: map[string]int64{},
		more:     true,
		trouble:  outage{inbox: in, what: "consumer: inbox cannot reach its database, and keeps trying"},
	}
	s.handling, s.abandon = context.WithCancelCause(context.WithoutCancel(ctx))
	defer s.abandon(nil)
	in.join(s)
	defer in.leave(s)

	var listener sync.WaitGroup
	defer listener.Wait()
	listenCtx, stopListening := context.WithCancel(ctx)
	defer stopListening()
	listener.Go(func() { s.listenForWakes(listenCtx) })

	s.claimUntil(ctx)
	return s.drain(ctx)
}

func (in *engine) join(s *runner) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.runners[s] = struct{}{}
}

// recordingRoom returns the channels in which a recorder needs a token.
func (in *engine) recordingRoom() []chan struct{} {
	in.mu.Lock()
	defer in.mu.Unlock()
	for s := range in.runners {
		if s.behind.Load() {
			return []chan struct{}{in.beside, in.recording}
		}
	}
	if len(in.runners) == 0 {
		return nil
	}
	return []chan struct{}{in.recording}
}

func (in *engine) leave(s *runner) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.runners, s)
}

// claimUntil claims events and starts their workers until ctx ends.
func (s *runner) claimUntil(ctx context.Context) {
	defer s.free.Store(0)
	defer s.behind.Store(false)
	tick := time.NewTicker(min(s.cfg.PollInterval, inspectInterval))
	defer tick.Stop()
	for ctx.Err() == nil {
		s.endAll()
		free := s.cfg.Workers - len(s.tickets)
		s.free.Store(int64(free))
		if s.more && free > 0 && !time.Now().Before(s.heldUntil) {
			s.claim(ctx, free)
			select {
			case <-tick.C: // there may be more to claim for hours
				s.inspect(ctx)
			default:
			}
			continue
		}
		if s.more && free == 0 {
			s.passOn(ctx)
		}
		select {
		case <-ctx.Done():
		case t := <-s.ended:
			s.end(t)
		case <-s.wake:
			s.more = true
		case <-tick.C:
			s.inspect(ctx)
		}
	}
}

// endAll takes back the tickets of all workers that have ended, so that one claim serves them all.
// A claim for each would keep most workers waiting for it.
func (s *runner) endAll() {
	for {
		select {
		case t := <-s.ended:
			s.end(t)
		default:
			return
		}
	}
}

// end takes a ticket back.
func (s *runner) end(t *ticket) {
	delete(s.tickets, t)
	if _, limit := s.cfg.TypeWorkers[t.eventType]; limit {
		s.limited[t.eventType]--
		s.more = true // what was over the limit may be due
	}
	s.more = s.more || t.promoted
	if !t.reported {
		s.cfg.Config.Breaker.Leave(t.pass, time.Now(), breaker.Unknown, nil)
	}
	s.heldUntil = time.Time{} // it may have closed
}

// claim takes what is due for the free workers and starts them.
func (s *runner) claim(ctx context.Context, free int) {
	now := time.Now()
	pass, wait, ok := s.cfg.Config.Breaker.Enter(now)
	if !ok {
		s.heldUntil = now.Add(jittered(wait, 0.25, rand.Float64())) // the next tick after it tries again
		return
	}
	if pass.Probe() {
		free = 1
	}
	if n := s.claimFor(ctx, free, pass); n == 0 {
		s.cfg.Config.Breaker.Leave(pass, now, breaker.Unknown, nil)
	}
}

// claimFor claims under a pass of the breaker, which each of the events carries. It returns the
// number of events.
func (s *runner) claimFor(ctx context.Context, free int, pass breaker.Pass) int {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		s.failed(ctx, err)
		return 0
	}
	// Claim no more than can begin at once: no other process can work an event that waits here for
	// a connection. The first event uses the connection of the claim, so one can begin however busy
	// the pool is.
	stat := s.pool.Stat()
	limit := min(free, 1+max(0, int(stat.MaxConns()-stat.AcquiredConns())))
	want := claimRequest{limit: limit, types: []string{}, room: []int32{}, after: s.last}
	for kind, n := range s.cfg.TypeWorkers {
		if room := n - s.limited[kind]; room < limit {
			want.types, want.room = append(want.types, kind), append(want.room, int32(room))
		}
	}
	// The claim does not run under ctx. A canceled claim would cost the connection and leave events
	// without a worker until their rescue.
	claiming, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.CommitTimeout)
	defer cancel()
	tickets, err := s.claimDue(claiming, conn, want)
	if err != nil {
		conn.Release()
		s.failed(ctx, err)
		return 0
	}
	s.trouble.over(ctx)
	s.more = len(tickets) == limit
	s.behind.Store(s.more)
	if len(tickets) == 0 {
		conn.Release()
		return 0
	}
	s.last = tickets[len(tickets)-1].eventType
	for _, t := range tickets {
		t.pass = pass
		s.tickets[t] = true
		if _, limited := s.cfg.TypeWorkers[t.eventType]; limited {
			s.limited[t.eventType]++
		}
		s.start(ctx, conn, t)
		conn = nil // it is the first worker's
	}
	return len(tickets)
}

func (s *runner) start(ctx context.Context, conn *pgxpool.Conn, t *ticket) {
	s.working.Go(func() {
		defer func() { s.ended <- t }()
		s.work(ctx, conn, t)
	})
}

// failed postpones the next claim until the next wake-up or tick.
func (s *runner) failed(ctx context.Context, err error) {
	s.more = false
	s.polled = time.Time{}
	s.trouble.began(ctx, err)
}

// passOn wakes other processes when this one cannot take everything: the process that recorded the
// event may have seen a free worker here.
func (s *runner) passOn(ctx context.Context) {
	if now := time.Now(); now.Sub(s.passed) >= passInterval {
		s.passed = now
		s.wakeOthers(ctx)
	}
}

// inspect polls for due events, rescues the events of dead workers, and sweeps. It costs one
// statement while there is nothing to do.
func (s *runner) inspect(ctx context.Context) {
	now := time.Now()
	poll, inspect := now.Sub(s.polled) >= s.cfg.PollInterval-time.Millisecond, now.Sub(s.inspected) >= inspectInterval-time.Millisecond
	if !poll && !inspect {
		return
	}
	due, unattended, err := s.checkDue(ctx)
	if err != nil {
		s.failed(ctx, err)
		return
	}
	s.trouble.over(ctx)
	if poll {
		s.polled = now
		s.more = s.more || due
	}
	if inspect {
		s.inspected = now
		if err := s.rescue(ctx, unattended); err != nil {
			s.trouble.began(ctx, err)
			return
		}
	}
	if now.Sub(s.swept) >= sweepInterval || s.sweptTo != "" {
		s.swept = now
		if err := s.sweep(ctx); err != nil {
			s.trouble.began(ctx, err)
		}
	}
}

// rescue gives back the events of workers that have died. It skips this process's own events,
// however long they wait for a connection.
func (s *runner) rescue(ctx context.Context, unattended bool) error {
	suspected := s.suspects
	s.suspects = map[string]int64{}
	if !unattended {
		return nil
	}
	for t := range s.tickets {
		if suspected[t.key] == t.fence {
			delete(suspected, t.key)
		}
	}
	found, err := s.rescueUnattended(ctx, suspected)
	if err != nil {
		return err
	}
	rescued := 0
	for _, f := range found {
		switch {
		case !f.rescued:
			s.suspects[f.key] = f.fence
			continue
		case f.state == StateFailed:
			s.Logger().ErrorContext(ctx, "consumer: event failed, "+crashLoopText,
				slog.String("receiver", s.Receiver), slog.String("source", s.Source), slog.String("key", f.key), slog.String("event_type", f.eventType))
			if f.orderingKey != "" && s.cfg.OnFailure == FailureSkips {
				if _, err := s.release(ctx, f.orderingKey); err != nil {
					return err
				}
			}
		}
		rescued++
	}
	if rescued > 0 {
		s.more = true
		s.Logger().WarnContext(ctx, "consumer: gave back events whose worker had died", "receiver", s.Receiver, "source", s.Source, "events", rescued)
	}
	return nil
}

// sweep releases events that wait for no reason: a process died at the wrong moment, or an operator
// changed rows by hand.
func (s *runner) sweep(ctx context.Context) error {
	if s.sweptTo == "" {
		some, err := s.adopt(ctx)
		if err != nil {
			return err
		}
		s.more = s.more || some
	}
	keys, last, err := s.stalled(ctx, s.sweptTo)
	if err != nil {
		return err
	}
	s.sweptTo = last
	for _, key := range keys {
		promoted, err := s.release(ctx, key)
		if err != nil {
			return err
		}
		s.more = s.more || promoted
	}
	return nil
}

// drain waits for the running handlers.
func (s *runner) drain(ctx context.Context) error {
	timer := time.NewTimer(s.cfg.DrainTimeout)
	defer timer.Stop()
	for abandoned := false; len(s.tickets) > 0; {
		select {
		case t := <-s.ended:
			s.end(t)
		case <-timer.C:
			if abandoned {
				return fmt.Errorf("stop inbox: %d handlers have not returned although their contexts have ended", len(s.tickets))
			}
			abandoned = true
			s.Logger().WarnContext(ctx, "consumer: inbox does not wait any longer for its handlers", "receiver", s.Receiver, "source", s.Source, "handlers", len(s.tickets))
			s.abandon(errStopping)
			timer.Reset(2 * s.CommitTimeout) // for what follows a handler
		}
	}
	s.working.Wait()
	return nil
}
