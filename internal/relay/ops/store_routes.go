package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// RouteStatus is one stored route.
type RouteStatus struct {
	Event       string `json:"event"` // the pattern
	Destination string `json:"destination"`
	// Pending deliveries of the destination, by whatever route they came; at most 10,001 are
	// counted.
	Pending int64 `json:"pending"`
	// Relays that were configured with the route. None: the last of them has left, and no other one
	// has come since.
	Relays []RelayName `json:"relays"`
}

// A RelayName says which relay it is.
type RelayName struct {
	RelayID int32  `json:"relay_id,string"`
	Name    string `json:"name"`
}

const selectRouteStatus = `
SELECT r.pattern, r.destination,
       (SELECT count(*) FROM (VALUES (r.destination)) ` + pg.PendingOf + `),
       (SELECT coalesce(jsonb_agg(jsonb_build_object('relay_id', n.id::text, 'name', n.name) ORDER BY n.id), '[]')
        FROM outbox_relay_route o JOIN outbox_relay n ON n.id = o.relay_id
        WHERE o.pattern = r.pattern AND o.destination = r.destination)
FROM outbox_route r
WHERE ($1 = '' OR $1 LIKE r.like_pattern)
ORDER BY r.pattern, r.destination`

// Routes lists the stored routes that an event of the given type takes; the event is parked if
// there are none. The empty type stands for all routes: those of all registered relays together or,
// if none is registered, of the last ones.
func (o *Outbox) Routes(ctx context.Context, eventType string) ([]RouteStatus, error) {
	return rows.Structs[RouteStatus](ctx, o.pool, "list routes", selectRouteStatus, eventType)
}
