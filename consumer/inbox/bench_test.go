package inbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// latencyRate is how many events BenchmarkInboxLatency records a second.
const latencyRate = 500

// latencySchema remembers in which transaction an event was recorded: finishing it writes its row
// again.
const latencySchema = inboxSchema + `
CREATE TABLE recorded (key text NOT NULL);
CREATE FUNCTION note_recorded() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO recorded VALUES (NEW.idempotency_key); RETURN NULL; END';
CREATE TRIGGER note_recorded AFTER INSERT ON inbox_events FOR EACH ROW EXECUTE FUNCTION note_recorded()`

// benchConfig is an inbox whose handler makes one effect.
func benchConfig() inbox.Config {
	return inbox.Config{
		Config: consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}, Logger: slog.New(slog.DiscardHandler)},
		Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		},
		Workers: 8,
	}
}

// workForBenchmark is a process that works events, and says when it begins.
func workForBenchmark(p *receivertest.Player) {
	in := receivertest.Must(inbox.New(p.Pool(), benchConfig()))
	fmt.Println("ready")
	panic(in.Run(context.Background()))
}

// BenchmarkInboxLatency records events over HTTP at a fixed rate, without waiting for answers, and
// measures from the commit that recorded an event to the commit of its effect; both times are the
// server's. planned is from the moment at which the event was to be sent, so that a stall which
// delays the sender itself shows too. An iteration is one event: -benchtime 5000x takes 10 seconds.
func BenchmarkInboxLatency(b *testing.B) {
	for name, elsewhere := range map[string]bool{"same-process": false, "another-process": true} {
		b.Run(name, func(b *testing.B) {
			server := pgtest.Start(b, localpg.Options{Durable: true, Settings: map[string]string{"track_commit_timestamp": "on"}})
			dsn := server.DSN("postgres")
			pgtest.Migrate(b, dsn, migrations.Inbox)
			pool := pgtest.Pool(b, receivertest.WithSetting(dsn, "pool_max_conns", "16"))
			pgtest.Exec(b, pool, latencySchema)
			in := receivertest.Must(inbox.New(pool, benchConfig()))
			if elsewhere {
				receivertest.LaunchFor(b, "work", receivertest.WithSetting(dsn, "pool_max_conns", "16")).WantLine(b)
			} else {
				ctx, stop := context.WithCancel(b.Context())
				var working sync.WaitGroup
				working.Go(func() {
					if err := in.Run(ctx); err != nil {
						b.Error(err)
					}
				})
				defer working.Wait()
				defer stop()
			}
			receiver := httptest.NewServer(in.Handler())
			defer receiver.Close()
			receiver.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = 64

			bringOnTime(b, receiver, pool, "warm-", 100)
			b.ResetTimer()
			planned := bringOnTime(b, receiver, pool, "evt-", b.N)
			b.StopTimer()
			reportLatency(b, pool, planned)
		})
	}
}

// bringOnTime sends so many events, each at its time, and returns the times when all are done.
func bringOnTime(b *testing.B, receiver *httptest.Server, pool *pgxpool.Pool, prefix string, events int) map[string]time.Time {
	planned := make(map[string]time.Time, events)
	sender := &receivertest.Env{T: b, URL: receiver.URL, Client: receiver.Client()}
	begun := time.Now()
	var all sync.WaitGroup
	for i := range events {
		key, at := prefix+strconv.Itoa(i), begun.Add(time.Duration(i)*time.Second/latencyRate)
		planned[key] = at
		<-time.After(time.Until(at))
		all.Go(func() {
			if answer, err := sender.Try(sender.NewRequest(key, "{}")); err != nil || answer.Status != http.StatusAccepted {
				b.Errorf("%s was answered %d %s, %v", key, answer.Status, answer.Body, err)
			}
		})
	}
	all.Wait()
	for done := false; !done; {
		<-time.After(10 * time.Millisecond)
		pgtest.Must(b, pool.QueryRow(b.Context(), `SELECT count(*) = 0 FROM inbox_events WHERE processing_state IN ('pending', 'processing')`).Scan(&done))
	}
	return planned
}

