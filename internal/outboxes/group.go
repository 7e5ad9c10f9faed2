package outboxes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// startEvery is the time between the starts of two engines, so that hundreds on one server do
	// not connect, and later poll, at once.
	startEvery = 5 * time.Millisecond
	// A relay that ended because waiting does not help is started again after firstRetry, later
	// after lastRetry: the operator may have migrated the schema meanwhile.
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
	// reloadsAtOnce bounds how many engines reload at once. Each writes its routes.
	reloadsAtOnce = 16
	// connectionsIdle is how long a connection of a pool must be unused to be closed at the pool's
	// check, each minute. More frequent checks would keep all in use: after each, a pool uses its
	// connections in turn. pgxpool's default is half an hour.
	connectionsIdle = 15 * time.Second
	poolDefaultIdle = 30 * time.Minute
)

var errNotServed = errors.New("it is not served any more; restart the relay")

// An Outbox is one of those that a Group serves.
type Outbox struct {
	Name   string // unique
	Pool   *pgxpool.Config
	Schema string // empty: the first one of the search_path
}

// isAs reports whether both are the same outbox, reached with the same credentials.
func (o Outbox) isAs(other Outbox) bool {
	return o.Name == other.Name && o.Schema == other.Schema && o.Pool.ConnString() == other.Pool.ConnString()
}

// An Observer sees how one outbox is served. Functions may be nil.
type Observer struct {
	Hooks relay.Hooks
	// Follow is called with what each relay that serves the outbox knows of itself, before it runs,
	// and of one that falls asleep. On any goroutine.
	Follow func(state func() relay.State, count Count)
	// History of the outbox, if the configuration has one, for who else reads it; nil: it is made.
	History *relay.History
	// Ended is called when the outbox is not served any more, or by another connection.
	Ended func()
}

// Count counts what waits, as [relay.Relay.CountBacklog] does.
type Count func(ctx context.Context, limit int) (watch.Backlog, error)

// A Group runs the engines of several outboxes. Its methods are safe for concurrent use; Run is
// called once.
type Group struct {
	observe   func(name string) (Observer, error)
	log       zerolog.Logger // these two stay, whatever a reload brings
	spans     *relay.Spans
	reloading sync.Mutex
	sleepers  *session.Sleepers

	mu      sync.Mutex // guards the fields below
	members []*member
	running sync.WaitGroup
	ctx     context.Context // of Run; nil before
}

// A member is one outbox of a group.
type member struct {
	Outbox
	Observer

	log      zerolog.Logger
	spans    *relay.Spans
	sleepers *session.Sleepers
	stop     context.CancelFunc // nil: it does not run
	leaving  bool

	mu       sync.Mutex // guards the fields below
	cfg      relay.Config
	engine   engine // nil: it is asleep
	aborted  bool
	relayID  int32              // of the relay that fell asleep, until another has taken its place; 0: none has
	asleep   func() relay.State // while it sleeps
	wake     func()             // ends the sleep
	reloaded bool               // since the engine was made
}

// An engine is what a group needs of a [relay.Relay].
type engine interface {
	Run(ctx context.Context) error
	Abort()
	Reload(cfg relay.Config) (changes []string, err error)
	RefuseReload(err error)
	State() relay.State
}

// New returns a Group, or every mistake in the configuration, which all outboxes share but for what
// Outbox holds. The log of each has the field database. It touches no network. observe is called
// once for each outbox, also for those that a reload adds.
func New(shared relay.Config, all []Outbox, observe func(name string) (Observer, error)) (*Group, error) {
	g := &Group{observe: observe, log: shared.Log, spans: shared.Spans, sleepers: session.NewSleepers(shared.Log)}
	for _, o := range all {
		m, err := g.newMember(shared, o)
		if err != nil {
			return nil, err
		}
		g.members = append(g.members, m)
	}
	return g, nil
}

func (g *Group) newMember(shared relay.Config, o Outbox) (*member, error) {
	observer, err := g.observe(o.Name)
	if err != nil {
		return nil, err
	}
	m := &member{Outbox: o, Observer: observer, log: g.log.With().Str("database", o.Name).Logger(), spans: g.spans, sleepers: g.sleepers}
	m.cfg = m.own(shared)
	if err := m.renew(); err != nil {
		m.ended()
		return nil, err
	}
	return m, nil
}

