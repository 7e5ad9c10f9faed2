package elsewhere

import (
	"context"
	"net/http/httptest"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// besideGo runs a receiver of package consumer on the same table, under the same name.
func besideGo(t *testing.T, r *receiver) {
	cfg := consumer.Config{Receiver: "shipping", Source: "finance", Secrets: []string{secret}}
	server := httptest.NewServer(receivertest.Must(consumer.New(pgtest.Pool(t, r.dsn), cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		_, err := tx.Exec(ctx, "INSERT INTO shipments SELECT invoice, total FROM json_to_record($1) AS p (invoice text, total numeric)", string(event.Payload))
		return err
	})))
	t.Cleanup(server.Close)

	var answers []<-chan answer
	for range 10 {
		answers = append(answers, r.begin(t, r.url, "k15", invoice("INV-15")), r.begin(t, server.URL, "k15", invoice("INV-15")))
	}
	wantOne(t, answers)
	r.wantRows(t, "k15", "INV-15", 1, 1)
	for _, urls := range [][]string{{r.url, server.URL}, {server.URL, r.url}} {
		key, body := "k15 held at "+urls[0], invoice("HOLD-15 at "+urls[0])
		release := r.hold(t)
		first := r.begin(t, urls[0], key, body)
		r.held(t)
		wantProblem(t, <-r.begin(t, urls[1], key, body), 409, "in-flight")
		release()
		wantFirst(t, <-first)
		wantDuplicate(t, <-r.begin(t, urls[1], key, body), 204)
		wantProblem(t, <-r.begin(t, urls[1], key, invoice("INV-15")), 422, "key-reused")
		r.wantRows(t, key, "HOLD-15 at "+urls[0], 1, 1)
	}
}
