package relay

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
)

// reloads orders reloads, one after the other and with what Run passes through.
type reloads struct {
	mu sync.Mutex
	// running is done when this relay is told to stop; nil until it runs.
	running context.Context
	// recorded is the number under which the routes of the configuration in effect are recorded;
	// 0: none.
	recorded int32
	keeper   routes.Keeper
	// salt of digests, and the digests that are recorded. Empty: none are.
	salt    string
	digests digests
	// refused says why the latest configuration is not in effect; empty: it is. reported is what of
	// it is recorded.
	refused, reported string
}

// Reload puts another configuration into effect while the relay runs, or before, and returns what
// changed, one text a setting or destination; none: nothing did. It applies everything that can
// change or, with an error, nothing: the configuration's mistakes as joined [Problem]s, or why the
// database did not take the routes. While the database is away the routes follow when it is back.
//
// Requests in flight end as they began, with their URL, secrets and timeout; those after them use
// the new ones. Stored routes of the configuration that were removed by hand are restored, also
// when the configuration is unchanged.
//
// Pool, Pooler, Schema, AllowSuperuser, Name, Environment, PollInterval, SleepAfter, Lease,
// Watching, and whether there is a History, need a restart: they are compared, named in the log and
// among the changes, and stay what they are. Version, Log, Hooks and Spans stay, too. It is safe
// for concurrent use.
func (r *Relay) Reload(cfg Config) (changes []string, err error) {
	changes, err = r.reload(cfg)
	r.reloaded(changes, err)
	return changes, err
}

// RefuseReload notes that a configuration was to be put into effect and has mistakes, until a
// [Relay.Reload] succeeds: status shows it, and an alert tells it. It is safe for concurrent use.
func (r *Relay) RefuseReload(err error) { r.reloaded(nil, err) }

func (r *Relay) reloaded(changes []string, err error) {
	r.reloads.mu.Lock()
	if r.reloads.refused = ""; err != nil {
		r.reloads.refused = err.Error()
	}
	r.reloads.mu.Unlock()
	signal(r.signals.routes) // which reports it
	if hook := r.cfg.Hooks.Reloaded; hook != nil {
		hook(changes, err)
	}
}

// report records in the relay's row what others must know of its configuration. The caller holds
// r.reloads.mu.
func (r *Relay) report(ctx context.Context, relayID int32) error {
	s := &r.reloads
	if s.salt == "" {
		salt, err := r.store.salt(ctx)
		if err != nil {
			return err
		}
		s.salt = salt
	}
	if d := newDigests(r.config().Destinations, s.salt); !reflect.DeepEqual(d, s.digests) {
		if err := r.store.recordDigests(ctx, relayID, d); err != nil {
			return err
		}
		s.digests = d
	}
	if s.refused != s.reported {
		if err := r.store.recordReload(ctx, relayID, s.refused); err != nil {
			return err
		}
		s.reported = s.refused
	}
	return nil
}

func (r *Relay) reload(cfg Config) (changes []string, err error) {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	ctx := context.Background()
	if r.reloads.running != nil {
		ctx = r.reloads.running
	}
	if ctx.Err() != nil {
		return nil, errors.New("the relay is stopping; its configuration stays as it is")
	}
	now := r.config()
	next, later, err := r.merge(cfg)
	if err != nil {
		return nil, err
	}
	changes = append(now.differences(next), later...)
	endpoints, err := r.lanes.Endpoints(next.Destinations)
	if err != nil {
		return nil, err
	}
	restored, err := r.reroute(ctx, next)
	if err != nil {
		return nil, err
	}
	if restored > 0 {
		changes = append(changes, fmt.Sprintf("routes: %d restored", restored))
	}
	if err := r.lanes.Set(time.Now(), next.Destinations, endpoints); err != nil {
		return nil, err
	}
	r.effective.Store(next)
	signal(r.signals.reloaded)
	signal(r.signals.routes)
	signal(r.signals.alerts)
	r.mailbox.post(agenda.CauseSweep) // for a lane that is new, or may hold more
	r.waiting.Sweep()                 // a failed delivery may block its key no longer
	if len(changes) > 0 {
		r.cfg.Log.Info().Strs("changes", changes).Msg("configuration read again, and in effect")
	}
	if len(later) > 0 {
		r.cfg.Log.Warn().Strs("settings", later).Msg("some settings change only when the relay is restarted; all others are in effect")
	}
	return changes, nil
}

