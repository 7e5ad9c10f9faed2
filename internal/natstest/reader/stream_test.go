package reader

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
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

// warnings is what a consumer logs for an operator.
type warnings chan string

func (w warnings) Write(line []byte) (int, error) {
	select {
	case w <- string(line):
	default: // the test waits for the first ones
	}
	return len(line), nil
}

// have reports whether the next line, if there is one, has the text.
func (w warnings) have(text string) bool {
	select {
	case line := <-w:
		return strings.Contains(line, text)
	default:
		return false
	}
}

// runLogged is run with a log.
func (e *env) runLogged() (readertest.Reader, warnings) {
	e.Helper()
	logged := make(warnings, 100)
	log := slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return e.run(natsconsumer.Config{Logger: log}, e.Receiver(readertest.Effect)), logged
}

// A reader that continued asking a durable consumer that is gone would stand still for ever,
// without a word.
func TestAStreamThatIsDeletedAndMadeAgain(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0)
	r, logged := e.runLogged()
	e.Write(0, consumer.Event{IdempotencyKey: "before"}, readertest.Secret)
	e.Effects(1)

	pgtest.Must(t, e.js.DeleteStream(t.Context(), "OUTBOX"))
	testkit.Eventually(t, "the log to say that the stream is missing", func() bool { return logged.have("stream not found") })
	_, err := e.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}})
	pgtest.Must(t, err)
	e.Write(0, consumer.Event{IdempotencyKey: "after"}, readertest.Secret)
	e.Effects(2)
	e.Idle(r)
}

// Without an error in the log, the keys of a partition that the receiver does not read would wait
// for ever, also where the partitions between have no key.
func TestAPartitionThatIsNotRead(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 2)
	e.Write(1, consumer.Event{IdempotencyKey: "read"}, readertest.Secret)
	e.Write(11, consumer.Event{IdempotencyKey: "unread"}, readertest.Secret)
	_, logged := e.runLogged()
	testkit.Eventually(t, "the log to name the partition that is not read", func() bool { return logged.have("highest=11 partitions=2") })
	e.Effects(1)
}

// Without signs of life a second process would get the message of a handler that takes longer than
// AckWait.
func TestAHandlerThatTakesLongGivesSignsOfLife(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 0)
	signs, err := e.js.Conn().SubscribeSync("$JS.ACK.OUTBOX.test.>")
	pgtest.Must(t, err)
	finish := make(chan struct{})
	var calls atomic.Int32
	r := e.run(natsconsumer.Config{AckWait: time.Second}, e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		calls.Add(1)
		<-finish
		return readertest.Effect(ctx, tx, event)
	}))
	e.Write(0, consumer.Event{IdempotencyKey: "k"}, readertest.Secret)
	for n := 0; n < 5; { // a third of AckWait apart
		sign, err := signs.NextMsg(patience)
		pgtest.Must(t, err)
		if string(sign.Data) == "+WPI" {
			n++
		}
	}
	close(finish)
	e.Effects(1)
	e.Idle(r)
	if n := calls.Load(); n != 1 {
		t.Errorf("the handler was called %d times", n)
	}
}
