package reader

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/natsconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/readertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestPromises(t *testing.T) {
	t.Parallel()
	for name, partitions := range map[string]int{"in order": readertest.Partitions, "without order": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			readertest.Run(t, func(t *testing.T) readertest.Log { return newEnv(t, partitions).Carrier })
		})
	}
}

func TestKeysKeepTheirOrder(t *testing.T) {
	t.Parallel()
	newEnv(t, readertest.Partitions).Order(func() {})
}

func TestAStreamKeepsWhatIsRefused(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0)
	r := e.run(natsconsumer.Config{}, e.Receiver(func(context.Context, pgx.Tx, consumer.Event) error {
		return consumer.Permanent(errors.New("no such invoice"))
	}))
	e.Write(0, consumer.Event{IdempotencyKey: "k"}, readertest.Secret)
	e.Idle(r)
	kept, err := e.stream.GetMsg(t.Context(), 1)
	pgtest.Must(t, err)
	if kept.Header.Get("X-Idempotency-Key") != "k" {
		t.Fatal("the stream does not keep what was refused")
	}
}

func TestAProcessThatDiesBetweenCommitAndAcknowledgement(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0)
	e.Write(0, consumer.Event{IdempotencyKey: "k"}, readertest.Secret)
	if line := e.victim(); line != string(consumer.ResultProcessed) {
		t.Fatalf("the process printed %q", line)
	}
	e.Effects(1)
	r := e.run(natsconsumer.Config{AckWait: time.Second}, e.Receiver(readertest.Effect))
	e.Idle(r)
	e.Effects(1)
}

func TestAnOutageOfTheServers(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0)
	r := e.run(natsconsumer.Config{}, e.Receiver(readertest.Effect))
	e.Write(0, consumer.Event{IdempotencyKey: "before"}, readertest.Secret)
	e.Effects(1)
	e.cluster.Kill(0)
	pgtest.Must(t, e.cluster.Restart(t.Context(), 0))
	testkit.Eventually(t, "the stream is there again", func() bool { _, err := e.js.Stream(t.Context(), "OUTBOX"); return err == nil })
	e.Write(0, consumer.Event{IdempotencyKey: "after"}, readertest.Secret)
	e.Effects(2)
	pgtest.Must(t, e.js.DeleteConsumer(t.Context(), "OUTBOX", "test")) // by a careless hand
	e.Write(0, consumer.Event{IdempotencyKey: "later"}, readertest.Secret)
	if keys := e.Effects(3); !slices.Equal(keys, []string{"before", "after", "later"}) {
		t.Fatalf("effects are %v", keys)
	}
	e.Idle(r)
}

func TestWhatIsRefusedAtTheStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0, func(cfg *jetstream.StreamConfig) { cfg.Retention = jetstream.WorkQueuePolicy })
	receive := e.Receiver(readertest.Effect)
	for name, c := range map[string]struct {
		cfg  natsconsumer.Config
		want string
	}{
		"retention": {natsconsumer.Config{Stream: "OUTBOX", Durable: "test"}, "set Config.Refused"},
		"stream":    {natsconsumer.Config{Stream: "NONE", Durable: "test"}, "stream not found"},
	} {
		made, err := natsconsumer.New(e.js, c.cfg, receive)
		pgtest.Must(t, err)
		if err := made.Run(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: Run says %v, want %q", name, err, c.want)
		}
	}
	for want, cfg := range map[string]natsconsumer.Config{
		"Config.Stream is empty":     {Durable: "d"},
		"is not a name of JetStream": {Stream: "S", Durable: "a.b"},
		"out of range":               {Stream: "S", Durable: "d", Partitions: -1},
		"must contain {partition}":   {Stream: "S", Durable: "d", Partitions: 2, Subject: "outbox.>"},
		"but Partitions is 0":        {Stream: "S", Durable: "d", Subject: "outbox.{partition}"},
		"may not be negative":        {Stream: "S", Durable: "d", Workers: -1},
		"too short":                  {Stream: "S", Durable: "d", AckWait: time.Millisecond},
		"not positive":               {Stream: "S", Durable: "d", Schedule: []time.Duration{0}},
	} {
		if _, err := natsconsumer.New(e.js, cfg, receive); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New says %v, want %q", err, want)
		}
	}
}

func TestRunThatEndsAtItsStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0)
	r := e.reader(natsconsumer.Config{}, e.Receiver(readertest.Effect))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	pgtest.Must(t, r.Run(ctx))
}