func (m *member) ended() {
	if m.Ended != nil {
		m.Ended()
	}
}

// own returns the configuration of one outbox.
func (m *member) own(cfg relay.Config) relay.Config {
	pool := m.Pool.Copy()
	if pool.MaxConnIdleTime == poolDefaultIdle {
		pool.MaxConnIdleTime = connectionsIdle
	}
	cfg.Pool, cfg.Schema, cfg.Entry, cfg.Hooks = pool, m.Schema, m.Name, m.Hooks
	cfg.Log, cfg.Spans = m.log, m.spans
	if cfg.History != nil {
		cfg.History = cmp.Or(m.History, history.New())
	}
	if cfg.Alerts.PublicURL != "" {
		cfg.Alerts.PublicURL += "/databases/" + m.Name
	}
	return cfg
}

// Run serves all outboxes until ctx is done, and stops them all at once. An outbox that a relay
// cannot work with, such as one with another schema, is logged and tried again.
func (g *Group) Run(ctx context.Context) error {
	g.mu.Lock()
	g.ctx = ctx
	for i, m := range g.members {
		g.start(m, time.Duration(i)*startEvery)
	}
	g.mu.Unlock()
	<-ctx.Done()
	g.mu.Lock()   // after this, nothing is started any more
	g.mu.Unlock() //nolint:staticcheck // as the comment says
	g.running.Wait()
	g.sleepers.Close()
	return nil
}

// start runs a member after a while, until it is stopped, and forgets it then. It does nothing
// before Run, which starts all, and when the group stops.
func (g *Group) start(m *member, after time.Duration) {
	if g.ctx == nil || g.ctx.Err() != nil {
		return
	}
	var ctx context.Context
	ctx, m.stop = context.WithCancel(g.ctx)
	g.running.Go(func() {
		if sleep.For(ctx, after) == nil {
			m.run(ctx)
		}
		m.ended()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.members = slices.DeleteFunc(g.members, func(other *member) bool { return other == m })
	})
}

// run serves one outbox until ctx is done.
func (m *member) run(ctx context.Context) {
	retry := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(firstRetry), backoff.WithMaxInterval(lastRetry), backoff.WithMaxElapsedTime(0))
	var slept session.Sleep // of the relay that fell asleep last
	defer func() { m.leave(slept) }()
	for ctx.Err() == nil {
		serving := m.current()
		if serving == nil {
			return
		}
		began := time.Now()
		err := serving.Run(ctx)
		if asleep := (*relay.Asleep)(nil); errors.As(err, &asleep) {
			slept = m.sleep(ctx, asleep)
			retry.Reset()
			continue
		}
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
		m.log.Error().Err(err).Dur("again_in", wait).Msg("this outbox is not served; the others are; it will be tried again")
		if hook := m.Hooks.DatabaseError; hook != nil {
			hook("serve", err)
		}
		if sleep.For(ctx, wait) != nil {
			return
		}
		if err := m.renew(); err != nil {
			m.log.Error().Err(err).Msg("this outbox is not served any more; the others are; restart the relay")
			return
		}
	}
}

// renew makes a relay, also in place of one that has ended. It fails only for a configuration with
// mistakes, which reloads keep out.
func (m *member) renew() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.make()
}

// make is renew for who holds the mutex.
func (m *member) make() error {
	if m.engine != nil && !m.engine.State().Beat.IsZero() {
		m.relayID, m.asleep = 0, nil
	}
	cfg := m.cfg
	cfg.Resume = m.relayID
	r, err := relay.New(cfg)
	if err != nil {
		return err //nolint:wrapcheck // a mistake of the configuration, as it is
	}
	m.reloaded = false
	if m.engine = r; m.aborted {
		r.Abort()
	}
	if m.Follow != nil {
		m.Follow(wakingAs(r.State, m.asleep), r.CountBacklog)
	}
	return nil
}

// wakingAs returns what says how a relay is: until it has registered, it is as it was when it
// slept.
func wakingAs(state, asleep func() relay.State) func() relay.State {
	if asleep == nil {
		return state
	}
	return func() relay.State {
		now := state()
		if before := asleep(); now.Beat.IsZero() && time.Since(before.Beat) < time.Minute {
			return before
		}
		return now
	}
}

