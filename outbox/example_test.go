package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/outbox"
)

type Invoice struct {
	Number   int    `json:"number"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// Issue is a business operation that may be repeated: its second run changes nothing and sends
// nothing.
func Issue(ctx context.Context, pool *pgxpool.Pool, invoice Invoice) (outbox.Result, error) {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return outbox.Result{}, err
	}
	defer tx.Rollback(ctx)

	if _, err := tx.Exec(ctx, `INSERT INTO invoice (number, cents) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		invoice.Number, invoice.Cents); err != nil {
		return outbox.Result{}, err
	}
	event, err := outbox.NewEvent("invoice.issued", fmt.Sprintf("invoice-%d-issued", invoice.Number), invoice)
	if err != nil {
		return outbox.Result{}, err
	}
	event.OrderingKey = "customer-" + invoice.Customer
	event.RelatedReference = fmt.Sprintf("INV-%d", invoice.Number)
	result, err := outbox.Enqueue(ctx, tx, event)
	if err != nil {
		return outbox.Result{}, err
	}
	return result, tx.Commit(ctx)
}

// The event is committed with the invoice. Repeating the operation is safe; claiming its key for
// other content is not.
func ExampleEnqueue() {
	ctx := context.Background()
	pool := exampleDatabase("example_enqueue")
	defer pool.Close()

	invoice := Invoice{Number: 4711, Customer: "acme", Cents: 9900}
	for range 2 {
		result, err := Issue(ctx, pool, invoice)
		fmt.Printf("inserted %d, duplicates %q, error %v\n", result.Inserted, result.Duplicates, err)
	}

	invoice.Cents = 100
	_, err := Issue(ctx, pool, invoice)
	fmt.Println(err)
	fmt.Println(errors.Is(err, outbox.ErrKeyReused))

	// Output:
	// inserted 1, duplicates [], error <nil>
	// inserted 0, duplicates ["invoice-4711-issued"], error <nil>
	// outbox: event 0 ("invoice-4711-issued"): IdempotencyKey: holds another event, which differs in Payload; roll back
	// true
}

// With database/sql, here several events in one statement.
func ExampleEnqueueSQL() {
	ctx := context.Background()
	pool := exampleDatabase("example_enqueue_sql")
	defer pool.Close()
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()

	issue := func(tx *sql.Tx, numbers ...int) (outbox.Result, error) {
		var events []outbox.Event
		for _, number := range numbers {
			event, err := outbox.NewEvent("invoice.issued", fmt.Sprintf("invoice-%d-issued", number), Invoice{Number: number})
			if err != nil {
				return outbox.Result{}, err
			}
			events = append(events, event)
		}
		return outbox.EnqueueSQL(ctx, tx, events...)
	}

	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	result, err := issue(tx, 1, 2, 3)
	if err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
	fmt.Println("inserted", result.Inserted)

	// Output:
	// inserted 3
}

// The trace that the business operation runs in travels with its events. The hook belongs to the
// application, so that this package depends on no tracing library.
func ExampleProducer() {
	ctx := context.Background()
	pool := exampleDatabase("example_producer")
	defer pool.Close()

	producer := outbox.Producer{TraceHeaders: func(context.Context) map[string]string {
		return map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
	}}

	tx, err := pool.Begin(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback(ctx)
	event, err := outbox.NewEvent("invoice.paid", "invoice-4711-paid", Invoice{Number: 4711})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := producer.Enqueue(ctx, tx, event); err != nil {
		log.Fatal(err)
	}

	var headers string
	if err := tx.QueryRow(ctx, `SELECT headers FROM outbox`).Scan(&headers); err != nil {
		log.Fatal(err)
	}
	fmt.Println(headers)

	// Output:
	// {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
}

// Any language produces events with an INSERT, in the transaction of its business change.
func Example_plainSQL() {
	ctx := context.Background()
	pool := exampleDatabase("example_plain_sql")
	defer pool.Close()

	if _, err := pool.Exec(ctx, `
		BEGIN;
		INSERT INTO invoice (number, cents) VALUES (4711, 9900);
		INSERT INTO outbox (event_type, payload, idempotency_key)
		VALUES ('invoice.issued', '{"number": 4711}', 'invoice-4711-issued')
		ON CONFLICT DO NOTHING;
		COMMIT`); err != nil {
		log.Fatal(err)
	}

	var event string
	if err := pool.QueryRow(ctx, `SELECT concat_ws(' ', id, event_type, event_version, payload, idempotency_key) FROM outbox`).Scan(&event); err != nil {
		log.Fatal(err)
	}
	fmt.Println(event)

	// Output:
	// 1 invoice.issued 1 {"number": 4711} invoice-4711-issued
}

// exampleServer ends with the test process.
var exampleServer = sync.OnceValues(func() (*localpg.Server, error) {
	return localpg.Start(context.Background(), localpg.Options{})
})

// exampleDatabase returns a new database with the outbox and a table of the application.
func exampleDatabase(name string) *pgxpool.Pool {
	ctx := context.Background()
	server, err := exampleServer()
	if err != nil {
		log.Fatal(err)
	}
	if err := server.CreateDatabase(ctx, name, ""); err != nil {
		log.Fatal(err)
	}
	pool, err := pgxpool.New(ctx, server.DSN(name))
	if err != nil {
		log.Fatal(err)
	}
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	if err := migrations.Up(ctx, db, migrations.Outbox); err != nil {
		log.Fatal(err)
	}
	if _, err := pool.Exec(ctx, `CREATE TABLE invoice (number integer PRIMARY KEY, cents bigint NOT NULL)`); err != nil {
		log.Fatal(err)
	}
	return pool
}
