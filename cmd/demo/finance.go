package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// An order is what finance, the producing service, has to issue: invoices, each with its event
// in one transaction, of which it takes some back before the commit.
type order struct {
	Database  string  `json:"database"`   // its URL
	Seed      uint64  `json:"seed"`       // of what the invoices hold and which are rolled back
	Prefix    string  `json:"prefix"`     // of the invoices' numbers
	Invoices  int     `json:"invoices"`   // how many to issue
	PerSecond float64 `json:"per_second"` // 0: as fast as possible
	Block     int     `json:"block"`      // how many of them at once; 0: one
	Rollback  float64 `json:"rollback"`   // share that is rolled back
	PlainSQL  float64 `json:"plain_sql"`  // share whose event is a plain INSERT instead of outbox.Enqueue
	Keys      int     `json:"keys"`       // ordering keys, of which the invoices of each are issued one after the other; 0: none has any
	Later     float64 `json:"later"`      // share whose event is due some time after its commit
}

// An invoice is the payload of an event, and a row of the business table.
type invoice struct {
	Number   string `json:"invoice"`
	Customer string `json:"customer"`
	Cents    int64  `json:"amount_cents"`
}

// eventType is what finance tells of.
const eventType = "invoice.issued"

// key is derived from the business fact: issuing the same invoice again would repeat it.
func (i invoice) key() string { return i.Number + "-issued" }

// financeWorkers is how many transactions are open at a time. A pool has as many connections.
const financeWorkers = 4

// Run issues what was ordered, and prints the keys of what it takes back.
func (o *order) Run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, o.Database)
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	defer pool.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	begun := time.Now()
	var workers sync.WaitGroup
	for worker := range financeWorkers {
		workers.Go(func() {
			for n := range o.Invoices {
				// What has an ordering key is always its worker's: only successive transactions
				// have an order.
				if (o.Keys > 0 && n%o.Keys%financeWorkers != worker) || (o.Keys == 0 && n%financeWorkers != worker) {
					continue
				}
				if o.PerSecond > 0 {
					due := float64(n-n%max(o.Block, 1)) / o.PerSecond
					_ = sleep.For(ctx, time.Until(begun.Add(time.Duration(due*float64(time.Second)))))
				}
				if err := o.issue(ctx, pool, n+1); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	workers.Wait()
	return context.Cause(ctx)
}

const insertInvoice = `INSERT INTO invoices (number, customer, amount_cents) VALUES ($1, $2, $3)`

// insertEvent is how a service in any language enqueues.
const insertEvent = `
INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
VALUES ($1, $2, $3, nullif($4, ''), coalesce($5, now()))`

// An event that is due later is due after minWait to maxWait. It joins its ordering key by its time
// after 100 ms or more.
const (
	minWait = 300 * time.Millisecond
	maxWait = 3 * time.Second
)

// issue runs one business transaction.
func (o *order) issue(ctx context.Context, pool *pgxpool.Pool, n int) error {
	random := rand.New(rand.NewPCG(o.Seed, uint64(n)))
	rollback, plain := random.Float64() < o.Rollback, random.Float64() < o.PlainSQL
	inv := invoice{
		Number:   fmt.Sprintf("%s-%06d", o.Prefix, n),
		Customer: fmt.Sprintf("customer %d", random.IntN(1000)),
		Cents:    random.Int64N(1_000_000),
	}
	var due *time.Time
	if random.Float64() < o.Later {
		at := time.Now().Add(minWait + time.Duration(random.Float64()*float64(maxWait-minWait)))
		due = &at
	}
	var ordering string
	if o.Keys > 0 {
		ordering = fmt.Sprintf("%s: customer %d", o.Prefix, (n-1)%o.Keys+1) // the checker compares each two events of a key
		inv.Customer = ordering
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	if _, err := tx.Exec(ctx, insertInvoice, inv.Number, inv.Customer, inv.Cents); err != nil {
		return fmt.Errorf("insert invoice: %w", err)
	}
	if plain {
		payload, _ := json.Marshal(inv) // plain fields always encode
		_, err = tx.Exec(ctx, insertEvent, eventType, payload, inv.key(), ordering, due)
	} else {
		event, _ := outbox.NewEvent(eventType, inv.key(), inv)
		event.RelatedReference, event.OrderingKey = inv.Number, ordering
		if due != nil {
			event.AvailableAt = *due
		}
		_, err = outbox.Enqueue(ctx, tx, event)
	}
	if err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	if rollback {
		fmt.Println(inv.key())
		return tx.Rollback(ctx)
	}
	return tx.Commit(ctx)
}
