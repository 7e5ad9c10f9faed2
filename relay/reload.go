package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// reloads orders reloads, one after the other and with what Run passes through.
type reloads struct {
	mu sync.Mutex
	// running is done when this relay is told to stop; nil until it runs.
	running context.Context
	// fit: the database is known to hold nothing that would be left behind.
	fit bool
	// routed: the stored routes have been made those of the configuration.
	routed bool

	done chan struct{} // there may be an archive to plan anew, and removed lanes to empty
}

// config returns the configuration in effect, which is never changed, only replaced. What a reload cannot change stands
// in r.cfg, and nothing else does.
func (r *Relay) config() *Config { return r.effective.Load() }

// Reload puts another configuration into effect while the relay runs, or before, and returns what changed, one text a
// setting or destination; none: nothing did. It applies everything that can change or, with an error, nothing: the
// configuration's mistakes as joined [Problem]s, [ErrUnserved] for a destination that was removed while deliveries wait
// for it, a database that would not take the routes.
//
// Requests in flight end as they began, with their URL, secrets and timeout; those after them use the new ones. Routes
// are written only where they differ from those that this relay had: an unchanged configuration does not undo what
// another relay has decided since.
//
// Pool, Pooler, Schema, Name, Environment, PollInterval, Lease and Watching need a restart: they are compared, named in
// the log and among the changes, and stay what they are. Version, Log and Hooks stay, too. It is safe for concurrent use.
func (r *Relay) Reload(cfg Config) (changes []string, err error) {
	changes, err = r.reload(cfg)
	if hook := r.cfg.Hooks.Reloaded; hook != nil {
		hook(changes, err)
	}
	return changes, err
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
	endpoints, err := r.newEndpoints(next)
	if err != nil {
		return nil, err
	}
	if err := r.reroute(ctx, next); err != nil {
		return nil, err
	}
	r.effective.Store(next)
	r.lanes.replace(time.Now(), next.Destinations, endpoints)
	signal(r.reloads.done)
	signal(r.alerts)
	r.wake.notify(true) // for a lane that is new, or may hold more
	if len(changes) > 0 {
		r.cfg.Log.Info().Strs("changes", changes).Msg("configuration read again, and in effect")
	}
	if len(later) > 0 {
		r.cfg.Log.Warn().Strs("settings", later).Msg("some settings change only when the relay is restarted; all others are in effect")
	}
	return changes, nil
}

// merge returns what a configuration comes to in this relay, and which of its settings need a restart.
func (r *Relay) merge(cfg Config) (next *Config, later []string, err error) {
	cfg, err = complete(cfg)
	if err != nil {
		return nil, nil, err
	}
	later = r.cfg.restarts(&cfg)
	cfg.stay(&r.cfg)
	var mistakes []error
	for _, problem := range cfg.Validate() {
		mistakes = append(mistakes, problem)
	}
	if err := errors.Join(mistakes...); err != nil {
		return nil, nil, fmt.Errorf("with %s, which stays what it is until a restart: %w", strings.Join(later, " and "), err)
	}
	return &cfg, later, nil
}

// newEndpoints makes those of all destinations that differ. One that follows files is made anew each time: whether they
// are still the same files cannot be told.
func (r *Relay) newEndpoints(next *Config) (endpoints map[string]*endpoint, err error) {
	now := r.config()
	endpoints = map[string]*endpoint{}
	for _, d := range next.Destinations {
		i := slices.IndexFunc(now.Destinations, func(old Destination) bool { return old.Name == d.Name })
		if i >= 0 && !d.follows() && !now.Destinations[i].follows() && now.Destinations[i].sameEgress(d) && len(now.Destinations[i].differences(d)) == 0 {
			continue
		}
		if endpoints[d.Name], err = newEndpoint(d, r.cfg.Version); err != nil {
			return nil, err
		}
	}
	return endpoints, nil
}

