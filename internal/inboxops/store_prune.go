package inboxops

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// What may be removed the function decides itself.
const pruneRange = `
SELECT (p->>'next_page'::text)::bigint, (p->>'finished'::text)::boolean, (p->>'removed'::text)::bigint, (p->>'announced'::text)::bigint
FROM inbox_prune(nullif($1::text, ''), $2::bigint, $3::integer, make_interval(secs => $4::float8), $5::boolean) p`

// prunedBatch is what one transaction did.
type prunedBatch struct {
	next               int64
	finished           bool
	removed, announced int64
}

// pruneBatch announces and removes in one range of pages.
func (o *Ops) pruneBatch(ctx context.Context, p Prune, page int64, dryRun bool) (b prunedBatch, err error) {
	err = o.write(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, pruneRange, p.Receiver, page, prunePages, p.OlderThan.Seconds(), dryRun).
			Scan(&b.next, &b.finished, &b.removed, &b.announced)
	})
	return b, err
}

const readClock = `SELECT clock_timestamp()`

// checkClock returns an error if the database's clock is far from this host's.
func (o *Ops) checkClock(ctx context.Context) error {
	return webhook.AskClock(func() (now time.Time, err error) {
		err = o.write(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, readClock).Scan(&now) })
		return now, err
	})
}
