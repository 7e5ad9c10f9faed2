package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// ErrUnknownDestination says that nothing in the database bears a destination's name: no route, no state, and no
// delivery that is pending or failed.
var ErrUnknownDestination = errors.New("unknown destination")

// A Pause is what Pause and Resume found and did.
type Pause struct {
	Destination string `json:"destination"`
	// Paused now.
	Paused bool `json:"paused"`
	// Changed by this call; false: it was so before.
	Changed bool `json:"changed"`
	// Reason of a pause that stands, or stood.
	Reason string `json:"paused_reason,omitempty"`
	// Breaker now, as in [DestinationStatus].
	Breaker string `json:"breaker"`
	// BreakerReset: this call has closed the breaker.
	BreakerReset bool `json:"breaker_reset"`
}

// Destinations returns the names that stand in the database, sorted: in its routes, in the state of destinations, and in
// deliveries that are pending or failed. It costs a few lookups for each name.
func (o *Outbox) Destinations(ctx context.Context) ([]string, error) {
	list, err := destinationNames(ctx, o.pool)
	if err != nil {
		return nil, fmt.Errorf("list destinations: %w", err)
	}
	return list, nil
}

// known returns nil if the database knows a destination, and otherwise an error that wraps [ErrUnknownDestination].
func (o *Outbox) known(ctx context.Context, destination string) error {
	list, err := o.Destinations(ctx)
	if err == nil && !slices.Contains(list, destination) {
		return fmt.Errorf("%w %q", ErrUnknownDestination, destination)
	}
	return err
}

// Pause keeps relays from claiming for a destination, from their next claim on; what is in flight finishes. A reason
// replaces that of a pause that stands already; an empty one does not. The error wraps [ErrUnknownDestination] for a
// name that the database does not know: a misspelt pause must not look like one.
func (o *Outbox) Pause(ctx context.Context, destination, reason string) (Pause, error) {
	if err := o.known(ctx, destination); err != nil {
		return Pause{}, err
	}
	p, err := pauseDestination(ctx, o.pool, destination, reason)
	if err != nil {
		return Pause{}, fmt.Errorf("pause %s: %w", destination, err)
	}
	return p, nil
}

// Resume ends a pause. A breaker that is open stays so, unless it is to be reset: then deliveries flow at once, at the
// risk that the destination is still down, and its alert is resolved. The error wraps [ErrUnknownDestination] as that of
// Pause does.
func (o *Outbox) Resume(ctx context.Context, destination string, resetBreaker bool) (Pause, error) {
	if err := o.known(ctx, destination); err != nil {
		return Pause{}, err
	}
	p, err := resumeDestination(ctx, o.pool, destination, resetBreaker)
	if err != nil {
		return Pause{}, fmt.Errorf("resume %s: %w", destination, err)
	}
	if p.Changed || p.BreakerReset {
		return p, o.tellRelays(ctx)
	}
	return p, nil
}

// Head is the delivery of an ordering key that the later ones wait for.
type Head struct {
	Delivery
	// Behind counts what waits for it, up to 10,001.
	Behind int64 `json:"behind"`
}

// HeadOfKey returns the first pending or failed delivery of an ordering key to a destination; nil if there is none, and
// nothing waits.
func (o *Outbox) HeadOfKey(ctx context.Context, destination, orderingKey string) (*Head, error) {
	heads, behind, err := headOfKey(ctx, o.pool, destination, orderingKey)
	if err != nil {
		return nil, fmt.Errorf("find the head of the ordering key: %w", err)
	}
	if len(heads) == 0 {
		return nil, nil
	}
	return &Head{heads[0], behind}, nil
}