// reportLatency tells how long after its recording an event was done.
func reportLatency(b *testing.B, pool *pgxpool.Pool, planned map[string]time.Time) {
	rows, err := pool.Query(b.Context(), `
		SELECT key, pg_xact_commit_timestamp(recorded.xmin), pg_xact_commit_timestamp(effect.xmin)
		FROM recorded JOIN effect USING (key) WHERE key LIKE 'evt-%'`)
	pgtest.Must(b, err)
	var fromRecorded, fromPlanned []time.Duration
	var key string
	var recorded, done time.Time
	if _, err := pgx.ForEachRow(rows, []any{&key, &recorded, &done}, func() error {
		fromRecorded = append(fromRecorded, done.Sub(recorded))
		fromPlanned = append(fromPlanned, done.Sub(planned[key]))
		return nil
	}); err != nil {
		b.Fatal(err)
	}
	if len(fromRecorded) != len(planned) {
		b.Fatalf("%d of %d events have an effect", len(fromRecorded), len(planned))
	}
	for unit, durations := range map[string][]time.Duration{"ms": fromRecorded, "planned-ms": fromPlanned} {
		slices.Sort(durations)
		for _, share := range []int{50, 99} {
			d := durations[min(len(durations)*share/100, len(durations)-1)]
			b.ReportMetric(float64(d.Microseconds())/1000, fmt.Sprintf("p%d-%s", share, unit))
		}
	}
	b.ReportMetric(0, "ns/op") // an event's time is the rate's
}

// BenchmarkInboxDrain measures how fast one process works what has piled up, with a handler that
// makes one effect. An iteration is one event.
func BenchmarkInboxDrain(b *testing.B) {
	server := pgtest.Start(b, localpg.Options{Durable: true})
	dsn := server.DSN("postgres")
	pgtest.Migrate(b, dsn, migrations.Inbox)
	traced, err := pgxpool.ParseConfig(receivertest.WithSetting(dsn, "pool_max_conns", "16"))
	pgtest.Must(b, err)
	claims := &claimCounter{}
	traced.ConnConfig.Tracer = claims
	pool, err := pgxpool.NewWithConfig(b.Context(), traced)
	pgtest.Must(b, err)
	defer pool.Close()
	pgtest.Exec(b, pool, inboxSchema)
	for name, keys := range map[string]int{"no-keys": 0, "100-keys": 100} {
		b.Run(name, func(b *testing.B) {
			ctx, stop := context.WithCancel(b.Context())
			defer stop()
			var left atomic.Int64
			left.Store(int64(b.N))
			cfg := benchConfig()
			cfg.Config.Source = "outbox-" + name + strconv.Itoa(b.N)
			cfg.Config.Observe = func(_ context.Context, r consumer.Report) {
				if r.Inbox && left.Add(-1) == 0 {
					stop()
				}
			}
			in := receivertest.Must(inbox.New(pool, cfg))
			pileUp(b, pool, cfg.Config.Source, b.N, keys)
			b.ResetTimer()
			before := claims.n.Load()
			pgtest.Must(b, in.Run(ctx))
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
			b.ReportMetric(float64(b.N)/float64(claims.n.Load()-before), "events/claim")
		})
	}
}

// pileUp records events as Handler does, at once.
func pileUp(b *testing.B, pool *pgxpool.Pool, source string, events, keys int) {
	pgtest.Exec(b, pool, `
		INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, attempts, payload, request_headers,
			ordering_key, sequence, next_attempt_at)
		SELECT 'test', $1, 'k' || i, 'invoice.created', 'pending', 0, '{}',
			jsonb_build_object('X-Idempotency-Key', jsonb_build_array('k' || i), 'X-Outbox-Event-Type', '["invoice.created"]'::jsonb),
			'order-' || i % nullif($3::integer, 0), i, CASE WHEN i > $3::integer AND $3::integer > 0 THEN NULL ELSE now() END
		FROM generate_series(1, $2::integer) i`, source, events, keys)
	pgtest.Exec(b, pool, "VACUUM ANALYZE inbox_events")
}

// claimCounter counts claims.
type claimCounter struct {
	receivertest.StatementNames
	n atomic.Int64
}

func (c *claimCounter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		if strings.Contains(query.SQL, "claim = e.claim + 1") {
			c.n.Add(1)
		}
	}
	return ctx
}

func (c *claimCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
