package readertest

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Partitions is how many partitions a log has.
const Partitions = 4

// The secrets that sign events. A receiver of [Env.Receiver] knows the first one alone.
const (
	Secret      = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	OtherSecret = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
)

// A Log is a log for one test, and the package that reads it.
type Log interface {
	// Write puts a message into a partition, as a relay would.
	Write(partition int, header http.Header, body []byte)
	// Reader returns a new reader of all partitions. refused may be nil.
	Reader(receiver http.Handler, refused func(Refusal) error) Reader
}

// A Refusal is what a reader says of a message that is refused for good.
type Refusal struct {
	Header          http.Header // of the message
	Status          int
	Problem, Detail string
}

// A Reader reads a log.
type Reader struct {
	Run func(ctx context.Context) error
	Lag func() (idle bool, failing int) // idle: nothing waits, and nothing is under way
}

// Env is a log and a receiver's database.
type Env struct {
	*testing.T
	Carrier Log
	DSN     string
	Pool    *pgxpool.Pool
}

// NewEnv returns a log with its own database.
func NewEnv(t *testing.T, log Log) *Env {
	t.Helper()
	e := &Env{T: t, Carrier: log, DSN: pgtest.New(t, migrations.Inbox)}
	e.Pool = pgtest.Pool(t, e.DSN)
	pgtest.Exec(t, e.Pool, `CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY, key text, ordering_key text, sequence bigint)`)
	return e
}

// Write writes an event that the secret has signed.
func (e *Env) Write(partition int, event consumer.Event, secret string) {
	e.Helper()
	r := e.request(&event, secret)
	e.Carrier.Write(partition, r.Header, event.Payload)
}

// request returns what a relay would post.
func (e *Env) request(event *consumer.Event, secret string) *http.Request {
	e.Helper()
	event.Type, event.Payload = "test", []byte("{}")
	r, err := consumertest.NewRequest(e.Context(), "http://receiver.test", *event, secret)
	pgtest.Must(e, err)
	key, err := webhook.ParseSecret(secret)
	pgtest.Must(e, err)
	r.Header.Set("Ce-Type", event.Type)
	r.Header.Set("X-Event-Tenant", "a")
	webhook.Sign(r.Header, event.Payload, time.Now(), key)
	return r
}

// Effect is a handler. It writes what the event does.
func Effect(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (key, ordering_key, sequence) VALUES ($1, $2, $3)`, event.IdempotencyKey, event.OrderingKey, event.Sequence)
	return err
}

// Settings returns those of a receiver.
func Settings() consumer.Config {
	return consumer.Config{Receiver: "test", Secrets: []string{Secret}, Logger: slog.New(slog.DiscardHandler)}
}

// Receiver returns one that calls handle. change changes its settings.
func (e *Env) Receiver(handle consumer.Handler[pgx.Tx], change ...func(*consumer.Config)) http.Handler {
	e.Helper()
	cfg := Settings()
	for _, c := range change {
		c(&cfg)
	}
	receive, err := consumer.New(e.Pool, cfg, handle)
	pgtest.Must(e, err)
	return receive
}

// Start lets run continue until stop is called, or until the end of the test.
func (e *Env) Start(run func(ctx context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(e.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		pgtest.Must(e, <-ended)
	})
	e.Cleanup(stop)
	return stop
}

// read starts a reader.
func (e *Env) read(receiver http.Handler) (r Reader, stop func()) {
	e.Helper()
	r = e.Carrier.Reader(receiver, nil)
	return r, e.Start(r.Run)
}

// Reach waits for that many effects at least, and returns their keys in order.
func (e *Env) Reach(want int) (keys []string) {
	e.Helper()
	testkit.Eventually(e, fmt.Sprintf("%d effects", want), func() bool {
		rows, err := e.Pool.Query(e.Context(), `SELECT key FROM effect ORDER BY id`)
		pgtest.Must(e, err)
		keys, err = pgx.CollectRows(rows, pgx.RowTo[string])
		pgtest.Must(e, err)
		return len(keys) >= want
	})
	return keys
}

// Effects waits for exactly that many effects, and returns their keys in order.
func (e *Env) Effects(want int) []string {
	e.Helper()
	keys := e.Reach(want)
	if len(keys) > want {
		e.Fatalf("%d effects, want %d: %v", len(keys), want, keys)
	}
	return keys
}

// Idle waits until everything is acknowledged.
func (e *Env) Idle(r Reader) {
	e.Helper()
	testkit.Eventually(e, "everything is acknowledged", func() bool { idle, _ := r.Lag(); return idle })
}
