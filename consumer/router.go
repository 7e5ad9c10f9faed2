package consumer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
)

// ErrUnknownEvent is the error of [Router.Dispatch] for an event without a handler, found by
// errors.Is. An inbox keeps such an event as "ignored" until it is replayed. The middleware keeps
// no payloads, so it answers 422 with the problem event-unknown: the relay marks the delivery
// failed, alerts, and can replay it.
var ErrUnknownEvent = verdict.ErrUnknownEvent

// unknownEventError names the event that has no handler.
type unknownEventError struct {
	eventType string
	version   int
}

func (e *unknownEventError) Error() string {
	if e.eventType == "" {
		return "no handler for an event without a type"
	}
	return fmt.Sprintf("no handler for %s version %d", e.eventType, e.version)
}

func (e *unknownEventError) Is(target error) bool { return target == ErrUnknownEvent }

// Router calls the handler that is registered for an event's type and version. The zero value has
// no handlers. Register all handlers before the first event; after that a Router is safe for
// concurrent use. Its method Dispatch is a [Handler] for [New], sqlconsumer.New and inboxes.
type Router[Tx any] struct {
	exact    map[route]Handler[Tx]
	globs    []globRoute[Tx] // in the order in which they are tried
	fallback Handler[Tx]
	used     atomic.Bool
}

// route is a pattern and a version. Version 0 means any.
type route struct {
	pattern string
	version int
}

type globRoute[Tx any] struct {
	route
	literal int // characters other than '*'
	handle  Handler[Tx]
}

// NewRouter returns a Router without handlers, for [New] and inboxes.
func NewRouter() *Router[pgx.Tx] { return &Router[pgx.Tx]{} }

// Handle registers handle for events whose type matches pattern and whose version is version.
// Version 0 means any. A pattern is one of the relay's routes: '*' matches any run of characters,
// also an empty one. It has 1 to 255 printable ASCII characters without blanks. No pattern matches
// an event without a type; only Fallback takes it. The first match of this list handles an event:
//
// 1. the exact type and version
// 2. the exact type, any version
// 3. the pattern with the most characters beside '*', with a version before any version
// 4. the handler of [Router.Fallback]
//
// Handle panics when pattern or version is invalid, handle is nil, the pattern and version are
// taken, two patterns could claim an event with equal right, or an event was dispatched already.
func (r *Router[Tx]) Handle(pattern string, version int, handle Handler[Tx]) {
	added := route{pattern: pattern, version: version}
	r.mayRegister(added.String(), handle)
	switch {
	case !validPattern(pattern):
		panic(fmt.Sprintf("consumer: Router: the pattern %q is not 1 to %d printable ASCII characters without blanks", pattern, headers.MaxTextBytes))
	case version < 0:
		panic(fmt.Sprintf("consumer: Router: the version of %s is negative: 0 takes any version", added))
	}
	if !isGlob(pattern) {
		if r.exact[added] != nil {
			panic(fmt.Sprintf("consumer: Router: %s has two handlers", added))
		}
		if r.exact == nil {
			r.exact = map[route]Handler[Tx]{}
		}
		r.exact[added] = handle
		return
	}
	glob := globRoute[Tx]{route: added, literal: literals(pattern), handle: handle}
	for _, other := range r.globs {
		switch {
		case other.route == added:
			panic(fmt.Sprintf("consumer: Router: %s has two handlers", added))
		case other.version == version && other.literal == glob.literal && overlap(other.pattern, pattern):
			panic(fmt.Sprintf("consumer: Router: %s and %s match the same types with equal right; make one of them more specific", other, added))
		}
	}
	r.globs = append(r.globs, glob)
	slices.SortStableFunc(r.globs, func(a, b globRoute[Tx]) int {
		return cmp.Or(cmp.Compare(b.literal, a.literal), cmp.Compare(min(b.version, 1), min(a.version, 1)))
	})
}

// Fallback registers the handler for events that no pattern matches, and for events without a type,
// which foreign senders send. Without a fallback they are [ErrUnknownEvent]. Fallback panics as
// Handle does.
func (r *Router[Tx]) Fallback(handle Handler[Tx]) {
	r.mayRegister("Fallback", handle)
	if r.fallback != nil {
		panic("consumer: Router: Fallback has two handlers")
	}
	r.fallback = handle
}

func (r *Router[Tx]) mayRegister(name string, handle Handler[Tx]) {
	if handle == nil {
		panic(fmt.Sprintf("consumer: Router: the handler of %s is nil", name))
	}
	if r.used.Load() {
		panic(fmt.Sprintf("consumer: Router: %s is registered after the first event was dispatched; register before serving", name))
	}
}

func (r route) String() string {
	if r.version == 0 {
		return fmt.Sprintf("%q, any version", r.pattern)
	}
	return fmt.Sprintf("%q version %d", r.pattern, r.version)
}

// Dispatch calls the handler of event and returns its error, or an [ErrUnknownEvent].
func (r *Router[Tx]) Dispatch(ctx context.Context, tx Tx, event Event) error {
	if !r.used.Load() { // a store by every event would have the processors wait for each other
		r.used.Store(true)
	}
	handle := r.find(event.Type, event.Version)
	if handle == nil {
		return &unknownEventError{eventType: event.Type, version: event.Version}
	}
	return handle(ctx, tx, event)
}

func (r *Router[Tx]) find(eventType string, version int) Handler[Tx] {
	if eventType == "" { // "*" means every type, not none
		return r.fallback
	}
	if handle := r.exact[route{eventType, version}]; handle != nil {
		return handle
	}
	if handle := r.exact[route{eventType, 0}]; handle != nil {
		return handle
	}
	for i := range r.globs {
		if glob := &r.globs[i]; (glob.version == 0 || glob.version == version) && match(glob.pattern, eventType) {
			return glob.handle
		}
	}
	return r.fallback
}
