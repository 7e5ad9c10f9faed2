package take

import (
	"context"
	"fmt"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const selectRoutes = `SELECT pattern, destination FROM outbox_route`

// readRoutes returns the stored routes.
func (t *Taker) readRoutes(ctx context.Context) ([]intake.Route, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	return rows.Structs[intake.Route](ctx, t.DB, "read routes", selectRoutes)
}

const selectClosedDestinations = `SELECT s.destination FROM outbox_destination s WHERE ` + pg.IsHeld

// readClosedDestinations returns those of which the relay may send nothing now: paused ones, and
// ones whose breaker is open or that another relay tries.
func (t *Taker) readClosedDestinations(ctx context.Context, relayID int32) (closed map[string]bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	names, err := rows.Values[string](ctx, t.DB, "read states of destinations", selectClosedDestinations, relayID)
	if err != nil {
		return nil, fmt.Errorf("read states of destinations: %w", err)
	}
	closed = make(map[string]bool, len(names))
	for _, name := range names {
		closed[name] = true
	}
	return closed, nil
}
