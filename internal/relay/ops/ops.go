package ops

import (
	"cmp"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
)

// An Outbox answers what an operator asks of one outbox, and does what an operator orders. It is
// safe for concurrent use.
type Outbox struct {
	pool    *pg.Transactions
	address string // see [identity.Address]
	actor   Actor
}

// New returns an Outbox over pool, whose search_path must lead to the outbox tables. Its statements
// search pg_catalog alone. The caller closes the pool.
func New(pool *pgxpool.Pool) *Outbox {
	return &Outbox{pool: pg.ReadCommitted(pool, pg.NewNames("", "outbox_schema_version")), address: identity.Address(pool.Config().ConnConfig)}
}

// DB runs the statements of rooms below this one.
func (o *Outbox) DB() pg.Pool { return o.pool }

// CheckSchema returns nil if this build can work with the outbox schema: the database has the
// version that this build knows, or a later one that is marked as compatible. Otherwise the error
// wraps [pg.ErrSchema] and says what to do.
func (o *Outbox) CheckSchema(ctx context.Context) error {
	_, err := pg.CheckSchema(ctx, o.pool)
	return err
}

// Identity compares the database with what is recorded of it, for a relay of the given environment
// that connects as the pool of o does.
func (o *Outbox) Identity(ctx context.Context, environment string) (identity.Report, error) {
	return identity.Compare(ctx, o.pool, o.address, environment)
}

// AcceptIdentity makes this database, as [identity.Report.Acceptable] describes it, the one that
// relays work on. Relays that wait for it begin within seconds.
func (o *Outbox) AcceptIdentity(ctx context.Context, environment string) (identity.Identity, error) {
	return identity.Accept(ctx, o.pool, o.address, environment, func(accept func(pg.DB) error) error {
		return o.durably(ctx, func(ctx context.Context, tx pgx.Tx) error {
			if err := accept(tx); err != nil {
				return err
			}
			return o.record(ctx, tx, auditRow{action: "accept_identity", detail: environment})
		})
	})
}

// Rebase is [identity.Rebase], and the audit has the deliveries that it made.
func (o *Outbox) Rebase(ctx context.Context, progress func(events int64)) (deliveries int64, err error) {
	if deliveries, err = identity.Rebase(ctx, o.pool, progress); deliveries == 0 {
		return 0, err
	}
	state, detail := endOf(ctx, err)
	row := auditRow{action: "create_deliveries", state: state, done: deliveries, detail: cmp.Or(detail, "transaction ids of another server")}
	return deliveries, errors.Join(err, o.record(context.WithoutCancel(ctx), o.pool, row))
}
