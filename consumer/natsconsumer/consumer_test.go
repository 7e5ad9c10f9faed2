package natsconsumer_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/consumer/natsconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func TestEachEventTakesEffectOnceWhateverCarriedIt(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := settings()
	cfg.Destinations = []string{"stream", "web"}
	receive := receiver(consumer.New(e.pool, cfg, effect))
	for i := range 20 {
		e.publish("outbox.test", consumer.Event{Key: fmt.Sprint("k", i), ID: 1, DeliveryID: "1-stream-1"}, secretText)
		e.publish("outbox.test", consumer.Event{Key: fmt.Sprint("k", i), ID: 1, DeliveryID: "1-stream-2"}, secretText)
	}
	posted, err := consumertest.NewRequest(t.Context(), "http://receiver.test",
		consumer.Event{Key: "k0", Type: "test", ID: 1, DeliveryID: "1-web-1", Payload: []byte("{}")}, secretText)
	pgtest.Must(t, err)
	answer := httptest.NewRecorder()
	receive.ServeHTTP(answer, posted)
	if answer.Code != http.StatusNoContent {
		t.Fatalf("the POST was answered %d", answer.Code)
	}
	c, _ := e.run(natsconsumer.Config{}, receive)
	e.idle(c)
	e.effects(20)
}

func TestAMessageThatFailsComesAgain(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(){
		"error": nil,
		"panic": func() { panic("a defect") },
		"abort": func() { panic(http.ErrAbortHandler) },
		"exit":  runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			var attempts atomic.Int32
			c, _ := e.run(natsconsumer.Config{Workers: 1}, e.receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
				pgtest.Must(t, effect(ctx, tx, event))
				switch {
				case attempts.Add(1) > 3:
					return nil
				case fail != nil:
					fail()
				}
				return errors.New("not yet")
			}))
			e.publish("outbox.test", consumer.Event{Key: "k"}, secretText)
			e.effects(1)
			e.idle(c)
			if n := attempts.Load(); n != 4 {
				t.Fatalf("%d attempts, want 4", n)
			}
		})
	}
}

func TestAMessageThatIsRefusedForGood(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	refusals := make(chan natsconsumer.Refusal, 10)
	var failed atomic.Bool
	c, _ := e.run(natsconsumer.Config{Refused: func(_ context.Context, refusal natsconsumer.Refusal) error {
		if failed.CompareAndSwap(false, true) {
			return errors.New("the place for refused messages is away")
		}
		refusals <- refusal
		return nil
	}}, e.receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		return consumer.Permanent(errors.New("no such invoice"))
	}))
	e.publish("outbox.test", consumer.Event{Key: "k"}, secretText)
	e.idle(c)
	got := <-refusals
	if got.Status != http.StatusUnprocessableEntity || got.Problem != "permanent-failure" || !strings.Contains(got.Detail, "no such invoice") {
		t.Fatalf("refusal is %d %s %q", got.Status, got.Problem, got.Detail)
	}
	if len(refusals) > 0 {
		t.Fatal("the message was refused twice")
	}
	kept, err := e.stream.GetMsg(t.Context(), 1)
	pgtest.Must(t, err)
	if kept.Header.Get("X-Idempotency-Key") != "k" {
		t.Fatal("the stream does not keep what was refused")
	}
}

func TestAWrongSecretLosesNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.publish("outbox.test", consumer.Event{Key: "k"}, otherText)
	c, stop := e.run(natsconsumer.Config{}, e.receiver(effect))
	e.becomes("the message came twice", func() bool {
		lag, err := c.Lag(t.Context())
		return err == nil && lag.Failing == 1
	})
	stop()
	cfg := settings()
	cfg.Secrets = []string{secretText, otherText}
	c, _ = e.run(natsconsumer.Config{}, receiver(consumer.New(e.pool, cfg, effect)))
	e.idle(c)
	e.effects(1)
}