// merge returns what a configuration comes to in this relay, and which of its settings need a
// restart.
func (r *Relay) merge(cfg Config) (next *Config, later []string, err error) {
	cfg, err = complete(cfg)
	if err != nil {
		return nil, nil, err
	}
	later = r.cfg.restarts(&cfg)
	cfg.stay(&r.cfg)
	if err := check.Join(cfg.Validate()); err != nil {
		return nil, nil, fmt.Errorf("with %s, which stays what it is until a restart: %w", strings.Join(later, " and "), err)
	}
	return &cfg, later, nil
}

// reroute applies the routes of a configuration, and returns how many of an unchanged one were
// missing.
func (r *Relay) reroute(ctx context.Context, next *Config) (restored int, err error) {
	// Not while this relay is away: the session applies what is in effect when it is back.
	relayID, alive := r.current()
	if alive {
		var change routes.Change
		change, err = r.applyRoutes(ctx, relayID, next)
		switch {
		case err == nil && len(routes.Differences(r.config().Routes, next.Routes)) == 0:
			return len(change.Added), nil
		case err == nil:
			return 0, nil
		case errors.Is(err, pg.ErrTakenForDead):
			err = nil
		}
	}
	r.reloads.recorded = 0 // after an error, too: the database may have taken them, although no answer came
	return 0, err
}

// begin notes that the relay runs until ctx is done.
func (s *reloads) begin(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = ctx
}

// meetRoutes applies the routes of the configuration in effect before this relay counts as alive,
// unless they are recorded already, as after a lost connection.
func (r *Relay) meetRoutes(ctx context.Context, alive func()) error {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	relayID, _ := r.current()
	if err := r.restoreRoutes(ctx, relayID); err != nil {
		return err
	}
	alive()
	signal(r.signals.routes) // for what others changed while this relay was away
	return nil
}

// restoreRoutes applies the routes of the configuration in effect, unless they are recorded. The
// caller holds r.reloads.mu.
func (r *Relay) restoreRoutes(ctx context.Context, relayID int32) error {
	// A relay that is stopping has withdrawn its routes.
	stopping := r.reloads.running != nil && r.reloads.running.Err() != nil
	if stopping || r.reloads.recorded == relayID {
		return nil
	}
	if _, err := r.applyRoutes(ctx, relayID, r.config()); err != nil {
		return err
	}
	r.reloads.recorded, r.reloads.digests, r.reloads.reported = relayID, digests{}, ""
	return nil
}

// withdrawTimeout bounds how long a stopping relay waits for its routes to be taken back.
const withdrawTimeout = 2 * time.Second

// applyRoutes records what a configuration serves and routes. The caller holds r.reloads.mu.
func (r *Relay) applyRoutes(ctx context.Context, relayID int32, cfg *Config) (routes.Change, error) {
	return r.reloads.keeper.Apply(ctx, relayID, post.Names(cfg.Destinations), cfg.Routes)
}

// withdrawRoutes takes this relay's routes back as soon as it takes no events any more. Until its
// last requests have ended, events would otherwise go to destinations that it no longer claims for,
// and perhaps no other relay does.
func (r *Relay) withdrawRoutes() {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	relayID, alive := r.current()
	if !alive {
		return
	}
	ctx, cancel := context.WithTimeout(r.phases.Settling, withdrawTimeout)
	defer cancel()
	if err := r.reloads.keeper.Withdraw(ctx, relayID); err != nil {
		r.databaseError("withdraw routes", err)
	}
}

// followRoutes notices what others have changed about the routes, and removes those that only dead
// relays had. Where it is not known what the database has of this relay, it restores that. It asks
// to be called again after that failed, and while open ranges keep some routes.
func (r *Relay) followRoutes(ctx context.Context) (again bool, err error) {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	relayID, alive := r.current()
	if !alive {
		return false, nil
	}
	if err := r.restoreRoutes(ctx, relayID); err != nil {
		return true, err
	}
	if err := r.report(ctx, relayID); err != nil {
		return false, err
	}
	err = r.reloads.keeper.Follow(ctx, relayID)
	return r.reloads.keeper.Keeps(), err
}

// giveBackRemoved empties the queues of removed lanes. Their senders would do it too, but only when
// their POSTs have ended.
func (r *Relay) giveBackRemoved() {
	for _, l := range r.lanes.All() {
		if l.IsRemoved() {
			r.senders.GiveBack(l, policy.ReasonRemoved)
		}
	}
}
