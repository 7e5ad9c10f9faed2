package identity

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// rebaseBatch is how many events one transaction of a rebase goes through.
const rebaseBatch = 5_000

// Rebase lets relays take events where the transaction ids in the tables are another server's: in a
// restored dump, behind logical replication, after an upgrade into another cluster. It makes
// pending deliveries of all events that may not be settled, and returns how many. On the server
// whose ids they are it does nothing; after a failover it records the timeline.
//
// It goes through all events in batches, each a transaction, and calls progress, which may be nil,
// with how many it has gone through. When it was interrupted, it may be repeated: until its end
// relays refuse the database.
func Rebase(ctx context.Context, db pg.DB, progress func(events int64)) (deliveries int64, err error) {
	foreign, err := checkOrigin(ctx, db)
	switch {
	case err != nil || foreign == nil:
		return 0, err
	case foreign.IsFailover():
		return 0, intake.AcceptTimeline(ctx, db, foreign)
	}
	return intake.Rebase(ctx, counted(db, progress), foreign.Found, rebaseBatch)
}

// Cover makes pending deliveries of all events that are not routed yet or in a relay's hand, and of
// those that have none, on whichever server. It works as Rebase does. No relay may work on the
// database.
func Cover(ctx context.Context, db pg.DB, progress func(events int64)) (deliveries int64, err error) {
	found, err := intake.FindOrigin(ctx, db)
	if err != nil {
		return 0, err
	}
	return intake.Rebase(ctx, counted(db, progress), found, rebaseBatch)
}

// checkOrigin returns what is wrong with the transaction ids; nil: they are this server's, or there
// are none to compare.
func checkOrigin(ctx context.Context, db pg.DB) (*intake.ForeignError, error) {
	err := intake.CheckOrigin(ctx, db)
	if foreign, is := errors.AsType[*intake.ForeignError](err); is {
		return foreign, nil
	}
	if errors.Is(err, intake.ErrNoIntake) {
		return nil, nil
	}
	return nil, err
}

// counting is a database that says how many batches of a rebase have begun. The first statement
// reads the snapshot.
type counting struct {
	pg.DB
	begun    *int64
	progress func(events int64)
}

func counted(db pg.DB, progress func(events int64)) pg.DB {
	if progress == nil {
		return db
	}
	return counting{db, new(int64), progress}
}

// QueryRow runs the next batch.
func (c counting) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if *c.begun++; *c.begun > 2 {
		c.progress((*c.begun - 2) * rebaseBatch)
	}
	return c.DB.QueryRow(ctx, sql, args...)
}
