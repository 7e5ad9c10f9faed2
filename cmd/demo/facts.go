package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// facts are everything that is known when a play is over: what stands in the two databases, and what was seen on the
// wire between them.
type facts struct {
	// In finance.
	invoices map[string]time.Time // when each was committed, by the key of its event
	events   map[string]event     // by key
	inOrder  map[string][]string  // the keys of its events by id, by ordering key
	failed   map[string]failure   // requests that the relay says did not deliver, by delivery id
	lost     map[string]string    // claims that a relay lost: its life, by delivery id

	// In logistics.
	effects   map[string][]time.Time // when each shipment of an invoice was committed, by the key the invoice ought to have
	shipped   map[string]bool        // the keys that the shipments name
	processed map[string]bool        // the keys of processed_events

	// On the wire, and told by those who play.
	requests   []request
	rolledBack []string
	kills      map[string]time.Time // of relays, by life
	deaths     map[string]time.Time // of receivers, by life
	suicides   int                  // of receivers, between commit and answer
}

// event is one row of outbox with its delivery.
type event struct {
	deliveries int
	status     string
	attempts   int
	delivery   string // the delivery id of the last claim
}

// failure is what the relay's log says of an attempt that did not deliver.
type failure struct {
	reason string
	ended  time.Time
	held   bool // it counts as none, because the destination as a whole was at fault
}

// gather reads both databases, after all is settled, and takes the history.
func (s *stage) gather() (*facts, error) {
	f := s.history.facts()
	if err := f.readFinance(s.ctx, s.finance); err != nil {
		return nil, fmt.Errorf("read finance: %w", err)
	}
	if err := f.readLogistics(s.ctx, s.logistics); err != nil {
		return nil, fmt.Errorf("read logistics: %w", err)
	}
	return f, nil
}

func (h *history) facts() *facts {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := &facts{
		invoices: map[string]time.Time{}, events: map[string]event{}, inOrder: map[string][]string{}, failed: map[string]failure{}, lost: map[string]string{},
		effects: map[string][]time.Time{}, shipped: map[string]bool{}, processed: map[string]bool{},
		rolledBack: slices.Clone(h.rolledBack), kills: maps.Clone(h.kills), deaths: maps.Clone(h.deaths), suicides: h.suicides,
	}
	for _, r := range h.requests {
		f.requests = append(f.requests, *r)
	}
	return f
}

const selectInvoices = `SELECT number, pg_xact_commit_timestamp(xmin) FROM invoices`

const selectEvents = `
SELECT o.idempotency_key, count(d.event_id), coalesce(min(d.status), ''), coalesce(min(d.attempts), 0),
       coalesce(min(format('%s-%s-%s', d.event_id, d.destination, d.claim)), '')
FROM outbox o LEFT JOIN outbox_delivery d ON d.event_id = o.id
GROUP BY o.id`

const selectInOrder = `SELECT ordering_key, idempotency_key FROM outbox WHERE ordering_key IS NOT NULL ORDER BY id`

const selectFailedAttempts = `
SELECT format('%s-%s-%s', event_id, destination, claim), reason, started_at + duration_ms * interval '1 ms', outcome = 'hold'
FROM outbox_attempt WHERE outcome <> 'delivered'`

const selectAllLostClaims = `
SELECT delivery, coalesce(life, 'instance ' || instance) FROM demo_lost_claim LEFT JOIN demo_relay USING (instance)`

func (f *facts) readFinance(ctx context.Context, db *pgxpool.Pool) error {
	var number string
	var at time.Time
	err := each(ctx, db, selectInvoices, []any{&number, &at}, func() { f.invoices[invoice{Number: number}.key()] = at })
	if err != nil {
		return err
	}
	var key string
	var e event
	err = each(ctx, db, selectEvents, []any{&key, &e.deliveries, &e.status, &e.attempts, &e.delivery}, func() { f.events[key] = e })
	if err != nil {
		return err
	}
	var ordering string
	err = each(ctx, db, selectInOrder, []any{&ordering, &key}, func() { f.inOrder[ordering] = append(f.inOrder[ordering], key) })
	if err != nil {
		return err
	}
	var delivery string
	var failed failure
	err = each(ctx, db, selectFailedAttempts, []any{&delivery, &failed.reason, &failed.ended, &failed.held}, func() { f.failed[delivery] = failed })
	if err != nil {
		return err
	}
	var life string
	return each(ctx, db, selectAllLostClaims, []any{&delivery, &life}, func() { f.lost[delivery] = life })
}

const selectShipments = `SELECT invoice, idempotency_key, pg_xact_commit_timestamp(xmin) FROM shipments ORDER BY id`

const selectProcessed = `SELECT idempotency_key FROM processed_events`

func (f *facts) readLogistics(ctx context.Context, db *pgxpool.Pool) error {
	var number, key string
	var at time.Time
	err := each(ctx, db, selectShipments, []any{&number, &key, &at}, func() {
		expected := invoice{Number: number}.key()
		f.effects[expected] = append(f.effects[expected], at)
		f.shipped[key] = true
	})
	if err != nil {
		return err
	}
	return each(ctx, db, selectProcessed, []any{&key}, func() { f.processed[key] = true })
}

// each runs a query and calls row for every row, after scanning it into columns.
func each(ctx context.Context, db *pgxpool.Pool, query string, columns []any, row func()) error {
	rows, err := db.Query(ctx, query)
	if err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, columns, func() error {
		row()
		return nil
	})
	return err
}
