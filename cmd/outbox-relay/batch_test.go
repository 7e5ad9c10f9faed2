package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A relay and a receiver with batches, while answers are lost after their commit, handlers fail and
// panic, and the relay is stopped hard: everything takes effect once, each ordering key in its
// order, and the poison fails alone.
func TestBatchesEndToEnd(t *testing.T) {
	t.Parallel()
	sender, receiver := relaytest.At(t, pgtest.New(t, migrations.Outbox)), relaytest.At(t, pgtest.New(t, migrations.Inbox))
	receiver.Exec(`CREATE TABLE effect (n bigserial, key text, ordering_key text, sequence bigint)`)
	cfg := consumer.Config{Receiver: "shop", Secrets: []string{receivertest.SecretText}, Logger: slog.New(slog.DiscardHandler)}
	receive, err := consumer.New(receiver.Pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		_, err := tx.Exec(ctx, "INSERT INTO effect (key, ordering_key, sequence) VALUES ($1, $2, $3)", event.IdempotencyKey, event.OrderingKey, event.Sequence)
		switch {
		case err != nil:
			return err
		case event.Type == "poison":
			return consumer.Permanent(errors.New("poison"))
		case event.Type == "flaky" && event.Attempt == 1 && event.ID%2 == 0:
			return errors.New("not at first")
		case event.Type == "flaky" && event.Attempt == 1:
			panic("not at first")
		}
		return nil
	})
	pgtest.Must(t, err)
	var batches, cut atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !webhook.IsBatch(r.Header) {
			receive.ServeHTTP(w, r)
			return
		}
		if batches.Add(1)%4 != 0 {
			receive.ServeHTTP(w, r)
			return
		}
		receive.ServeHTTP(httptest.NewRecorder(), r)
		cut.Add(1)
		panic(http.ErrAbortHandler) // committed, and not answered
	}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.Start()
	defer server.Close()
	env := []string{
		"OUTBOX_DATABASE_URL=" + sender.DSN, "OUTBOX_DESTINATION_URL=" + server.URL, "OUTBOX_SIGNING_SECRET=" + receivertest.SecretText,
		"OUTBOX_DEFAULTS_BATCH_MAX=50", "OUTBOX_DEFAULTS_RETRY_SCHEDULE=10ms", "OUTBOX_DEFAULTS_RETRY_MAX_ATTEMPTS=20", "OUTBOX_DEFAULTS_BREAKER_ENABLED=false",
	}
	relay := start(t, env)
	insert := func(from, to int) {
		sender.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT CASE WHEN i % 97 = 0 THEN 'poison' WHEN i % 13 = 0 THEN 'flaky' ELSE 'paid' END, '{}', 'k' || i,
			       CASE WHEN i % 97 <> 0 AND i % 2 = 0 THEN 'o' || i % 30 END
			FROM generate_series($1::int, $2::int) i`, from, to)
	}
	insert(1, 500)
	relaytest.Eventually(t, "a batch whose answer is lost", func() bool { return cut.Load() > 0 })
	relay.signals <- os.Signal(syscall.SIGTERM)
	relay.signals <- os.Signal(syscall.SIGTERM) // at once
	<-relay.code
	insert(501, 1000)
	relay = start(t, env)
	relaytest.Becomes(sender, 1000, `SELECT count(*)::int FROM outbox_delivery WHERE status IN ('delivered', 'failed')`)
	relay.end(t, 0)

	if n := relaytest.Row[int](sender, `SELECT count(*)::int FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id
		WHERE (d.status = 'failed') = (o.event_type = 'poison')`); n != 1000 {
		t.Errorf("%d of 1000 deliveries ended as they should", n)
	}
	testkit.Equal(t, "effects", relaytest.Row[int](receiver, `SELECT count(*)::int FROM effect`), 990)
	testkit.Equal(t, "events took effect", relaytest.Row[int](receiver, `SELECT count(DISTINCT key)::int FROM effect`), 990)
	if keys := relaytest.Rows[string](receiver, `SELECT key FROM (SELECT key, sequence, lag(sequence) OVER (PARTITION BY ordering_key ORDER BY n) AS before
		FROM effect WHERE ordering_key <> '') e WHERE sequence < before`); len(keys) > 0 {
		t.Errorf("out of order: %s", strings.Join(keys, " "))
	}
	if batches.Load() < 8 {
		t.Errorf("%d batches", batches.Load())
	}
}

// takesBatches is a receiver that takes batches, and does nothing but answer.
func takesBatches(b *testing.B) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set(webhook.AcceptPost, webhook.BatchType)
		if !webhook.IsBatch(r.Header) {
			return
		}
		all, err := webhook.ParseBatch(body, receivertest.Must(webhook.BatchSize(r.Header)))
		pgtest.Must(b, err)
		w.Header().Set("Content-Type", webhook.BatchResultType)
		var answer []byte
		for _, e := range all {
			answer = webhook.AppendLine(answer, webhook.BatchResult{Key: e.Header[webhook.IdempotencyKey], Status: http.StatusNoContent})
		}
		_, _ = w.Write(answer)
	})
}

// BenchmarkBatches drains a backlog with and without batches, to a receiver that only answers and
// to the middleware.
func BenchmarkBatches(b *testing.B) {
	const events = 20_000
	plain := takesBatches(b)
	inbox := relaytest.At(b, pgtest.New(b, migrations.Inbox))
	inbox.Exec(`CREATE TABLE effect (key text)`)
	cfg := consumer.Config{Receiver: "shop", Secrets: []string{receivertest.SecretText}, Logger: slog.New(slog.DiscardHandler)}
	middleware, err := consumer.New(inbox.Pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		_, err := tx.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
		return err
	})
	pgtest.Must(b, err)
	for _, c := range []struct {
		name    string
		handler http.Handler
		env     []string
	}{
		{"plain/single", plain, nil},
		{"plain/batch", plain, []string{"OUTBOX_DEFAULTS_BATCH_MAX=100"}},
		{"plain/single-400", plain, []string{"OUTBOX_DEFAULTS_MAX_IN_FLIGHT=400", "OUTBOX_RELAY_MAX_IN_FLIGHT=400"}},
		{"plain/batch-400", plain, []string{"OUTBOX_DEFAULTS_MAX_IN_FLIGHT=400", "OUTBOX_RELAY_MAX_IN_FLIGHT=400", "OUTBOX_DEFAULTS_BATCH_MAX=100"}},
		{"middleware/single", middleware, nil},
		{"middleware/batch", middleware, []string{"OUTBOX_DEFAULTS_BATCH_MAX=100"}},
		{"middleware/batch-400", middleware, []string{"OUTBOX_DEFAULTS_MAX_IN_FLIGHT=400", "OUTBOX_RELAY_MAX_IN_FLIGHT=400", "OUTBOX_DEFAULTS_BATCH_MAX=100"}},
	} {
		b.Run(c.name, func(b *testing.B) {
			for range b.N {
				b.StopTimer()
				inbox.Exec(`TRUNCATE processed_events, effect`)
				sender := relaytest.At(b, pgtest.New(b, migrations.Outbox))
				sender.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'paid', '{"amount": 1}', 'k' || i FROM generate_series(1, $1::int) i`, events)
				server := httptest.NewServer(c.handler)
				b.StartTimer()
				relay := start(b, append(c.env, "OUTBOX_DATABASE_URL="+sender.DSN, "OUTBOX_DESTINATION_URL="+server.URL, "OUTBOX_SIGNING_SECRET="+receivertest.SecretText))
				relaytest.Becomes(sender, events, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
				b.StopTimer()
				relay.end(b, 0)
				server.Close()
			}
			b.ReportMetric(float64(events*b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}
