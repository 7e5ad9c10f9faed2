package relay

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// routeRows returns the configuration's routes as the database stores them.
func (c Config) routeRows() map[routeRow]bool {
	rows := map[routeRow]bool{}
	for _, route := range c.Routes {
		for _, destination := range route.To {
			rows[routeRow{Pattern: route.Event, Destination: destination}] = true
		}
	}
	return rows
}

// applyRoutes records what a configuration serves and routes, and makes the stored routes those of all live relays
// together. It logs the change, and what others have changed since this relay looked last.
func (r *Relay) applyRoutes(ctx context.Context, instance int32, cfg *Config) (routeChange, error) {
	own := &routing{instance: instance, routes: cfg.routeRows()}
	for _, d := range cfg.Destinations {
		own.destinations = append(own.destinations, d.Name)
	}
	change, err := r.syncRoutes(ctx, own)
	if err != nil {
		return routeChange{}, err
	}
	signal(r.wake.parked)
	r.warnUnserved(ctx)
	return change, nil
}

// withdrawRoutes takes this relay's routes back as soon as it stops. Until its last requests have ended, events would
// otherwise go to destinations that it no longer claims for, and perhaps no other relay does.
func (r *Relay) withdrawRoutes() {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	instance, alive := r.presence.current()
	if !alive {
		return
	}
	ctx, cancel := context.WithTimeout(r.settling, leaveTimeout)
	defer cancel()
	if _, err := r.syncRoutes(ctx, &routing{instance: instance}); err != nil {
		r.databaseError("withdraw routes", err)
	}
}

// followRoutes notices what others have changed about the routes, and removes those that only dead relays had.
func (r *Relay) followRoutes(ctx context.Context) error {
	r.reloads.mu.Lock()
	defer r.reloads.mu.Unlock()
	if _, alive := r.presence.current(); !alive {
		return nil
	}
	change, err := r.syncRoutes(ctx, nil)
	if err == nil && len(change.added) > 0 {
		signal(r.wake.parked)
	}
	return err
}

// syncRoutes synchronises the stored routes and logs what has changed. The caller holds r.reloads.mu.
func (r *Relay) syncRoutes(ctx context.Context, own *routing) (routeChange, error) {
	instance, _ := r.presence.current()
	change, err := r.store.syncRoutes(ctx, own, func(change routeChange) string {
		return fmt.Sprintf("relay %q (instance %d): %s", plain.Clip(r.cfg.Name), instance, change)
	})
	if err != nil {
		return routeChange{}, err
	}
	if known := r.reloads.known; known != nil {
		r.logRoutes(zerolog.WarnLevel, missingRoutes(change.before, known), "route added by another relay or by hand")
		r.logRoutes(zerolog.WarnLevel, missingRoutes(known, change.before), "route removed by another relay or by hand")
	}
	r.reloads.known = change.after
	r.logRoutes(zerolog.InfoLevel, change.added, "route added")
	r.logRoutes(zerolog.WarnLevel, change.removed, "route removed")
	return change, nil
}

// loggedRoutes is how many routes the log names one by one when they are added or removed.
const loggedRoutes = 100

func (r *Relay) logRoutes(level zerolog.Level, routes []routeRow, message string) {
	for _, route := range routes[:min(len(routes), loggedRoutes)] {
		r.cfg.Log.WithLevel(level).Str("event", route.Pattern).Str("destination", route.Destination).Msg(message)
	}
	if more := len(routes) - loggedRoutes; more > 0 {
		r.cfg.Log.WithLevel(level).Int("more", more).Str("change", message).Msg("more routes changed than are logged one by one")
	}
}

// missingRoutes returns the routes that others do not have, sorted.
func missingRoutes(routes, others map[routeRow]bool) (missing []routeRow) {
	for route := range routes {
		if !others[route] {
			missing = append(missing, route)
		}
	}
	slices.SortFunc(missing, func(a, b routeRow) int {
		return cmp.Or(cmp.Compare(a.Pattern, b.Pattern), cmp.Compare(a.Destination, b.Destination))
	})
	return missing
}

// String names the first of the routes that changed.
func (c routeChange) String() string {
	var parts []string
	for _, list := range []struct {
		verb   string
		routes []routeRow
	}{{"added", c.added}, {"removed", c.removed}} {
		if len(list.routes) == 0 {
			continue
		}
		first := list.routes[0]
		part := fmt.Sprintf("%s %s to %s", list.verb, first.Pattern, first.Destination)
		if more := len(list.routes) - 1; more > 0 {
			part += fmt.Sprintf(" and %d more", more)
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

// Matches reports whether events of a type take the route, exactly as the database decides it.
func (r Route) Matches(eventType string) bool {
	parts := strings.Split(r.Event, "*")
	first, last := parts[0], parts[len(parts)-1]
	if len(parts) == 1 {
		return eventType == r.Event
	}
	rest, ok := strings.CutPrefix(eventType, first)
	if !ok || !strings.HasSuffix(rest, last) {
		return false
	}
	rest = strings.TrimSuffix(rest, last)
	for _, part := range parts[1 : len(parts)-1] {
		if _, rest, ok = strings.Cut(rest, part); !ok {
			return false
		}
	}
	return true
}

// warnUnserved logs the destinations with pending deliveries that no relay serves, as after one was renamed. The alert lasts
// until none is left.
func (r *Relay) warnUnserved(ctx context.Context) {
	list, err := unserved(ctx, r.store.pool)
	switch {
	case err != nil:
		r.databaseError("look for unserved deliveries", err)
	case len(list) > 0:
		r.cfg.Log.Warn().Strs("destinations", counts(list)).Msg("deliveries wait for destinations that no running relay serves; " +
			"configure them, or give up what waits: outbox-relay discard --destination " + list[0].Destination)
	}
}

func counts(list []unservedDestination) (texts []string) {
	for _, u := range list {
		texts = append(texts, u.String())
	}
	return texts
}
