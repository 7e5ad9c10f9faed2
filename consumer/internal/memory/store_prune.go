package memory

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// forgetSQL announces and removes in one range of pages. What may be removed the function decides
// itself, because others call it as well: a relay does in its own database.
const forgetSQL = `
SELECT (p->>'next_page'::text)::bigint, (p->>'finished'::text)::boolean, (p->>'removed'::text)::integer, (p->>'announced'::text)::integer
FROM inbox_prune($1::text, $2::bigint, $3::integer, make_interval(secs => $4::float8), false) p`

// pruneBatch is what one transaction did.
type pruneBatch struct {
	nextPage           int64
	finished           bool
	removed, announced int32
}

func (c *Prune) forget(ctx context.Context, query QueryRow, page int64) (b pruneBatch, err error) {
	err = query(ctx, forgetSQL, c.Receiver, page, c.BatchPages, c.Retention.Seconds()).
		Scan(&b.nextPage, &b.finished, &b.removed, &b.announced)
	if err != nil {
		return pruneBatch{}, fmt.Errorf("prune processed_events: %w", err)
	}
	return b, nil
}

const clockSQL = `SELECT clock_timestamp()`

// checkClock returns an error if the database's clock is far from this host's.
func checkClock(ctx context.Context, query QueryRow) error {
	return webhook.AskClock(func() (now time.Time, err error) {
		if err = query(ctx, clockSQL).Scan(&now); err != nil {
			err = fmt.Errorf("read the database's clock: %w", err)
		}
		return now, err
	})
}

const remembersSinceSQL = `SELECT max(received_before) FROM inbox_forgotten WHERE receiver = $1::text`

func (c *Prune) remembersSince(ctx context.Context, query QueryRow) (time.Time, error) {
	var since *time.Time
	if err := query(ctx, remembersSinceSQL, c.Receiver).Scan(&since); err != nil {
		return time.Time{}, fmt.Errorf("read what is remembered: %w", err)
	}
	if since == nil {
		return time.Time{}, nil
	}
	return *since, nil
}
