package consumer_test

import (
	"context"
	"database/sql"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const exampleSecret = secretText

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
	r, err := http.NewRequest(http.MethodPost, url, strings.NewReader(payload))
	must(err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(webhook.IdempotencyKey, key)
	r.Header.Set(webhook.EventType, "invoice.created")
	r.Header.Set(webhook.RelatedReference, "INV-7")
	secret, err := webhook.ParseSecret(exampleSecret)
	must(err)
	webhook.Sign(r.Header, []byte(payload), time.Now(), secret)
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
