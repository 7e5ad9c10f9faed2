package consumer_test

import (
	"context"
	"database/sql"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const exampleSecret = receivertest.SecretText

// exampleDatabase starts a migrated database with a table of the application's own. An example has no testing.T to report
// to: it panics.
func exampleDatabase(table string) (pool *pgxpool.Pool, stop func()) {
	ctx := context.Background()
	server, err := localpg.Start(ctx, localpg.Options{})
	must(err)
	db, err := sql.Open("pgx", server.DSN("postgres"))
	must(err)
	must(migrations.Up(ctx, db, migrations.Inbox))
	_, err = db.ExecContext(ctx, table)
	must(err)
	must(db.Close())
	pool, err = pgxpool.New(ctx, server.DSN("postgres"))
	must(err)
	return pool, func() {
		pool.Close()
		must(server.Stop())
	}
}

// exampleDelivery is what a relay does.
func exampleDelivery(url, key, payload string) *http.Response {
	event := consumer.Event{Key: key, Type: "invoice.created", RelatedReference: "INV-7", Payload: []byte(payload)}
	r, err := consumertest.NewRequest(context.Background(), url, event, exampleSecret)
	must(err)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	must(err)
	must(response.Body.Close())
	return response
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