// current returns the relay; nil if none can be made. It wakes one that is asleep.
func (m *member) current() engine {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.engine == nil {
		m.wakeUp()
	}
	return m.engine
}

// A RefusedError says that some outboxes refused a configuration, or their databases did. They keep
// what they had. All others have the new one.
type RefusedError struct {
	Names []string // sorted
	err   error
}

func (e *RefusedError) Error() string { return e.err.Error() }

func (e *RefusedError) Unwrap() error { return e.err }

// Reload puts a configuration into effect for every outbox, as [relay.Relay.Reload] does, and
// returns what changed in any of them. A [RefusedError] names those that keep what they had. Any
// other error means that nothing was applied. An outbox that is new in all is started, and one that
// all lacks is drained and stopped. One with other credentials, or another URL or schema, is
// stopped and started.
func (g *Group) Reload(cfg relay.Config, all []Outbox) (changes []string, err error) {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	staying, leaving := g.compare(all)
	var added []*member
	for _, o := range all {
		if slices.ContainsFunc(staying, func(m *member) bool { return m.Name == o.Name }) {
			continue
		}
		m, err := g.newMember(cfg, o)
		if err != nil {
			for _, m := range added {
				m.ended()
			}
			return nil, err
		}
		added = append(added, m)
	}
	changes, refused := reloadAll(cfg, staying)
	changes = append(changes, g.change(added, leaving)...)
	switch {
	case refused == nil:
		return changes, nil
	case len(refused.Names) == len(staying) && len(added)+len(leaving) == 0:
		return nil, refused.err
	}
	return changes, refused
}

// compare returns the members that all has, and the others.
func (g *Group) compare(all []Outbox) (staying, leaving []*member) {
	for _, m := range g.serving() {
		if slices.ContainsFunc(all, m.isAs) {
			staying = append(staying, m)
		} else {
			leaving = append(leaving, m)
		}
	}
	return staying, leaving
}

// serving returns the members that are not about to leave.
func (g *Group) serving() []*member {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(g.members), func(m *member) bool { return m.leaving })
}

// change starts members and lets others leave.
func (g *Group) change(added, leaving []*member) (changes []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range leaving {
		if m.leaving = true; m.stop != nil {
			m.stop()
		} else {
			g.members = slices.DeleteFunc(g.members, func(other *member) bool { return other == m })
			m.ended()
		}
		m.log.Info().Msg("this outbox is left: what is in flight is finished")
		changes = append(changes, "database "+m.Name+" is left")
	}
	for i, m := range added {
		g.members = append(g.members, m)
		g.start(m, time.Duration(i)*startEvery)
		m.log.Info().Msg("this outbox is served from now on")
		changes = append(changes, "database "+m.Name+" is served")
	}
	return changes
}

func reloadAll(cfg relay.Config, members []*member) (changes []string, refused *RefusedError) {
	var mu sync.Mutex
	var names []string
	var errs []error
	var reloading errgroup.Group
	reloading.SetLimit(reloadsAtOnce)
	for _, m := range members {
		reloading.Go(func() error {
			changed, err := m.reload(cfg)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				names, errs = append(names, m.Name), append(errs, fmt.Errorf("database %s: %w", m.Name, err))
			}
			changes = append(changes, changed...)
			return nil
		})
	}
	_ = reloading.Wait()
	slices.Sort(changes)
	if len(errs) > 0 {
		slices.Sort(names)
		refused = &RefusedError{names, errors.Join(errs...)}
	}
	return slices.Compact(changes), refused
}

func (m *member) reload(cfg relay.Config) ([]string, error) {
	own := m.own(cfg)
	serving := m.current()
	if serving == nil {
		return nil, errNotServed
	}
	changes, err := serving.Reload(own)
	if err == nil {
		m.mu.Lock()
		m.cfg, m.reloaded = own, true
		m.mu.Unlock()
	}
	return changes, err
}

// RefuseReload notes in every outbox why a configuration was not put into effect.
func (g *Group) RefuseReload(err error) {
	for _, m := range g.serving() {
		if serving := m.current(); serving != nil {
			serving.RefuseReload(err)
		}
	}
}

// Abort ends the drain of all relays, as [relay.Relay.Abort] does.
func (g *Group) Abort() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		m.mu.Lock()
		if m.aborted = true; m.engine != nil {
			m.engine.Abort()
		}
		m.mu.Unlock()
	}
}
