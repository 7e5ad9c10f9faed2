package pg

import (
	"context"
	"fmt"
	"time"
)

// The locks are read after the snapshot is taken: a transaction whose event has a smaller id than one that is seen keeps its
// lock until the event can be seen, too.
const selectOpenWriters = `
SELECT now(), coalesce((SELECT id FROM outbox ORDER BY id DESC LIMIT 1), 0), ARRAY(
    SELECT DISTINCT l.virtualtransaction FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.relation = 'outbox'::regclass AND l.mode = 'RowExclusiveLock' AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))`

// OpenWriters returns the database's time, the largest id of an event that can be seen, and the transactions that have written
// to outbox and are still open, each by the name of its virtual transaction.
func OpenWriters(ctx context.Context, db DB) (at time.Time, latest int64, open []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	if err := db.QueryRow(ctx, selectOpenWriters).Scan(&at, &latest, &open); err != nil {
		return time.Time{}, 0, nil, fmt.Errorf("look for open transactions: %w", err)
	}
	return at, latest, open, nil
}
