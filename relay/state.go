package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// ErrNotRegistered says that the relay is not registered in its database, or not any more.
var ErrNotRegistered = errors.New("the relay is not registered in its database")

// State is what a relay knows of itself at one moment.
type State struct {
	// Turned is when the claimer last began a turn or, before the relay has started, when it last
	// tried to reach the database. Zero: Run was not called.
	Turned time.Time
	// Beat is when the database last took a heartbeat. Zero: it has taken none.
	Beat time.Time
	// Registered reports whether the relay is registered in its database, so that it may claim.
	Registered bool
	// Asleep reports that the relay has ended, see [Asleep]. Beat is that of who sleeps for it.
	Asleep bool
	// StuckSince is since when every claim has failed; zero: the last one has not.
	StuckSince time.Time
	// Trouble that this relay has with its database now, such as a lack of disk; nil: none. Nothing
	// of it is stored.
	Trouble *Alert
	// Lanes of the configured destinations. Of more than a hundred only those that had something to
	// do lately.
	Lanes []LaneView
}

// A LaneView is the state of one destination in this relay.
type LaneView struct {
	LaneState
	// InFlight are the deliveries that this relay has claimed and not settled.
	InFlight int
	// WaitUntil is when the relay tries the destination again that has asked it to wait
	// (Retry-After); zero: it has not.
	WaitUntil time.Time
}

// progress is when parts of the relay last did their work, in nanoseconds since 1970; 0: never.
type progress struct{ turned, beat, stuck atomic.Int64 }

func (p *progress) markTurn() { p.turned.Store(time.Now().UnixNano()) }

// markClaims notes whether claims work. err is nil if the latest did; otherwise since is when the
// first of those that fail began.
func (r *Relay) markClaims(since time.Time, err error) {
	if err == nil {
		r.stuck.Store(0)
		r.trouble.Unstuck(time.Now())
		return
	}
	r.stuck.Store(since.UnixNano())
	r.trouble.Stuck(time.Now(), since, err)
}

func (r *Relay) markBeat() {
	now := time.Now()
	r.beat.Store(now.UnixNano())
	r.trouble.Worked(now)
}

func timeOf(nanoseconds int64) time.Time {
	if nanoseconds == 0 {
		return time.Time{}
	}
	return time.Unix(0, nanoseconds)
}

// State returns the state of the relay. It touches no database, and is safe for concurrent use.
func (r *Relay) State() State {
	s := State{Turned: timeOf(r.turned.Load()), Beat: timeOf(r.beat.Load()), Registered: r.alive(), StuckSince: timeOf(r.stuck.Load())}
	for _, l := range r.lanes.List() {
		s.Lanes = append(s.Lanes, LaneView{l.State(), l.InFlight(), l.Slowdown(time.Now()).Until})
	}
	if a, lasts := r.trouble.Lasting(r.cfg.Name); lasts {
		s.Trouble = &a
	}
	return s
}

// CountBacklog counts what waits for the destinations of this relay, each kind up to limit, in one
// statement whose cost is bounded. It fails while the relay is not registered: the database may be
// the wrong one. It is safe for concurrent use.
func (r *Relay) CountBacklog(ctx context.Context, limit int) (Backlog, error) {
	if !r.alive() {
		return Backlog{}, ErrNotRegistered
	}
	return r.watcher.CountBacklog(ctx, post.Names(r.config().Destinations), limit)
}
