package relay

import (
	"context"
	"maps"
)

// releaseBatch is how many parked deliveries one statement releases.
const releaseBatch = 1000

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

// applyRoutes makes the database's routes those of a configuration, unless check, which may be nil, finds something that
// speaks against what they are then. A relay does so when it starts, and when a reload changes its routes: among relays
// of different configurations, as during a deploy, the one that did so last decides. If an older one did it again at
// each reconnect, events for a new destination would go nowhere, and nobody would notice.
func (r *Relay) applyRoutes(ctx context.Context, cfg *Config, check func(context.Context, querier) error) error {
	added, removed, err := r.store.syncRoutes(ctx, cfg.routeRows(), check)
	if err != nil {
		return err
	}
	for _, route := range added[:min(len(added), toldRoutes)] {
		r.cfg.Log.Info().Str("event", route.Pattern).Str("destination", route.Destination).Msg("route added")
	}
	for _, route := range removed[:min(len(removed), toldRoutes)] {
		r.cfg.Log.Warn().Str("event", route.Pattern).Str("destination", route.Destination).Msg("route removed")
	}
	if len(added) > toldRoutes || len(removed) > toldRoutes {
		r.cfg.Log.Info().Int("added", len(added)).Int("removed", len(removed)).Msg("more routes than are told one by one")
	}
	signal(r.parked)
	return nil
}

// toldRoutes is how many routes the log names one by one when they are added or removed.
const toldRoutes = 100

// compareRoutes tells when the database's routes are not those of the configuration.
func (r *Relay) compareRoutes(ctx context.Context) error {
	stored, err := r.store.routes(ctx)
	if err != nil {
		return err
	}
	if !maps.Equal(stored, r.config().routeRows()) {
		r.cfg.Log.Warn().Msg("the database's routes differ from this relay's configuration: another relay started or reloaded later; to make them this one's, restart it")
	}
	return nil
}

// unpark releases parked deliveries for which a route exists: of events that came before their route, or whose
// transaction began before it.
func (r *Relay) unpark(ctx context.Context) error {
	for {
		released, err := r.chores.releaseParked(ctx, releaseBatch)
		if err != nil {
			return err
		}
		if released > 0 {
			r.cfg.Log.Info().Int("deliveries", released).Msg("released parked deliveries")
			r.wake.notify(false)
		}
		if released < releaseBatch {
			return nil
		}
	}
}
