package kafkaconsumer_test

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localkafka"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
	"github.com/outbox-relay/outbox-relay/internal/readertest"
)

const topic = localkafka.Topic

func TestMain(m *testing.M) {
	if localkafka.Serve() {
		return
	}
	pgtest.RunTests(m)
}

// env is a broker and a receiver's database.
type env struct {
	*readertest.Env
	address string
	broker  *localserver.Server
	send    *kgo.Client
}

func newEnv(t *testing.T, faults string) *env {
	t.Helper()
	e := &env{}
	e.address, e.broker = localkafka.Start(t, faults)
	e.send = localkafka.Client(t, e.address, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	e.Env = readertest.NewEnv(t, &written{e, t})
	return e
}

// written implements [readertest.Log].
type written struct {
	*env
	t *testing.T
}

func (w *written) Write(partition int, header http.Header, body []byte) {
	record := &kgo.Record{Topic: topic, Partition: int32(partition), Value: body}
	for name, values := range header {
		if attribute, found := strings.CutPrefix(name, "Ce-"); found {
			name = "ce_" + strings.ToLower(attribute)
		}
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: []byte(values[0])})
	}
	pgtest.Must(w.t, w.send.ProduceSync(w.t.Context(), record).FirstErr())
}

func (w *written) Reader(receiver http.Handler, refused func(readertest.Refusal) error) readertest.Reader {
	cfg := kafkaconsumer.Config{Ahead: 3, Logger: slog.New(slog.DiscardHandler)}
	if refused != nil {
		cfg.Refused = func(_ context.Context, r kafkaconsumer.Refusal) error {
			header := http.Header{}
			for _, h := range r.Record.Headers {
				header.Add(h.Key, string(h.Value))
			}
			return refused(readertest.Refusal{Header: header, Status: r.Status, Problem: r.Problem, Detail: r.Detail})
		}
	}
	return w.reader(cfg, receiver)
}

// consumer returns one of the topic.
func (e *env) consumer(cfg kafkaconsumer.Config, receiver http.Handler) *kafkaconsumer.Consumer {
	e.Helper()
	cfg.Group, cfg.Topics, cfg.Client = "test", []string{topic}, append(cfg.Client, kgo.SeedBrokers(e.address))
	cfg.Schedule = []time.Duration{10 * time.Millisecond}
	c, err := kafkaconsumer.New(cfg, receiver)
	pgtest.Must(e, err)
	return c
}

// reader returns a reader of the topic.
func (e *env) reader(cfg kafkaconsumer.Config, receiver http.Handler) readertest.Reader {
	e.Helper()
	c := e.consumer(cfg, receiver)
	return readertest.Reader{Run: c.Run, Lag: func() (idle bool, failing int) {
		lag := c.Lag()
		return lag.Waiting == 0 && lag.Failing == 0, lag.Failing
	}}
}
