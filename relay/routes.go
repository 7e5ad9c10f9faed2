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

// applyRoutes makes the database's routes those of the configuration. A relay does so once, when it starts: among relays
// of different configurations, as during a deploy, the one that started last decides. If an older one did it again at
// each reconnect, events for a new destination would go nowhere, and nobody would notice.
func (r *Relay) applyRoutes(ctx context.Context) error {
	added, removed, err := r.store.syncRoutes(ctx, r.cfg.routeRows())
	if err != nil {
		return err
	}
	for _, route := range added {
		r.cfg.Log.Info().Str("event", route.Pattern).Str("destination", route.Destination).Msg("route added")
	}
	for _, route := range removed {
		r.cfg.Log.Warn().Str("event", route.Pattern).Str("destination", route.Destination).Msg("route removed")
	}
	signal(r.parked)
	return nil
}

// compareRoutes tells when the database's routes are not those of the configuration.
func (r *Relay) compareRoutes(ctx context.Context) error {
	stored, err := r.store.routes(ctx)
	if err != nil {
		return err
	}
	if !maps.Equal(stored, r.cfg.routeRows()) {
		r.cfg.Log.Warn().Msg("the database's routes differ from this relay's configuration: another relay started later; to make them this one's, restart it")
	}
	return nil
}

// unpark releases parked deliveries for which a route exists: of events that came before their route, or whose
// transaction began before it.
func (r *Relay) unpark(ctx context.Context) error {
	for {
		released, err := r.store.releaseParked(ctx, releaseBatch)
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
