package main

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// While what a receiver depends on is down, its breaker and the relay's agree: the relay holds, and has spent as many
// attempts as it takes to notice. Afterwards everything arrives, once.
func TestReceiverWhoseDependencyIsDown(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const events = 100
	in, dsn := pgtest.New(t, migrations.Inbox), pgtest.New(t, migrations.Outbox)
	pool, db := pgtest.Pool(t, in), open(t, dsn)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE effect (key text NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'invoice.paid', '{}', 'inv-' || i FROM generate_series(1, 100) i")

	var up atomic.Bool
	refused, processed := make(chan struct{}, 1), make(chan struct{}, events)
	observe := func(_ context.Context, report consumer.Report) {
		switch report.Result {
		case consumer.ResultBreakerOpen:
			select {
			case refused <- struct{}{}:
			default: // one that was not taken is there already
			}
		case consumer.ResultProcessed:
			processed <- struct{}{}
		}
	}
	quiet := slog.New(slog.DiscardHandler)
	b := breaker.MustNew(breaker.Config{OpenFor: 200 * time.Millisecond, OpenMax: 200 * time.Millisecond, Logger: quiet})
	guarded := consumer.Must(consumer.Middleware(pool, consumer.Config{Receiver: "logistics", Secrets: []string{goodSecret}, Observe: observe, Breaker: b, Logger: quiet}))
	receiver := httptest.NewServer(guarded(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !up.Load() {
			http.Error(w, "the bank is down", http.StatusBadGateway)
			return
		}
		ctx := r.Context()
		if _, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO effect VALUES ($1)", consumer.EventFrom(ctx).Key); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})))
	defer receiver.Close()

	s := start(t, []string{
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL, "OUTBOX_SIGNING_SECRET=" + goodSecret,
		"OUTBOX_RETRY_SCHEDULE=100ms", "OUTBOX_BREAKER_PROBE_AFTER=50ms", "OUTBOX_BREAKER_PROBE_MAX=50ms",
	}, "--poll-interval=1s")
	until(t, db, "SELECT EXISTS (SELECT FROM outbox_destination WHERE destination = 'default' AND breaker <> 'closed')")
	// The breaker is written before the outcomes of the attempts that opened it.
	until(t, db, "SELECT sum(attempts) > 0 FROM outbox_delivery")
	for range 5 { // probes of the relay that met the receiver's open breaker
		receive(t, refused, s)
	}
	if n := query[int](t, db, "SELECT sum(attempts)::int FROM outbox_delivery"); n < 1 || n > 5 {
		t.Errorf("%d attempts are spent on an outage, want at most the 5 it takes to notice", n)
	}

	up.Store(true)
	for range events {
		receive(t, processed, s)
	}
	until(t, db, "SELECT count(*) = $1 FROM outbox_delivery WHERE status = 'delivered'", events)
	if n := query[int](t, db, "SELECT sum(attempts)::int FROM outbox_delivery"); n > events+5 {
		t.Errorf("%d attempts for %d events", n, events)
	}
	var effects, keys int
	if err := pool.QueryRow(t.Context(), "SELECT count(*), count(DISTINCT key) FROM effect").Scan(&effects, &keys); err != nil || effects != events || keys != events {
		t.Errorf("%d effects of %d events, %v; want %d of each", effects, keys, err, events)
	}
	s.signals <- syscall.SIGTERM
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
}
