package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"github.com/outbox-relay/outbox-relay/outbox"
)

// financeRole is the producing service: it issues invoices, each with its event in one transaction, and takes some of
// them back before the commit.
type financeRole struct {
	Database string  `required:"" help:"URL of its database."`
	Prefix   string  `required:"" help:"What the numbers of this run's invoices begin with."`
	Invoices int     `required:"" help:"How many to issue."`
	Rate     float64 `help:"Invoices per second. 0: as fast as possible."`
	Block    int     `default:"1" help:"How many of them at once."`
	Rollback float64 `help:"Share that is rolled back."`
	PlainSQL float64 `name:"plain-sql" help:"Share whose event is a plain INSERT instead of outbox.Enqueue."`
	Keys     int     `help:"Ordering keys, of which the invoices of each are issued one after the other. 0: none has any."`
	Workers  int     `default:"4" help:"Transactions at a time."`
	Seed     uint64  `help:"Seed of what the invoices hold and which are rolled back."`
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

func (role *financeRole) Run(ctx context.Context) error {
	cfg, err := pgxpool.ParseConfig(role.Database)
	if err != nil {
		return fmt.Errorf("read database URL: %w", err)
	}
	cfg.MaxConns = int32(role.Workers)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	defer pool.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	pace := rate.NewLimiter(rate.Inf, 0)
	if role.Rate > 0 {
		pace = rate.NewLimiter(rate.Limit(role.Rate), role.Block)
	}
	journal := &journal{w: os.Stdout}
	// What has an ordering key is always its worker's: only one transaction after the other has an order.
	anybodys := make(chan int)
	numbers := make([]chan int, role.Workers)
	var workers sync.WaitGroup
	for i := range numbers {
		numbers[i] = anybodys
		if role.Keys > 0 {
			numbers[i] = make(chan int, role.Block)
		}
		workers.Go(func() {
			for n := range numbers[i] {
				if err := role.issue(ctx, pool, journal, n); err != nil {
					cancel(err)
				}
			}
		})
	}
	for n := range role.Invoices {
		if n%role.Block == 0 && pace.WaitN(ctx, role.Block) != nil {
			break // ctx has ended
		}
		worker := 0
		if role.Keys > 0 {
			worker = n % role.Keys % role.Workers
		}
		numbers[worker] <- n + 1
	}
	if role.Keys > 0 {
		for _, channel := range numbers {
			close(channel)
		}
	} else {
		close(anybodys)
	}
	workers.Wait()
	return context.Cause(ctx)
}

const insertInvoice = `INSERT INTO invoices (number, customer, amount_cents) VALUES ($1, $2, $3)`

// insertEvent is how a service in any language enqueues.
const insertEvent = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ($1, $2, $3, nullif($4, ''))`

// issue runs one business transaction.
func (role *financeRole) issue(ctx context.Context, pool *pgxpool.Pool, journal *journal, n int) error {
	random := rand.New(rand.NewPCG(role.Seed, uint64(n)))
	rollback, plain := random.Float64() < role.Rollback, random.Float64() < role.PlainSQL
	inv := invoice{
		Number:   fmt.Sprintf("%s-%06d", role.Prefix, n),
		Customer: fmt.Sprintf("customer %d", random.IntN(1000)),
		Cents:    random.Int64N(1_000_000),
	}
	var ordering string
	if role.Keys > 0 {
		ordering = fmt.Sprintf("customer %d", (n-1)%role.Keys+1)
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
		err = enqueueBySQL(ctx, tx, inv, ordering)
	} else {
		err = enqueue(ctx, tx, inv, ordering)
	}
	if err != nil {
		return err
	}
	if rollback {
		journal.write(entry{Op: opRolledBack, Key: inv.key()})
		return tx.Rollback(ctx)
	}
	return tx.Commit(ctx)
}

func enqueue(ctx context.Context, tx pgx.Tx, inv invoice, ordering string) error {
	event, err := outbox.NewEvent(eventType, inv.key(), inv)
	if err != nil {
		return err
	}
	event.RelatedReference = inv.Number
	event.OrderingKey = ordering
	_, err = outbox.Enqueue(ctx, tx, event)
	return err
}

func enqueueBySQL(ctx context.Context, tx pgx.Tx, inv invoice, ordering string) error {
	payload, err := json.Marshal(inv)
	if err != nil {
		return fmt.Errorf("encode invoice: %w", err)
	}
	if _, err := tx.Exec(ctx, insertEvent, eventType, payload, inv.key(), ordering); err != nil {
		return fmt.Errorf("insert event: %w", err)
	}
	return nil
}
