package claim

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// selectDue finds the destinations of which this relay may claim something. It goes from one
// destination to the next in the index of what is due, and reads the first delivery of each and of
// its replays: it costs what destinations wait for, and not how many there are.
const selectDue = `
WITH RECURSIVE pending (destination) AS (
    (SELECT d.destination FROM outbox_delivery d WHERE ` + pg.IsDue + ` AND d.destination > ''` + firstDue + `)
    UNION ALL
    SELECT n.destination
    FROM pending p
    CROSS JOIN LATERAL (SELECT d.destination FROM outbox_delivery d WHERE ` + pg.IsDue + ` AND d.destination > p.destination` + firstDue + `) n
)
SELECT p.destination FROM pending p` + hasDue

// hasDue keeps those of the destinations p of which something may be claimed.
const hasDue = `
WHERE (SELECT ` + pg.IsHeld + ` FROM outbox_destination s WHERE s.destination = p.destination LIMIT 1) IS NOT TRUE
  AND least((SELECT d.next_attempt_at FROM outbox_delivery d WHERE ` + pg.IsDue + ` AND d.destination = p.destination AND NOT d.replay` + firstDue + `),
            (SELECT d.next_attempt_at FROM outbox_delivery d WHERE ` + pg.IsDue + ` AND d.destination = p.destination AND d.replay` + firstDue + `)) <= now()`

// firstDue makes the index the only way to the first delivery.
const firstDue = ` ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 1`

func (c *Rows) readDue(ctx context.Context, relayID int32) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	return rows.Values[string](ctx, c.DB, "search due", selectDue, relayID)
}

const selectDueOf = `SELECT p.destination FROM unnest($2::text[]) AS p (destination)` + hasDue

// readDueOf is readDue of the given destinations alone.
func (c *Rows) readDueOf(ctx context.Context, relayID int32, destinations []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	return rows.Values[string](ctx, c.DB, "search due", selectDueOf, relayID, destinations)
}

// The next search waits searchRest times as long as the last one took, and searchRestMost at most.
const (
	searchRest     = 10
	searchRestMost = 30 * time.Second
)

// searchDue makes those of many lanes work for which something is due.
func (c *Rows) searchDue(ctx context.Context, relayID int32) error {
	begun := time.Now()
	if begun.Before(c.searchAt) {
		c.Agenda.At(agenda.CauseScan, c.searchAt)
		return nil
	}
	found, err := c.readDue(ctx, relayID)
	if pg.IsOfRows(err) { // what cannot be read is claimed apart
		c.Failed("search due", err)
		found = nil
		err = pg.Apart(c.Lanes.Names(), func(part []string) error {
			due, err := c.readDueOf(ctx, relayID, part)
			found = append(found, due...)
			return err
		}, func(name string, _ error) { found = append(found, name) })
	}
	if err != nil {
		return err
	}
	took := time.Since(begun)
	c.searchAt = begun.Add(took + min(searchRest*took, searchRestMost))
	for _, name := range found {
		if l := c.Lanes.Get(name); l != nil {
			if c.Lanes.Engage(l); l.Stopped {
				l.RestartScans()
			}
		}
	}
	return nil
}
