package kafkaconsumer_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func TestEachEventTakesEffectOnceWhateverCarriedIt(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string]string{"calm": "", "faults": "reading"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, faults)
			receive := e.receiver(effect)
			for i := range 20 {
				e.produce(int32(i%partitions), consumer.Event{Key: fmt.Sprint("k", i)}, secretText)
				e.produce(int32((i+1)%partitions), consumer.Event{Key: fmt.Sprint("k", i)}, secretText)
			}
			posted, err := consumertest.NewRequest(t.Context(), "http://receiver.test", consumer.Event{Key: "k0", Type: "test", Payload: []byte("{}")}, secretText)
			pgtest.Must(t, err)
			answer := httptest.NewRecorder()
			receive.ServeHTTP(answer, posted)
			if answer.Code != http.StatusNoContent {
				t.Fatalf("the POST was answered %d", answer.Code)
			}
			c, _ := e.run(kafkaconsumer.Config{Ahead: 3}, receive)
			e.effects(20)
			e.idle(c)
			e.effects(20)
		})
	}
}

func TestARecordThatFailsIsTriedAgain(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(){
		"error": nil,
		"panic": func() { panic("a defect") },
		"abort": func() { panic(http.ErrAbortHandler) },
		"exit":  runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, "")
			var attempts atomic.Int32
			c, _ := e.run(kafkaconsumer.Config{}, e.receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
				pgtest.Must(t, effect(ctx, tx, event))
				switch {
				case attempts.Add(1) > 3:
					return nil
				case fail != nil:
					fail()
				}
				return errors.New("not yet")
			}))
			e.produce(0, consumer.Event{Key: "k"}, secretText)
			e.effects(1)
			e.idle(c)
			if n := attempts.Load(); n != 4 {
				t.Fatalf("%d attempts, want 4", n)
			}
		})
	}
}

func TestARecordThatIsRefusedForGood(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	refusals := make(chan kafkaconsumer.Refusal, 10)
	var failed atomic.Bool
	_, _ = e.run(kafkaconsumer.Config{Refused: func(_ context.Context, refusal kafkaconsumer.Refusal) error {
		if failed.CompareAndSwap(false, true) {
			panic("the place for refused records is away")
		}
		refusals <- refusal
		return nil
	}}, e.receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.Key == "good" {
			return effect(ctx, tx, event)
		}
		return consumer.Permanent(errors.New("no such invoice"))
	}))
	e.produce(0, consumer.Event{Key: "bad"}, secretText)
	e.produce(0, consumer.Event{Key: "good"}, secretText)
	e.effects(1)
	got := <-refusals
	if got.Status != http.StatusUnprocessableEntity || got.Problem != "permanent-failure" || !strings.Contains(got.Detail, "no such invoice") || got.Record.Offset != 0 {
		t.Fatalf("refusal is %d %s %q", got.Status, got.Problem, got.Detail)
	}
	if len(refusals) > 0 {
		t.Fatal("the record was refused twice")
	}
}

func TestAWrongSecretLosesNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	e.produce(1, consumer.Event{Key: "k"}, otherText)
	c, stop := e.run(kafkaconsumer.Config{}, e.receiver(effect))
	e.becomes("the record fails", func() bool { return c.Lag().Failing == 1 })
	stop()
	cfg := settings()
	cfg.Secrets = []string{secretText, otherText}
	e.run(kafkaconsumer.Config{}, receiver(consumer.New(e.pool, cfg, effect)))
	e.effects(1)
}

// Processes come and go, handlers fail, and the broker is killed: the order of each key stays, and nothing is lost or done twice.
func TestKeysKeepTheirOrder(t *testing.T) {
	t.Parallel()
	const events = 60
	e := newEnv(t, "reading")
	for i := range events {
		for p := range partitions {
			key := fmt.Sprint("key", p)
			e.produce(int32(p), consumer.Event{Key: fmt.Sprint(key, "-", i), ID: int64(i*partitions + p + 1), OrderingKey: key, Sequence: int64(i + 1)}, secretText)
		}
	}
	var calls atomic.Int32
	handle := func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if calls.Add(1)%7 == 0 {
			return errors.New("now and then it fails")
		}
		return effect(ctx, tx, event)
	}
	done := func(n int) {
		e.becomes(fmt.Sprintf("%d are done", n), func() bool {
			var done int
			pgtest.Must(t, e.pool.QueryRow(t.Context(), `SELECT count(*) FROM effect`).Scan(&done))
			return done >= n
		})
	}
	c, _ := e.run(kafkaconsumer.Config{Ahead: 5}, e.receiver(handle))
	done(partitions * events / 6)
	_, stop := e.run(kafkaconsumer.Config{Ahead: 5}, e.receiver(handle)) // another process
	done(partitions * events / 3)
	e.broker.Kill()
	pgtest.Must(t, e.broker.Restart(t.Context()))
	done(partitions * events / 2)
	stop()
	e.effects(partitions * events)
	e.idle(c)
	var reordered int
	pgtest.Must(t, e.pool.QueryRow(t.Context(), `SELECT count(*) FROM effect a JOIN effect b USING (ordering_key) WHERE a.id < b.id AND a.sequence > b.sequence`).Scan(&reordered))
	if reordered > 0 {
		t.Fatalf("%d pairs are out of order", reordered)
	}
}

func TestAnInboxTakesPoisonOutOfTheWay(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
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
	e.run(kafkaconsumer.Config{}, events.Handler())
	for i, key := range []string{"poison", "a", "b"} {
		e.produce(0, consumer.Event{Key: key, ID: int64(i + 1), OrderingKey: key, Sequence: 1}, secretText)
	}
	e.effects(2)
	e.becomes("the poison has failed", func() bool {
		var state string
		pgtest.Must(t, e.pool.QueryRow(t.Context(), `SELECT processing_state FROM inbox_events WHERE idempotency_key = 'poison'`).Scan(&state))
		return state == string(inbox.StateFailed)
	})
}

func TestWhatIsRefusedAtTheStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	receive := e.receiver(effect)
	brokers := []kgo.Opt{kgo.SeedBrokers(e.address)}
	c, err := kafkaconsumer.New(kafkaconsumer.Config{Group: "g", Topics: []string{"none"}, Client: brokers}, receive)
	pgtest.Must(t, err)
	if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), `topic "none": UNKNOWN_TOPIC_OR_PARTITION`) {
		t.Errorf("Run says %v", err)
	}
	for want, cfg := range map[string]kafkaconsumer.Config{
		"Config.Group is empty":  {Topics: []string{topic}},
		"Config.Topics is empty": {Group: "g"},
		"may not be negative":    {Group: "g", Topics: []string{topic}, Ahead: -1},
		"too long":               {Group: "g", Topics: []string{topic}, DrainTimeout: time.Hour},
		"not positive":           {Group: "g", Topics: []string{topic}, Backoff: []time.Duration{0}},
		"Config.Client":          {Group: "g", Topics: []string{topic}, Client: []kgo.Opt{kgo.SeedBrokers()}},
	} {
		if _, err := kafkaconsumer.New(cfg, receive); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New says %v, want %q", err, want)
		}
	}
}
