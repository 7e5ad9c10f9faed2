package reader

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
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/natsconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localnats"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/readertest"
)

const patience = time.Minute // ends a test that would hang; no assertion depends on it

// roleVar makes this test binary play another process.
const roleVar = "READER_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(roleVar) != "" {
		dieAfterCommit()
		return
	}
	pgtest.RunTests(m)
}

// env is a stream and a receiver's database.
type env struct {
	*readertest.Env
	cluster    *localnats.Cluster
	js         jetstream.JetStream
	stream     jetstream.Stream
	partitions int // that readers keep in order; 0: no order
}

func newEnv(t *testing.T, partitions int, change ...func(*jetstream.StreamConfig)) *env {
	t.Helper()
	program, err := localnats.Find("../../..")
	pgtest.Must(t, err)
	cluster, err := localnats.Start(t.Context(), program, 1, "")
	pgtest.Must(t, err)
	t.Cleanup(func() { pgtest.Must(t, cluster.Stop()) })
	conn, err := nats.Connect(cluster.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.RetryOnFailedConnect(true))
	pgtest.Must(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	pgtest.Must(t, err)
	cfg := jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}}
	for _, c := range change {
		c(&cfg)
	}
	e := &env{cluster: cluster, js: js, partitions: partitions}
	e.stream, err = js.CreateStream(t.Context(), cfg)
	pgtest.Must(t, err)
	e.Env = readertest.NewEnv(t, &written{e, t})
	return e
}

// written implements [readertest.Log].
type written struct {
	*env
	t *testing.T
}

func (w *written) Write(partition int, header http.Header, body []byte) {
	_, err := w.js.PublishMsg(w.t.Context(), &nats.Msg{Subject: fmt.Sprintf("outbox.%d.test", partition), Header: nats.Header(header), Data: body})
	pgtest.Must(w.t, err)
}

func (w *written) Reader(receiver http.Handler, refused func(readertest.Refusal) error) readertest.Reader {
	var cfg natsconsumer.Config
	if refused != nil {
		cfg.Refused = func(_ context.Context, r natsconsumer.Refusal) error {
			return refused(readertest.Refusal{Header: http.Header(r.Message.Headers()), Status: r.Status, Problem: r.Problem, Detail: r.Detail})
		}
	}
	return w.reader(cfg, receiver)
}

// reader returns a reader of the stream.
func (e *env) reader(cfg natsconsumer.Config, receiver http.Handler) readertest.Reader {
	cfg.Stream, cfg.Durable = "OUTBOX", "test"
	if e.partitions > 0 {
		cfg.Partitions, cfg.Subject = e.partitions, "outbox.{partition}.>"
	}
	if cfg.Schedule == nil {
		cfg.Schedule = []time.Duration{10 * time.Millisecond}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c, err := natsconsumer.New(e.js, cfg, receiver)
	pgtest.Must(e, err)
	return readertest.Reader{Run: c.Run, Lag: func() (idle bool, failing int) {
		lag, err := c.Lag(e.Context())
		return err == nil && lag == natsconsumer.Lag{}, lag.Failing
	}}
}

// run starts a reader.
func (e *env) run(cfg natsconsumer.Config, receiver http.Handler) readertest.Reader {
	e.Helper()
	r := e.reader(cfg, receiver)
	e.Start(r.Run)
	return r
}

// dieAfterCommit is a process that receives one event and dies when it is committed, before it is
// acknowledged.
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
		cfg := readertest.Settings()
		cfg.Observe = func(_ context.Context, report consumer.Report) {
			fmt.Println(report.Result)
			os.Exit(0)
		}
		receive, err := consumer.New(pool, cfg, readertest.Effect)
		if err != nil {
			return err
		}
		c, err := natsconsumer.New(js, natsconsumer.Config{Stream: "OUTBOX", Durable: "test", AckWait: time.Second}, receive)
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
	e.Helper()
	cmd := exec.CommandContext(e.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), roleVar+"="+e.cluster.URL()+" "+e.DSN)
	out, err := cmd.StdoutPipe()
	pgtest.Must(e, err)
	pgtest.Must(e, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	pgtest.Must(e, err)
	pgtest.Must(e, cmd.Wait())
	return strings.TrimSpace(line)
}
