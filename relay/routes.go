package relay

import "context"

// releaseBatch is how many parked deliveries one statement releases.
const releaseBatch = 1000

// applyRoutes makes the database's routes those of the configuration and releases what they unpark.
func (r *Relay) applyRoutes(ctx context.Context) error {
	wanted := map[routeRow]bool{}
	for _, route := range r.cfg.Routes {
		for _, destination := range route.To {
			wanted[routeRow{Pattern: route.Event, Destination: destination}] = true
		}
	}
	added, removed, err := r.store.syncRoutes(ctx, wanted)
	if err != nil {
		return err
	}
	for _, route := range added {
		r.cfg.Log.Info().Str("event", route.Pattern).Str("destination", route.Destination).Msg("route added")
	}
	for _, route := range removed {
		r.cfg.Log.Warn().Str("event", route.Pattern).Str("destination", route.Destination).Msg("route removed")
	}
	return r.unpark(ctx)
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
