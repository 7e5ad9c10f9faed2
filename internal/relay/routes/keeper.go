package routes

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// A Keeper keeps the stored routes for one relay. It is not safe for concurrent use: a relay
// synchronises its routes in one order with its reloads and its registration. An error leaves the
// stored routes as they were.
type Keeper struct {
	DB     pg.Pool
	Name   string                            // of the relay, for the alert
	Log    zerolog.Logger                    // receives each route that was added or removed
	Added  func()                            // is called when parked deliveries may have a route now
	Failed func(operation string, err error) // is called for a statement that failed and is not repeated

	// last is the synchronisation before, with the stored routes as this relay left them; zero:
	// there was none.
	last Change
	// recorded is what the database holds of this relay's configuration; nil: that is not known.
	recorded *routing
	// applied is true until Follow has looked for unserved deliveries. A relay starts without that
	// look: where a session blocks vacuum, it reads an entry of every delivery that was ever
	// pending.
	applied bool
}

// Apply records the destinations and routes of a configuration for the relay that is registered as
// relayID, and makes the stored routes those of all registered relays together. It returns what
// changed by that, and logs it with what others have changed since this keeper looked last. The
// error wraps [pg.ErrTakenForDead] if the relay is not registered any more.
func (k *Keeper) Apply(ctx context.Context, relayID int32, destinations []string, routes []Route) (Change, error) {
	change, err := k.sync(ctx, relayID, &routing{relayID: relayID, destinations: destinations, routes: Rows(routes)})
	if err != nil {
		return Change{}, err
	}
	k.Added()
	k.applied = true
	return change, nil
}

// Withdraw takes back the routes of the relay that is registered as relayID, once it takes no
// events any more. A route that no other registered relay has is removed, unless it was the last
// one of all, or ranges are open: then the others remove it when these have ended.
func (k *Keeper) Withdraw(ctx context.Context, relayID int32) error {
	_, err := k.sync(ctx, relayID, &routing{relayID: relayID})
	return err
}

// Follow notices what others have changed about the routes, and removes those that only dead relays
// had, unless a range of before is open: see [Keeper.Keeps]. After an Apply it also logs which
// deliveries wait for a destination that no relay serves.
func (k *Keeper) Follow(ctx context.Context, relayID int32) error {
	if k.applied {
		k.applied = false
		k.warnUnserved(ctx)
	}
	change, err := k.sync(ctx, relayID, nil)
	if err == nil && len(change.Added) > 0 {
		k.Added()
	}
	return err
}

// Keeps reports whether the keeper has left routes that no registered relay has, because a range is
// open that a relay may have taken by them. A later Follow removes them.
func (k *Keeper) Keeps() bool { return len(k.last.kept) > 0 }

// sync synchronises the stored routes and logs what has changed. While nothing changes, that is one
// statement, which writes nothing.
func (k *Keeper) sync(ctx context.Context, relayID int32, own *routing) (Change, error) {
	if k.last.after != nil && !k.Keeps() && (own == nil || own.equal(k.recorded)) {
		if same, err := isSynchronised(ctx, k.DB, k.last.state); err != nil || same {
			return Change{}, err
		}
	}
	if own != nil {
		k.recorded = nil // until it is known to be committed
	}
	change, err := syncRoutes(ctx, k.DB, own, k.last, func(change Change) string {
		return fmt.Sprintf("relay %q (id %d): %s", plain.Clip(k.Name), relayID, change)
	})
	if err != nil {
		return Change{}, err
	}
	if known := k.last.after; known != nil {
		k.logRoutes(zerolog.WarnLevel, missingRoutes(change.before, known), "route added by another relay or by hand")
		k.logRoutes(zerolog.WarnLevel, missingRoutes(known, change.before), "route removed by another relay or by hand")
	}
	k.last = Change{after: change.after, state: change.state, kept: change.kept}
	if own != nil {
		k.recorded = own
	}
	k.logRoutes(zerolog.InfoLevel, change.Added, "route added")
	k.logRoutes(zerolog.WarnLevel, change.Removed, "route removed")
	return change, nil
}

// loggedRoutes is how many routes the log names one by one when they are added or removed.
const loggedRoutes = 100

func (k *Keeper) logRoutes(level zerolog.Level, routes []Row, message string) {
	for _, route := range routes[:min(len(routes), loggedRoutes)] {
		k.Log.WithLevel(level).Str("event", route.Pattern).Str("destination", route.Destination).Msg(message)
	}
	if more := len(routes) - loggedRoutes; more > 0 {
		k.Log.WithLevel(level).Int("more", more).Str("change", message).Msg("more routes changed than are logged one by one")
	}
}

// missingRoutes returns the routes that others do not have, sorted.
func missingRoutes(routes, others map[Row]bool) (missing []Row) {
	for route := range routes {
		if !others[route] {
			missing = append(missing, route)
		}
	}
	slices.SortFunc(missing, func(a, b Row) int {
		return cmp.Or(cmp.Compare(a.Pattern, b.Pattern), cmp.Compare(a.Destination, b.Destination))
	})
	return missing
}

// String names the first of the routes that were added and removed, and how many more there are.
func (c Change) String() string {
	var parts []string
	for _, list := range []struct {
		verb   string
		routes []Row
	}{{"added", c.Added}, {"removed", c.Removed}} {
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

// warnUnserved logs the destinations with pending deliveries that no relay serves, as after one was
// renamed. The alert lasts until none is left.
func (k *Keeper) warnUnserved(ctx context.Context) {
	list, err := unserved(ctx, k.DB)
	switch {
	case err != nil:
		k.Failed("look for unserved deliveries", err)
	case len(list) > 0:
		k.Log.Warn().Strs("destinations", counts(list)).Msg("deliveries wait for destinations that no running relay serves; " +
			"configure them, or give up what waits: outbox-relay discard --destination " + plain.ShellWord(list[0].Destination) + " --status pending")
	}
}

func counts(list []Unserved) (texts []string) {
	for _, u := range list {
		texts = append(texts, u.String())
	}
	return texts
}
