package outbox_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// BenchmarkEnqueue measures whole transactions of events with 500-byte payloads, one route and one
// connection.
func BenchmarkEnqueue(b *testing.B) {
	for _, size := range []int{1, 100} {
		b.Run(fmt.Sprintf("events=%d/pgx", size), func(b *testing.B) {
			pool := pgtest.Pool(b, benchDatabase(b))
			run(b, size, func(events []outbox.Event) {
				tx, err := pool.Begin(b.Context())
				pgtest.Must(b, err)
				_, err = outbox.Enqueue(b.Context(), tx, events...)
				pgtest.Must(b, err)
				pgtest.Must(b, tx.Commit(b.Context()))
			})
		})
		b.Run(fmt.Sprintf("events=%d/sql", size), func(b *testing.B) {
			db := stdlib.OpenDBFromPool(pgtest.Pool(b, benchDatabase(b)))
			defer db.Close()
			run(b, size, func(events []outbox.Event) {
				tx, err := db.BeginTx(b.Context(), nil)
				pgtest.Must(b, err)
				_, err = outbox.EnqueueSQL(b.Context(), tx, events...)
				pgtest.Must(b, err)
				pgtest.Must(b, tx.Commit())
			})
		})
	}
}

func benchDatabase(b *testing.B) string {
	b.Helper()
	dsn := pgtest.New(b, migrations.Outbox)
	_, err := pgtest.Pool(b, dsn).Exec(b.Context(), `INSERT INTO outbox_route VALUES ('*', 'logistics')`)
	pgtest.Must(b, err)
	return dsn
}

func run(b *testing.B, size int, commit func([]outbox.Event)) {
	b.Helper()
	payload := json.RawMessage(`{"note":"` + strings.Repeat("x", 489) + `"}`)
	events := make([]outbox.Event, size)
	n := 0
	for b.Loop() {
		for i := range events {
			n++
			events[i] = outbox.Event{Type: "invoice.issued", IdempotencyKey: fmt.Sprint("key-", n), Payload: payload}
		}
		commit(events)
	}
	b.ReportMetric(float64(size)*float64(b.N)/b.Elapsed().Seconds(), "events/s")
}
