package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// RouteStatus is one stored route.
type RouteStatus struct {
	Event       string `json:"event"` // the pattern
	Destination string `json:"destination"`
	// Pending deliveries of the destination, by whatever route they came; at most 10,001 are counted.
	Pending int64 `json:"pending"`
}

// Routes lists the routes that the database follows, which are those of the relay that started last.
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

// ErrUnserved says that the database holds pending deliveries for destinations that the configuration does not have.
var ErrUnserved = errors.New("pending deliveries have a destination that is not configured")

// Unserved counts what is pending for one destination that is not configured.
type Unserved struct {
	Destination string
	Pending     int64 // at most 10,001
}

// Unserved returns the destinations with pending deliveries that are not among the configured ones, sorted; parked
// deliveries have no destination and do not count. It costs one lookup for each destination and at most 10,001 index
// entries for each that it returns.
func (o *Ops) Unserved(ctx context.Context, configured []string) ([]Unserved, error) {
	list, err := unserved(ctx, o.pool, configured)
	if err != nil {
		return nil, fmt.Errorf("look for destinations that are not configured: %w", err)
	}
	return list, nil
}

// checkUnserved refuses to run where a destination was renamed or removed before it was empty: nobody would send what
// still waits for it, and only its growing lag would tell.
func (r *Relay) checkUnserved(ctx context.Context) error {
	cfg := r.config()
	configured := make([]string, len(cfg.Destinations))
	for i, d := range cfg.Destinations {
		configured[i] = d.Name
	}
	list, err := unserved(ctx, r.store.pool, configured)
	if err != nil {
		return fmt.Errorf("look for destinations that are not configured: %w", err)
	}
	if len(list) == 0 {
		return nil
	}
	if cfg.AllowUnserved {
		r.cfg.Log.Warn().Strs("destinations", counts(list)).Msg("deliveries wait for destinations that this relay does not serve")
		return nil
	}
	return unservedError(list)
}

// unservedError says what to do about what would be left behind.
func unservedError(list []Unserved) error {
	return fmt.Errorf("%w: %s. Put it back until it is empty, or give up what waits: outbox-relay discard --destination %s; "+
		"where another relay serves it, or to leave it: outbox-relay run --force, or relay.allow_unserved: true",
		ErrUnserved, strings.Join(counts(list), ", "), list[0].Destination)
}

func counts(list []Unserved) (texts []string) {
	for _, u := range list {
		texts = append(texts, u.String())
	}
	return texts
}

// String says the name and how many wait.
func (u Unserved) String() string {
	if u.Pending > 10_000 {
		return u.Destination + " (more than 10000)"
	}
	return fmt.Sprintf("%s (%d)", u.Destination, u.Pending)
}
