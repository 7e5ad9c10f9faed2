package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/outbox-relay/outbox-relay/relay/identity"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// core is what the parts of a relay share: its lanes, its database, and what wakes or ends them.
type core struct {
	presence  session.Presence
	effective atomic.Pointer[Config]
	lanes     lanes
	store     *store
	wake      *wakeup
	progress  progress

	// The steps of a stop, in this order. After taking nothing more is claimed or sent; after doing POSTs in flight are cut
	// off; after settling what could not be written is left to the lease.
	taking   context.Context
	doing    context.Context
	settling context.Context
}

// config returns the configuration in effect, which is never changed, only replaced.
func (c *core) config() *Config { return c.effective.Load() }

// current returns the number under which this relay claims, and whether it counts as alive.
func (c *core) current() (instance int32, alive bool) { return c.presence.Current() }

// databaseError logs a failed statement that will be repeated.
func (c *core) databaseError(operation string, err error) {
	if errors.Is(err, identity.ErrGuarded) || errors.Is(err, identity.ErrQuarantined) {
		return // the guard logs it
	}
	line := c.config().Log.Error().Err(err).Str("operation", operation)
	if hint := pg.Hint(err); hint != "" {
		line = line.Str("hint", hint)
	}
	line.Msg("database: will be tried again")
	if pg.SchemaMayDiffer(err) {
		signal(c.wake.schema)
	}
	if pg.HasCode(err, pg.ReadOnlyTransaction) || errors.Is(err, pg.ErrReadOnly) {
		// After a failover these connections may lead to what was the primary, for ever; new ones need not.
		c.store.direct.Reset()
	}
	if hook := c.config().Hooks.DatabaseError; hook != nil {
		hook(operation, err)
	}
}

// newBackoff returns the pauses between repetitions of a statement. It never gives up.
func newBackoff() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(50*time.Millisecond),
		backoff.WithMaxInterval(5*time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}
