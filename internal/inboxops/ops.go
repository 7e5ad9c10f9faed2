package inboxops

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// The states of an event in an inbox, and Recorded: that of an event in the memory whose state is
// in the inbox.
const (
	Pending    = "pending"
	Processing = "processing"
	Succeeded  = "succeeded"
	Ignored    = "ignored"
	Failed     = "failed"
	Recorded   = "recorded"
)

// Ops answers what operators ask of a receiver, and does what they order. It is safe for concurrent
// use.
type Ops struct {
	pool  *pgxpool.Pool
	names *pg.Names
}

// New returns an Ops over pool, whose search_path must lead to the receiver's tables. Its
// statements search pg_catalog alone. The caller keeps the pool.
func New(pool *pgxpool.Pool) *Ops {
	return &Ops{pool: pool, names: pg.NewNames("", "processed_events")}
}

// A Sender is one sender of one receiver: whose events they are, and who takes them.
type Sender struct {
	Receiver string `json:"receiver"`
	Source   string `json:"source"`
}

// ErrSchema says that the database has no receiver's tables, or not those that this build works
// with.
var ErrSchema = errors.New("schema mismatch")

// CheckSchema returns an error that wraps [ErrSchema] and says what to do unless the database has
// the schema of the inbox that this build knows.
func (o *Ops) CheckSchema(ctx context.Context) error {
	version, err := value[int64](ctx, o, selectSchemaVersion)
	want := migrations.Inbox.Latest()
	switch {
	case pg.HasCode(err, pg.UndefinedTable):
		if outbox, asked := value[bool](ctx, o, selectHasOutbox); asked == nil && outbox {
			return fmt.Errorf("%w: this is a producer's database, with an outbox and no inbox; name the receiver's instead (inbox: OUTBOX_DATABASE_URL; reconcile: RECEIVER_DATABASE_URL), or if both share it, run: outbox-relay migrate up --set inbox", ErrSchema)
		}
		return fmt.Errorf("%w: there is no inbox schema here (version %d is needed); run: outbox-relay migrate up --set inbox", ErrSchema, want)
	case err != nil:
		return fmt.Errorf("read inbox schema version: %w", err)
	case version < want:
		return fmt.Errorf("%w: the database has inbox version %d, this build needs %d; run: outbox-relay migrate up --set inbox", ErrSchema, version, want)
	case version == want:
		return nil
	}
	since, err := value[int64](ctx, o, selectCompatibleSince)
	switch {
	case err != nil:
		return fmt.Errorf("read with what the inbox schema works: %w", err)
	case since > want:
		return fmt.Errorf("%w: the database has inbox version %d, this build knows %d; run a newer outbox-relay", ErrSchema, version, want)
	}
	return nil
}

// LacksRight reports whether the database refused a statement because the login lacks a right.
func LacksRight(err error) bool { return pg.HasCode(err, pg.LacksPrivilege) }

// Now returns the time of the database, by which everything there is dated.
func (o *Ops) Now(ctx context.Context) (now time.Time, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error { return databaseTime(ctx, tx, &now) })
	return now, err
}

// read runs f in a transaction that only reads, with the settings of [pinSQL].
func (o *Ops) read(ctx context.Context, f func(pgx.Tx) error) error {
	return o.within(ctx, pgx.ReadOnly, f)
}

// write runs f in a transaction whose commit reaches the disk, with the settings of [pinSQL].
func (o *Ops) write(ctx context.Context, f func(pgx.Tx) error) error {
	return o.within(ctx, pgx.ReadWrite, f)
}

// Reconciled returns what answers the questions of a reconciliation about one sender's events.
// effects is as in [reconcile.Receiver], and runs with the search_path of the login.
func (o *Ops) Reconciled(of Sender, effects string) *reconcile.Receiver {
	return &reconcile.Receiver{
		Receiver: of.Receiver, Source: of.Source, Effects: effects, Read: o.read,
		ReadEffects: func(ctx context.Context, f func(pgx.Tx) error) error {
			return pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, f)
		},
	}
}

// Senders returns the receivers here with their senders, at most 10,000.
func (o *Ops) Senders(ctx context.Context) (all []Sender, err error) {
	err = o.read(ctx, func(tx pgx.Tx) error {
		all, err = remembered(ctx, tx, "", "")
		return err
	})
	return all, err
}

// READ COMMITTED whatever the database says: the lock of an ordering key means nothing to an older
// snapshot.
func (o *Ops) within(ctx context.Context, access pgx.TxAccessMode, f func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, o.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: access}, func(tx pgx.Tx) error {
		if _, err := o.names.Find(ctx, tx); err != nil {
			return fmt.Errorf("find the tables: %w", err)
		}
		if err := pin(ctx, tx); err != nil {
			return err
		}
		return f(o.names.Within(tx))
	})
}
