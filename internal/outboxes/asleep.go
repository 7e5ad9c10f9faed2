package outboxes

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// sleepsFor is how long an outbox sleeps at most, give or take a quarter: awake, its relay
	// looks after the database.
	sleepsFor = time.Hour
	// wakesBefore the time of the archive an outbox wakes, which has to run on time.
	wakesBefore = 5 * time.Second
)

// sleep returns when the outbox shall be served again, or ctx is done. The relay that fell asleep
// is garbage meanwhile, with its connections, buffers and statements.
func (m *member) sleep(ctx context.Context, asleep *relay.Asleep) (what session.Sleep) {
	wake := make(chan struct{})
	what = session.Sleep{Pool: m.Pool, RelayID: asleep.RelayID, Schema: asleep.Schema, Wake: wake}
	m.replaceByState(&what, sync.OnceFunc(func() { close(wake) }))
	m.log.Debug().Time("until", what.Until).Msg("asleep")
	m.sleepers.Sleep(ctx, what)
	return what
}

// leave deregisters a relay that has fallen asleep, unless another one has taken its place.
func (m *member) leave(what session.Sleep) {
	m.mu.Lock()
	cameBack := m.engine != nil && !m.engine.State().Beat.IsZero()
	m.mu.Unlock()
	if what.RelayID != 0 && !cameBack {
		m.sleepers.Leave(what)
	}
}

// replaceByState replaces the relay by what it last knew of itself.
func (m *member) replaceByState(what *session.Sleep, wake func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.relayID = what.RelayID
	last := m.engine.State()
	m.engine, m.wake = nil, wake
	now := time.Now()
	what.Until = now.Add(sleepsFor*3/4 + rand.N(sleepsFor/2))
	if next := m.cfg.Retention.Next(now); !next.IsZero() && next.Add(-wakesBefore).Before(what.Until) {
		what.Until = next.Add(-wakesBefore) // or at once
	}
	if m.reloaded { // the relay may have ended without it
		what.Until = now
	}
	var beat atomic.Int64
	beat.Store(now.UnixNano())
	what.Beaten = func(at time.Time) { beat.Store(at.UnixNano()) }
	m.asleep = func() relay.State {
		return relay.State{Registered: true, Asleep: true, Beat: time.Unix(0, beat.Load()), Lanes: last.Lanes}
	}
	if m.Follow != nil {
		m.Follow(m.asleep, func(context.Context, int) (watch.Backlog, error) { return watch.Backlog{}, errAsleep })
	}
}

var errAsleep = errors.New("the relay is asleep")

// wakeUp makes a relay in place of one that is asleep. The caller holds the mutex. The
// configuration is one of which a relay was made before.
func (m *member) wakeUp() {
	m.wake()
	if err := m.make(); err != nil {
		m.log.Error().Err(err).Msg("this outbox is not served any more; the others are; restart the relay")
	}
}
