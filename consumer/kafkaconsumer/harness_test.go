package kafkaconsumer_test

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
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localkafka"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const (
	secretText = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	otherText  = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
	topic      = localkafka.Topic
	partitions = localkafka.Partitions
	patience   = 2 * time.Minute // ends a test that would hang; no assertion depends on it
)

func TestMain(m *testing.M) {
	if localkafka.Serve() {
		return
	}
	pgtest.RunTests(m)
}

// env is a broker, a database and a receiver's settings.
type env struct {
	t       *testing.T
	address string
	broker  *localserver.Server
	send    *kgo.Client
	pool    *pgxpool.Pool
}

func newEnv(t *testing.T, faults string) *env {
	t.Helper()
	e := &env{t: t}
	e.address, e.broker = localkafka.Start(t, faults)
	e.send = localkafka.Client(t, e.address, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	e.pool = pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	pgtest.Exec(t, e.pool, `CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY, key text, ordering_key text, sequence bigint)`)
	return e
}

// produce writes an event as a relay would.
func (e *env) produce(number int32, event consumer.Event, secret string) {
	e.t.Helper()
	if event.Type == "" {
		event.Type = "test"
	}
	event.Payload = []byte("{}")
	r, err := consumertest.NewRequest(e.t.Context(), "http://receiver.test", event, secret)
	pgtest.Must(e.t, err)
	record := &kgo.Record{Topic: topic, Partition: number, Value: event.Payload}
	for name, values := range r.Header {
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: []byte(values[0])})
	}
	pgtest.Must(e.t, e.send.ProduceSync(e.t.Context(), record).FirstErr())
}

// effect writes what the event does.
func effect(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (key, ordering_key, sequence) VALUES ($1, $2, $3)`, event.Key, event.OrderingKey, event.Sequence)
	return err
}

func settings() consumer.Config {
	return consumer.Config{Receiver: "test", Secrets: []string{secretText}, Logger: slog.New(slog.DiscardHandler)}
}

func (e *env) receiver(handle consumer.Handler[pgx.Tx]) http.Handler {
	return receiver(consumer.New(e.pool, settings(), handle))
}

// run starts a consumer and returns what ends it, which also happens at the end of the test.
func (e *env) run(cfg kafkaconsumer.Config, receiver http.Handler) (c *kafkaconsumer.Consumer, stop func()) {
	e.t.Helper()
	cfg.Group, cfg.Topics, cfg.Client, cfg.Logger = "test", []string{topic}, []kgo.Opt{kgo.SeedBrokers(e.address)}, slog.New(slog.DiscardHandler)
	if cfg.Backoff == nil {
		cfg.Backoff = []time.Duration{10 * time.Millisecond}
	}
	c, err := kafkaconsumer.New(cfg, receiver)
	pgtest.Must(e.t, err)
	return c, e.start(c)
}

// start lets a consumer read until stop is called, or until the end of the test.
func (e *env) start(c *kafkaconsumer.Consumer) (stop func()) {
	ctx, cancel := context.WithCancel(e.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		pgtest.Must(e.t, <-ended)
	})
	e.t.Cleanup(stop)
	return stop
}

// effects waits for the number of effects.
func (e *env) effects(want int) {
	e.t.Helper()
	var n int
	e.becomes(fmt.Sprintf("%d effects", want), func() bool {
		pgtest.Must(e.t, e.pool.QueryRow(e.t.Context(), `SELECT count(*) FROM effect`).Scan(&n))
		return n >= want
	})
	if n > want {
		e.t.Fatalf("%d effects, want %d", n, want)
	}
}

func (e *env) idle(c *kafkaconsumer.Consumer) {
	e.t.Helper()
	e.becomes("everything is done", func() bool { lag := c.Lag(); return lag.Waiting == 0 && lag.Failing == 0 })
}

func (e *env) becomes(what string, is func() bool) {
	e.t.Helper()
	testkit.Eventually(e.t, what, is)
}

// receiver returns value. It panics when err is not nil.
func receiver(value http.Handler, err error) http.Handler {
	if err != nil {
		panic(err.Error())
	}
	return value
}
