package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/relay/identity"
)

// Identity compares the database with what is recorded of it, for a relay of the given environment that is configured
// as the pool of o is.
func (o *Outbox) Identity(ctx context.Context, environment string) (identity.Report, error) {
	return identity.Compare(ctx, o.pool, environment)
}

// AcceptIdentity makes this database, as [identity.Report.Acceptable] describes it, the one that relays work on. Those that wait
// begin within seconds.
func (o *Outbox) AcceptIdentity(ctx context.Context, environment string) (identity.Identity, error) {
	return identity.Accept(ctx, o.pool, environment)
}

// DiscardQuarantined marks every pending delivery, parked ones too, as discarded for the reason "quarantined", see
// [identity.DiscardPending]. progress, which may be nil, is told the number so far.
func (o *Outbox) DiscardQuarantined(ctx context.Context, environment string, progress func(discarded int)) (total int, err error) {
	return identity.DiscardPending(ctx, o.pool, environment, progress)
}
