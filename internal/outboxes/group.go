package outboxes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// startEvery is the time between the starts of two engines, so that hundreds on one server do not connect, and later poll, at once.
	startEvery = 5 * time.Millisecond
	// A relay that ended because waiting does not help is started again after firstRetry, later after lastRetry: the operator may have
	// migrated the schema meanwhile.
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
	// reloadsAtOnce bounds how many engines reload at once. Each writes its routes.
	reloadsAtOnce = 16
	// connectionsIdle is how long a connection of a pool must be unused to be closed at the pool's check, each minute. More frequent checks
	// would keep all in use: after each, a pool uses its connections in turn. pgxpool's default is half an hour.
	connectionsIdle = 15 * time.Second
	poolDefaultIdle = 30 * time.Minute
)

// An Outbox is what New needs of one outbox.
type Outbox struct {
	Name   string // unique
	Pool   *pgxpool.Config
	Schema string // empty: the first one of the search_path
	Hooks  relay.Hooks
	// Follow is called with each relay that serves the outbox, before it runs, on any goroutine. Nil: not called.
	Follow func(*relay.Relay)
}

// A Group runs the engines of several outboxes. Its methods are safe for concurrent use; Run is called once.
type Group struct{ members []*member }

// A member is one outbox of a group.
type member struct {
	Outbox

	mu      sync.Mutex // guards the fields below
	cfg     relay.Config
	engine  engine
	aborted bool
}

// An engine is what a group needs of a [relay.Relay].
type engine interface {
	Run(ctx context.Context) error
	Abort()
	Reload(cfg relay.Config) (changes []string, err error)
	RefuseReload(err error)
}

// New returns a Group, or every mistake in the configuration, which all outboxes share but for what Outbox holds. The log of each has
// the field database. It touches no network.
func New(shared relay.Config, all []Outbox) (*Group, error) {
	g := &Group{}
	for _, o := range all {
		m := &member{Outbox: o}
		m.cfg = m.own(shared)
		if err := m.renew(); err != nil {
			return nil, err
		}
		g.members = append(g.members, m)
	}
	return g, nil
}

// own returns the configuration of one outbox.
func (m *member) own(cfg relay.Config) relay.Config {
	pool := m.Pool.Copy()
	if pool.MaxConnIdleTime == poolDefaultIdle {
		pool.MaxConnIdleTime = connectionsIdle
	}
	cfg.Pool, cfg.Schema, cfg.Hooks = pool, m.Schema, m.Hooks
	cfg.Log = cfg.Log.With().Str("database", m.Name).Logger()
	if cfg.History != nil {
		cfg.History = history.New()
	}
	return cfg
}

// Run serves all outboxes until ctx is done, and stops them all at once. An outbox that a relay cannot work with, such as one with another
// schema, is logged and tried again.
func (g *Group) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	for i, m := range g.members {
		running.Go(func() {
			if sleep.For(ctx, time.Duration(i)*startEvery) == nil {
				m.run(ctx)
			}
		})
	}
	return nil
}

// run serves one outbox until ctx is done.
func (m *member) run(ctx context.Context) {
	retry := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(firstRetry), backoff.WithMaxInterval(lastRetry), backoff.WithMaxElapsedTime(0))
	for {
		began := time.Now()
		err := m.current().Run(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil { // a relay ends by itself for an error alone
			err = errors.New("the relay ended without a reason")
		}
		if time.Since(began) > 2*lastRetry {
			retry.Reset()
		}
		wait := retry.NextBackOff()
		log := m.logger()
		log.Error().Err(err).Dur("again_in", wait).Msg("this outbox is not served; the others are; it will be tried again")
		if hook := m.Hooks.DatabaseError; hook != nil {
			hook("serve", err)
		}
		if sleep.For(ctx, wait) != nil {
			return
		}
		if err := m.renew(); err != nil {
			log.Error().Err(err).Msg("this outbox is not served any more; the others are; restart the relay")
			return
		}
	}
}

// renew makes a relay, also in place of one that has ended. It fails only for a configuration with mistakes, which reloads keep out.
func (m *member) renew() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, err := relay.New(m.cfg)
	if err != nil {
		return err //nolint:wrapcheck // a mistake of the configuration, as it is
	}
	if m.engine = r; m.aborted {
		r.Abort()
	}
	if m.Follow != nil {
		m.Follow(r)
	}
	return nil
}

func (m *member) current() engine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.engine
}

func (m *member) logger() zerolog.Logger {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cfg.Log
}

// Reload puts a configuration into effect for every outbox, as [relay.Relay.Reload] does, and returns what changed in any of them. An
// outbox that refuses it, or whose database does, keeps what it had; the error names it.
func (g *Group) Reload(cfg relay.Config) (changes []string, err error) {
	var mu sync.Mutex
	var refused []error
	var reloading sync.WaitGroup
	slots := make(chan struct{}, reloadsAtOnce)
	for _, m := range g.members {
		slots <- struct{}{}
		reloading.Go(func() {
			defer func() { <-slots }()
			changed, err := m.reload(cfg)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				refused = append(refused, fmt.Errorf("database %s: %w", m.Name, err))
			}
			changes = append(changes, changed...)
		})
	}
	reloading.Wait()
	slices.Sort(changes)
	return slices.Compact(changes), errors.Join(refused...)
}

func (m *member) reload(cfg relay.Config) ([]string, error) {
	own := m.own(cfg)
	changes, err := m.current().Reload(own)
	if err == nil {
		m.mu.Lock()
		m.cfg = own
		m.mu.Unlock()
	}
	return changes, err
}

// RefuseReload notes in every outbox why a configuration was not put into effect.
func (g *Group) RefuseReload(err error) {
	for _, m := range g.members {
		m.current().RefuseReload(err)
	}
}

// Abort ends the drain of all relays, as [relay.Relay.Abort] does.
func (g *Group) Abort() {
	for _, m := range g.members {
		m.mu.Lock()
		m.aborted = true
		m.engine.Abort()
		m.mu.Unlock()
	}
}
