package natsconsumer_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/natsconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localnats"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const (
	secretText = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	otherText  = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
	patience   = time.Minute // ends a test that would hang; no assertion depends on it
)

// roleVar makes this test binary play another process.
const roleVar = "NATSCONSUMER_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(roleVar) != "" {
		dieAfterCommit()
		return
	}
	pgtest.RunTests(m)
}

// env is a stream, a database and a receiver's settings.
type env struct {
	t       *testing.T
	cluster *localnats.Cluster
	js      jetstream.JetStream
	dsn     string
	pool    *pgxpool.Pool
	stream  jetstream.Stream
}

func newEnv(t *testing.T, change ...func(*jetstream.StreamConfig)) *env {
	t.Helper()
	program, err := localnats.Find("../..")
	pgtest.Must(t, err)
	cluster, err := localnats.Start(t.Context(), program, 1, "")
	pgtest.Must(t, err)
	t.Cleanup(func() { pgtest.Must(t, cluster.Stop()) })
	e := &env{t: t, cluster: cluster, js: connect(t, cluster.URL()), dsn: pgtest.New(t, migrations.Inbox)}
	e.pool = pgtest.Pool(t, e.dsn)
	pgtest.Exec(t, e.pool, `CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY, key text, ordering_key text, sequence bigint)`)
	cfg := jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}}
	for _, c := range change {
		c(&cfg)
	}
	e.stream, err = e.js.CreateStream(t.Context(), cfg)
	pgtest.Must(t, err)
	return e
}

func connect(t *testing.T, url string) jetstream.JetStream {
	t.Helper()
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.RetryOnFailedConnect(true))
	pgtest.Must(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	pgtest.Must(t, err)
	return js
}

// publish puts an event into the stream as a relay would.
func (e *env) publish(subject string, event consumer.Event, secret string) {
	e.t.Helper()
	if event.Type == "" {
		event.Type = "test"
	}
	event.Payload = []byte("{}")
	r, err := consumertest.NewRequest(e.t.Context(), "http://receiver.test", event, secret)
	pgtest.Must(e.t, err)
	_, err = e.js.PublishMsg(e.t.Context(), &nats.Msg{Subject: subject, Header: nats.Header(r.Header), Data: event.Payload})
	pgtest.Must(e.t, err)
}

// effect writes what the event does.
func effect(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (key, ordering_key, sequence) VALUES ($1, $2, $3)`, event.Key, event.OrderingKey, event.Sequence)
	return err
}

func settings() consumer.Config {
	return consumer.Config{Receiver: "test", Secrets: []string{secretText}, Logger: slog.New(slog.DiscardHandler)}
}

// receiver is one of package consumer.
func (e *env) receiver(handle consumer.Handler[pgx.Tx]) http.Handler {
	return receiver(consumer.New(e.pool, settings(), handle))
}

// run starts a consumer and returns what ends it, which also happens at the end of the test.
func (e *env) run(cfg natsconsumer.Config, receiver http.Handler) (c *natsconsumer.Consumer, stop func()) {
	e.t.Helper()
	cfg.Stream, cfg.Durable, cfg.Logger = "OUTBOX", "test", slog.New(slog.DiscardHandler)
	if cfg.Backoff == nil {
		cfg.Backoff = []time.Duration{10 * time.Millisecond}
	}
	c, err := natsconsumer.New(e.js, cfg, receiver)
	pgtest.Must(e.t, err)
	ctx, cancel := context.WithCancel(e.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		pgtest.Must(e.t, <-ended)
	})
	e.t.Cleanup(stop)
	return c, stop
}

// effects waits for the number of effects and returns their keys in order.
func (e *env) effects(want int) []string {
	e.t.Helper()
	var keys []string
	e.becomes(fmt.Sprintf("%d effects", want), func() bool {
		rows, err := e.pool.Query(e.t.Context(), `SELECT key FROM effect ORDER BY id`)
		pgtest.Must(e.t, err)
		keys, err = pgx.CollectRows(rows, pgx.RowTo[string])
		pgtest.Must(e.t, err)
		return len(keys) >= want
	})
	if len(keys) > want {
		e.t.Fatalf("%d effects, want %d: %v", len(keys), want, keys)
	}
	return keys
}

// idle waits until nothing waits in the stream and nothing is under way.
func (e *env) idle(c *natsconsumer.Consumer) {
	e.t.Helper()
	e.becomes("everything is acknowledged", func() bool {
		lag, err := c.Lag(e.t.Context())
		return err == nil && lag == natsconsumer.Lag{}
	})
}

func (e *env) becomes(what string, is func() bool) {
	e.t.Helper()
	testkit.Eventually(e.t, what, is)
}

// dieAfterCommit is a process that receives one event and dies when it is committed, before it is acknowledged.
func dieAfterCommit() {
	url, dsn, _ := strings.Cut(os.Getenv(roleVar), " ")
	ctx := context.Background()
	err := func() error {
		pool, err := pgxpool.New(ctx, dsn)
		if err != nil {
			return err
		}
		conn, err := nats.Connect(url)
		if err != nil {
			return err
		}
		js, err := jetstream.New(conn)
		if err != nil {
			return err
		}
		cfg := settings()
		cfg.Observe = func(_ context.Context, report consumer.Report) {
			fmt.Println(report.Result)
			os.Exit(0)
		}
		c, err := natsconsumer.New(js, natsconsumer.Config{Stream: "OUTBOX", Durable: "test", AckWait: time.Second}, receiver(consumer.New(pool, cfg, effect)))
		if err != nil {
			return err
		}
		return errors.Join(c.Run(ctx), errors.New("it ended"))
	}()
	fmt.Println(err)
	os.Exit(1)
}

// victim runs dieAfterCommit and returns what it printed.
func (e *env) victim() string {
	e.t.Helper()
	cmd := exec.CommandContext(e.t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), roleVar+"="+e.cluster.URL()+" "+e.dsn)
	out, err := cmd.StdoutPipe()
	pgtest.Must(e.t, err)
	pgtest.Must(e.t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	pgtest.Must(e.t, err)
	pgtest.Must(e.t, cmd.Wait())
	return strings.TrimSpace(line)
}

// receiver returns value. It panics when err is not nil.
func receiver(value http.Handler, err error) http.Handler {
	if err != nil {
		panic(err.Error())
	}
	return value
}
