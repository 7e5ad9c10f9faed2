package relay

import (
	"context"
	"fmt"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/plain"
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
func (o *Ops) Routes(ctx context.Context) ([]RouteStatus, error) {
	list, err := routeStatus(ctx, o.pool)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return list, nil
}

// RoutesOf lists the stored routes that an event of a type takes; none: it would be parked.
func (o *Ops) RoutesOf(ctx context.Context, eventType string) ([]RouteStatus, error) {
	list, err := routesOf(ctx, o.pool, eventType)
	if err != nil {
		return nil, fmt.Errorf("find routes: %w", err)
	}
	return list, nil
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

// An unservedDestination is one with pending deliveries that no registered relay serves.
type unservedDestination struct {
	Destination string `json:"destination"`
	Pending     int    `json:"pending"` // at most 10,001
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

// String says the name and how many wait.
func (u unservedDestination) String() string {
	return fmt.Sprintf("%s (%s)", u.Destination, plain.UpTo(u.Pending, 10_000))
}
