package consumer_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// BenchmarkOverhead compares a handler behind each middleware with the same handler in a transaction of its own. The two
// take turns within one loop, so that both meet the same machine; times-bare is their ratio.
func BenchmarkOverhead(b *testing.B) {
	for _, f := range flavours {
		b.Run(f.name, func(b *testing.B) {
			server := pgtest.Start(b, localpg.Options{Durable: true}) // a commit that costs what it costs in production
			dsn := server.DSN("postgres")
			pgtest.Migrate(b, dsn, migrations.Inbox)
			pool := pgtest.Pool(b, dsn)
			if _, err := pool.Exec(b.Context(), schema); err != nil {
				b.Fatal(err)
			}
			bare := bareTransaction(b, f, dsn)
			guarded := f.wrap(b, dsn, consumer.Config{Secrets: []string{secretText}})(http.HandlerFunc(
				func(w http.ResponseWriter, r *http.Request) {
					if err := f.exec(r.Context(), "INSERT INTO effect VALUES ($1)", "k"); err != nil {
						b.Error(err)
					}
					w.WriteHeader(http.StatusNoContent)
				}))
			body := bytes.Repeat([]byte(`{"a":1}`), 100)
			serve := func(h http.Handler, i int) time.Duration {
				// As from a relay, and with a context that can end, as every request's of a server can: drivers watch it.
				ctx, cancel := context.WithCancel(b.Context())
				defer cancel()
				r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", bytes.NewReader(body))
				r.Header.Set(webhook.IdempotencyKey, "key-"+strconv.Itoa(i))
				r.Header.Set(webhook.EventType, "invoice.created")
				r.Header.Set(webhook.EventID, strconv.Itoa(i+1))
				r.Header.Set(webhook.CreatedAt, time.Now().Format(time.RFC3339Nano))
				r.Header.Set(webhook.NotAfter, time.Now().AddDate(0, 0, 30).Format(time.RFC3339Nano))
				r.Header.Set(webhook.Attempt, "1")
				webhook.Sign(r.Header, body, time.Now(), secret)
				w := httptest.NewRecorder()
				start := time.Now()
				h.ServeHTTP(w, r)
				took := time.Since(start)
				if w.Code != http.StatusNoContent {
					b.Fatalf("status %d: %s", w.Code, w.Body)
				}
				return took
			}
			var without, with time.Duration
			for i := 0; b.Loop(); i++ {
				without += serve(bare, i)
				with += serve(guarded, i)
			}
			b.ReportMetric(float64(without.Microseconds())/float64(b.N), "bare-µs/op")
			b.ReportMetric(float64(with.Microseconds())/float64(b.N), "middleware-µs/op")
			b.ReportMetric(float64(with)/float64(without), "times-bare")
		})
	}
}

// bareTransaction is the handler as its author would write it without this package.
func bareTransaction(b *testing.B, f flavour, dsn string) http.Handler {
	pool, db := pgtest.Pool(b, dsn), openSQL(b, dsn)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		if err == nil && f.name == "pgx" {
			tx, begun := pool.Begin(r.Context())
			if begun != nil {
				b.Fatal(begun)
			}
			if _, err = tx.Exec(r.Context(), "INSERT INTO effect VALUES ($1)", "k"); err == nil {
				err = tx.Commit(r.Context())
			}
		} else if err == nil {
			tx, begun := db.BeginTx(r.Context(), nil)
			if begun != nil {
				b.Fatal(begun)
			}
			if _, err = tx.ExecContext(r.Context(), "INSERT INTO effect VALUES ($1)", "k"); err == nil {
				err = tx.Commit()
			}
		}
		if err != nil {
			b.Error(err)
		}
		w.WriteHeader(http.StatusNoContent)
	})
}