// reroute makes the stored routes those of a configuration, unless they differ in nothing from those in effect, and
// refuses to leave deliveries behind.
func (r *Relay) reroute(ctx context.Context, next *Config) error {
	now := r.config()
	removed := missing(now.Destinations, next.Destinations)
	if next.AllowUnserved {
		removed = nil
	}
	same := len(now.routeChanges(next)) == 0
	if same && len(removed) == 0 {
		return nil
	}
	// Under the lock, whoever is not alive has yet to come by meetRoutes.
	if _, alive := r.session.current(); !alive {
		if len(removed) > 0 && r.reloads.fit {
			return fmt.Errorf("remove destination %s: the database is away, and cannot say whether deliveries wait for it; reload when it is back", strings.Join(removed, ", "))
		}
		r.reloads.routed = r.reloads.routed && same
		return nil
	}
	return r.applyRoutes(ctx, next, func(ctx context.Context, q querier) error { return leavesNothing(ctx, q, removed) })
}

// leavesNothing returns an error if something waits for one of the destinations.
func leavesNothing(ctx context.Context, q querier, destinations []string) error {
	if len(destinations) == 0 {
		return nil
	}
	list, err := unserved(ctx, q, []string{})
	if err != nil {
		return fmt.Errorf("look for deliveries: %w", err)
	}
	list = slices.DeleteFunc(list, func(u Unserved) bool { return !slices.Contains(destinations, u.Destination) })
	if len(list) == 0 {
		return nil
	}
	return unservedError(list)
}

// begin notes that the relay runs until ctx is done.
func (s *reloads) begin(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = ctx
}

// fit looks for what the configuration would leave behind. Reloads that come after it look for themselves.
func (r *Relay) fit(ctx context.Context) error {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	if err := r.checkUnserved(ctx); err != nil {
		return err
	}
	r.reloads.fit = true
	return nil
}

// meetRoutes makes the database's routes those of the configuration or, if that has been done, compares them, before
// this relay counts as alive.
func (r *Relay) meetRoutes(ctx context.Context, alive func()) error {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	if r.reloads.routed {
		if err := r.compareRoutes(ctx); err != nil {
			return err
		}
	} else if err := r.applyRoutes(ctx, r.config(), nil); err != nil {
		return err
	}
	r.reloads.routed = true
	alive()
	return nil
}

// replace makes the lanes those of the destinations, with the endpoints that are new.
func (ls *lanes) replace(now time.Time, destinations []Destination, endpoints map[string]*endpoint) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	active := make([]*lane, 0, len(destinations))
	for _, d := range destinations {
		l, known := ls.byName[d.Name]
		switch e := endpoints[d.Name]; {
		case !known:
			l = newLane(e)
			ls.byName[d.Name] = l
		case e != nil:
			l.configure(now, e)
		}
		active = append(active, l)
	}
	for _, l := range ls.active {
		if !slices.Contains(active, l) {
			l.remove()
		}
	}
	ls.active = active
}

// configure makes the next requests go to another endpoint, also of a lane that was removed before.
func (l *lane) configure(now time.Time, e *endpoint) {
	l.mu.Lock()
	old := l.endpoint
	l.endpoint, l.removed = e, false
	if e.url.Host != old.url.Host {
		l.flow = newFlow(e.destination.MaxInFlight, e.destination.RateLimit) // what the other one can bear says nothing
	} else {
		l.flow.configure(now, e.destination.MaxInFlight, e.destination.RateLimit)
	}
	l.breaker.configure(now, e.destination.Breaker)
	l.mu.Unlock()
	old.transport.CloseIdleConnections()
}

// remove keeps a lane from sending anything that is not on its way.
func (l *lane) remove() {
	l.mu.Lock()
	l.removed = true
	transport := l.transport
	l.mu.Unlock()
	transport.CloseIdleConnections()
}

// giveBackRemoved empties the queues of removed lanes. Their senders would do it too, but only when their POSTs have
// ended.
func (r *Relay) giveBackRemoved() {
	active := r.laneList()
	for _, l := range r.lanes.all() {
		if slices.Contains(active, l) {
			continue
		}
		for _, d := range l.unsent() {
			r.settle(l, newSettlement(d, verdict{outcome: Hold, reason: ReasonRemoved}, RetryPolicy{}, time.Now(), 0, 0))
		}
	}
}

// all returns the lanes of all destinations that this relay ever had.
func (ls *lanes) all() (list []*lane) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.byName {
		list = append(list, l)
	}
	return list
}

// missing returns the names of the destinations that others do not have.
func missing(destinations, others []Destination) (names []string) {
	for _, d := range destinations {
		if !slices.ContainsFunc(others, func(o Destination) bool { return o.Name == d.Name }) {
			names = append(names, d.Name)
		}
	}
	return names
}