func TestKeysKeepTheirOrder(t *testing.T) {
	t.Parallel()
	const partitions, events = 4, 50
	e := newEnv(t)
	for i := range events {
		for p := range partitions {
			key := fmt.Sprint("key", p)
			e.publish(fmt.Sprintf("outbox.%d.test", p), consumer.Event{Key: fmt.Sprint(key, "-", i), ID: int64(i*partitions + p + 1), OrderingKey: key, Sequence: int64(i + 1)}, secretText)
		}
	}
	var calls atomic.Int32
	handle := func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if calls.Add(1)%7 == 0 {
			return errors.New("now and then it fails")
		}
		return effect(ctx, tx, event)
	}
	cfg := natsconsumer.Config{Partitions: partitions, Subject: "outbox.{partition}.>"}
	c, _ := e.run(cfg, e.receiver(handle))
	_, stop := e.run(cfg, e.receiver(handle)) // another process
	e.becomes("a third is done", func() bool { return calls.Load() > partitions*events/3 })
	stop()
	e.idle(c)
	e.effects(partitions * events)
	var reordered int
	pgtest.Must(t, e.pool.QueryRow(t.Context(), `SELECT count(*) FROM effect a JOIN effect b USING (ordering_key) WHERE a.id < b.id AND a.sequence > b.sequence`).Scan(&reordered))
	if reordered > 0 {
		t.Fatalf("%d pairs are out of order", reordered)
	}
}

func TestAProcessThatDiesBetweenCommitAndAcknowledgement(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.publish("outbox.test", consumer.Event{Key: "k"}, secretText)
	if line := e.victim(); line != string(consumer.ResultProcessed) {
		t.Fatalf("the process printed %q", line)
	}
	e.effects(1)
	c, _ := e.run(natsconsumer.Config{AckWait: time.Second}, e.receiver(effect))
	e.idle(c)
	e.effects(1)
}

func TestAnOutageOfTheServers(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	c, _ := e.run(natsconsumer.Config{}, e.receiver(effect))
	e.publish("outbox.test", consumer.Event{Key: "before"}, secretText)
	e.effects(1)
	e.cluster.Kill(0)
	pgtest.Must(t, e.cluster.Restart(t.Context(), 0))
	e.becomes("the stream is there again", func() bool { _, err := e.js.Stream(t.Context(), "OUTBOX"); return err == nil })
	e.publish("outbox.test", consumer.Event{Key: "after"}, secretText)
	e.effects(2)
	pgtest.Must(t, e.js.DeleteConsumer(t.Context(), "OUTBOX", "test")) // by a careless hand
	e.publish("outbox.test", consumer.Event{Key: "later"}, secretText)
	if keys := e.effects(3); !slices.Equal(keys, []string{"before", "after", "later"}) {
		t.Fatalf("effects are %v", keys)
	}
	e.idle(c)
}

func TestAStopLetsHandlersEnd(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	begun, finish := make(chan struct{}), make(chan struct{})
	_, stop := e.run(natsconsumer.Config{}, e.receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		close(begun)
		<-finish
		return effect(ctx, tx, event)
	}))
	e.publish("outbox.test", consumer.Event{Key: "k"}, secretText)
	<-begun
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	close(finish)
	<-stopped
	e.effects(1)
}

func TestAnInboxTakesPoisonOutOfTheWay(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	events, err := inbox.New(e.pool, inbox.Config{Config: settings(), MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.Key == "poison" {
			return errors.New("it never works")
		}
		return effect(ctx, tx, event)
	}})
	pgtest.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- events.Run(ctx) }()
	defer func() { cancel(); pgtest.Must(t, <-ended) }()
	c, _ := e.run(natsconsumer.Config{Partitions: 1, Subject: "outbox.{partition}.>"}, events.Handler())
	for i, key := range []string{"poison", "a", "b"} {
		e.publish("outbox.0.test", consumer.Event{Key: key, ID: int64(i + 1), OrderingKey: key, Sequence: 1}, secretText)
	}
	e.idle(c)
	e.effects(2)
	var state string
	e.becomes("the poison has failed", func() bool {
		pgtest.Must(t, e.pool.QueryRow(t.Context(), `SELECT processing_state FROM inbox_events WHERE idempotency_key = 'poison'`).Scan(&state))
		return state == string(inbox.StateFailed)
	})
}

func TestWhatIsRefusedAtTheStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, func(cfg *jetstream.StreamConfig) { cfg.Retention = jetstream.WorkQueuePolicy })
	receive := e.receiver(effect)
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
		"not positive":               {Stream: "S", Durable: "d", Backoff: []time.Duration{0}},
	} {
		if _, err := natsconsumer.New(e.js, cfg, receive); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New says %v, want %q", err, want)
		}
	}
}
