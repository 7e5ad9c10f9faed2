package ops

import (
	"context"
	"fmt"
)

// RouteStatus is one stored route.
type RouteStatus struct {
	Event       string `json:"event"` // the pattern
	Destination string `json:"destination"`
	// Pending deliveries of the destination, by whatever route they came; at most 10,001 are counted.
	Pending int64 `json:"pending"`
	// Relays that were configured with the route. None: the last of them has left, and no other one has come since.
	Relays []RelayName `json:"relays"`
}

// A RelayName says which relay it is.
type RelayName struct {
	Instance int32  `json:"instance"`
	Name     string `json:"name"`
}

// Routes lists the routes that producers' events take: those of all registered relays together or, without any, those of the
// last ones.
func (o *Outbox) Routes(ctx context.Context) ([]RouteStatus, error) {
	list, err := routeStatus(ctx, o.pool)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return list, nil
}

// RoutesOf lists the stored routes that an event of a type takes; none: it would be parked.
func (o *Outbox) RoutesOf(ctx context.Context, eventType string) ([]RouteStatus, error) {
	list, err := routesOf(ctx, o.pool, eventType)
	if err != nil {
		return nil, fmt.Errorf("find routes: %w", err)
	}
	return list, nil
}
