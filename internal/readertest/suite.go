package readertest

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

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Run tests the promises, each with an empty log that open returns. Those about order are
// [Env.Order].
func Run(t *testing.T, open func(t *testing.T) Log) {
	for name, promise := range map[string]func(e *Env){
		"an event takes effect once, whatever carried it": (*Env).Once,
		"a failure is tried again: error":                 func(e *Env) { e.again(func() {}) },
		"a failure is tried again: panic":                 func(e *Env) { e.again(func() { panic("a defect") }) },
		"a failure is tried again: abort":                 func(e *Env) { e.again(func() { panic(http.ErrAbortHandler) }) },
		"a failure is tried again: exit":                  func(e *Env) { e.again(runtime.Goexit) },
		"a refusal for good is handed over once":          (*Env).refusal,
		"a wrong secret loses nothing":                    (*Env).wrongSecret,
		"a stop lets handlers end":                        (*Env).stop,
		"an inbox takes poison out of the way":            (*Env).poison,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			promise(NewEnv(t, open(t)))
		})
	}
}

// Once has each event written twice, and one of them come by HTTP, too.
func (e *Env) Once() {
	receive := e.Receiver(Effect, func(cfg *consumer.Config) { cfg.Destinations = []string{"log", "web"} })
	for i := range 20 {
		for attempt := range 2 {
			e.Write((i+attempt)%Partitions, consumer.Event{IdempotencyKey: fmt.Sprint("k", i), Destination: "log"}, Secret)
		}
	}
	answer := httptest.NewRecorder()
	receive.ServeHTTP(answer, e.request(&consumer.Event{IdempotencyKey: "k0", Destination: "web"}, Secret))
	if answer.Code != http.StatusNoContent {
		e.Fatalf("the POST was answered %d", answer.Code)
	}
	r, _ := e.read(receive)
	e.Effects(20)
	e.Idle(r)
	e.Effects(20)
}

// again has a handler fail three times, after its effect.
func (e *Env) again(fail func()) {
	var attempts atomic.Int32
	r, _ := e.read(e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		pgtest.Must(e, Effect(ctx, tx, event))
		if attempts.Add(1) > 3 {
			return nil
		}
		fail()
		return errors.New("not yet")
	}))
	e.Write(0, consumer.Event{IdempotencyKey: "k"}, Secret)
	e.Effects(1)
	e.Idle(r)
	if n := attempts.Load(); n != 4 {
		e.Fatalf("%d attempts, want 4", n)
	}
}

// refusal has the place for refused messages fail three times before it takes one.
func (e *Env) refusal() {
	refusals := make(chan Refusal, 10)
	var calls atomic.Int32
	r := e.Carrier.Reader(e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.IdempotencyKey == "good" {
			return Effect(ctx, tx, event)
		}
		return consumer.Permanent(errors.New("no such invoice"))
	}), func(refusal Refusal) error {
		switch calls.Add(1) {
		case 1:
			return errors.New("the place for refused messages is away")
		case 2:
			panic("a defect")
		case 3:
			runtime.Goexit()
		}
		refusals <- refusal
		return nil
	})
	e.Start(r.Run)
	e.Write(0, consumer.Event{IdempotencyKey: "bad"}, Secret)
	e.Write(0, consumer.Event{IdempotencyKey: "good"}, Secret)
	e.Effects(1)
	e.Idle(r)
	got := <-refusals
	if got.Status != http.StatusUnprocessableEntity || got.Problem != "permanent-failure" || !strings.Contains(got.Detail, "no such invoice") ||
		got.Header.Get("X-Idempotency-Key") != "bad" {
		e.Fatalf("refusal is %+v", got)
	}
	if len(refusals) > 0 {
		e.Fatal("the message was refused twice")
	}
}

func (e *Env) wrongSecret() {
	e.Write(1, consumer.Event{IdempotencyKey: "k"}, OtherSecret)
	r, stop := e.read(e.Receiver(Effect))
	testkit.Eventually(e, "the message fails", func() bool { _, failing := r.Lag(); return failing == 1 })
	stop()
	r, _ = e.read(e.Receiver(Effect, func(cfg *consumer.Config) { cfg.Secrets = []string{Secret, OtherSecret} }))
	e.Effects(1)
	e.Idle(r)
}

// Order has readers come and go and handlers fail while the events of a key in each partition are
// worked, and disturb disturbs the servers: the order of each key stays, and nothing is lost or
// done twice.
func (e *Env) Order(disturb func()) {
	const events = 50
	for i := range events {
		for p := range Partitions {
			key := fmt.Sprint("key", p)
			e.Write(p, consumer.Event{IdempotencyKey: fmt.Sprint(key, "-", i), ID: int64(i*Partitions + p + 1), OrderingKey: key, Sequence: int64(i + 1)}, Secret)
		}
	}
	var calls atomic.Int32
	receive := e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if calls.Add(1)%7 == 0 {
			return errors.New("now and then it fails")
		}
		return Effect(ctx, tx, event)
	})
	r, _ := e.read(receive)
	e.Reach(Partitions * events / 6)
	_, stop := e.read(receive) // another process
	e.Reach(Partitions * events / 3)
	disturb()
	e.Reach(Partitions * events / 2)
	stop()
	e.Effects(Partitions * events)
	e.Idle(r)
	if n := pgtest.Row[int](e, e.Pool, `SELECT count(*) FROM effect a JOIN effect b USING (ordering_key) WHERE a.id < b.id AND a.sequence > b.sequence`); n > 0 {
		e.Fatalf("%d pairs are out of order", n)
	}
}

func (e *Env) stop() {
	begun, finish := make(chan struct{}), make(chan struct{})
	_, stop := e.read(e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		close(begun)
		<-finish
		return Effect(ctx, tx, event)
	}))
	e.Write(0, consumer.Event{IdempotencyKey: "k"}, Secret)
	<-begun
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	close(finish)
	<-stopped
	if n := pgtest.Row[int](e, e.Pool, `SELECT count(*) FROM effect`); n != 1 {
		e.Fatalf("%d effects when the reader has ended, want 1", n)
	}
}

func (e *Env) poison() {
	events, err := inbox.New(e.Pool, inbox.Config{Config: Settings(), MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.IdempotencyKey == "poison" {
			return errors.New("it never works")
		}
		return Effect(ctx, tx, event)
	}})
	pgtest.Must(e, err)
	e.Start(events.Run)
	r, _ := e.read(events.Handler())
	for i, key := range []string{"poison", "a", "b"} {
		e.Write(0, consumer.Event{IdempotencyKey: key, ID: int64(i + 1), OrderingKey: key, Sequence: 1}, Secret)
	}
	e.Idle(r)
	e.Effects(2)
	testkit.Eventually(e, "the poison has failed", func() bool {
		return pgtest.Row[string](e, e.Pool, `SELECT processing_state FROM inbox_events WHERE idempotency_key = 'poison'`) == string(inbox.StateFailed)
	})
}
