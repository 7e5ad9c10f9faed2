package natsconsumer_test

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
func (e *env) runLogged(cfg natsconsumer.Config) (*natsconsumer.Consumer, warnings) {
	e.t.Helper()
	logged := make(warnings, 100)
	cfg.Stream, cfg.Durable, cfg.Logger = "OUTBOX", "test", slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelWarn}))
	c, err := natsconsumer.New(e.js, cfg, e.receiver(effect))
	pgtest.Must(e.t, err)
	ctx, cancel := context.WithCancel(e.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	e.t.Cleanup(func() { cancel(); pgtest.Must(e.t, <-ended) })
	return c, logged
}

// A reader that went on asking a durable consumer that is gone would stand still for ever, without a word.
func TestAStreamThatIsDeletedAndMadeAgain(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	c, logged := e.runLogged(natsconsumer.Config{})
	e.publish("outbox.test", consumer.Event{Key: "before"}, secretText)
	e.effects(1)

	pgtest.Must(t, e.js.DeleteStream(t.Context(), "OUTBOX"))
	e.becomes("the log to say that the stream is missing", func() bool { return logged.have("stream not found") })
	_, err := e.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>"}})
	pgtest.Must(t, err)
	e.publish("outbox.test", consumer.Event{Key: "after"}, secretText)
	e.effects(2)
	e.idle(c)
}

// Without an error in the log, the keys of a partition that the receiver does not read would wait for ever.
func TestAPartitionThatIsNotRead(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.publish("outbox.1.test", consumer.Event{Key: "read"}, secretText)
	e.publish("outbox.2.test", consumer.Event{Key: "unread"}, secretText)
	_, logged := e.runLogged(natsconsumer.Config{Partitions: 2, Subject: "outbox.{partition}.>"})
	e.becomes("the log to name the partition that is not read", func() bool { return logged.have("subject=outbox.2.>") })
	e.effects(1)
}

// Without signs of life a second process would get the message of a handler that takes longer than AckWait.
func TestAHandlerThatTakesLongGivesSignsOfLife(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	signs, err := e.js.Conn().SubscribeSync("$JS.ACK.OUTBOX.test.>")
	pgtest.Must(t, err)
	finish := make(chan struct{})
	var calls atomic.Int32
	c, _ := e.run(natsconsumer.Config{AckWait: time.Second}, e.receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		calls.Add(1)
		<-finish
		return effect(ctx, tx, event)
	}))
	e.publish("outbox.test", consumer.Event{Key: "k"}, secretText)
	for n := 0; n < 5; { // a third of AckWait apart
		sign, err := signs.NextMsg(patience)
		pgtest.Must(t, err)
		if string(sign.Data) == "+WPI" {
			n++
		}
	}
	close(finish)
	e.effects(1)
	e.idle(c)
	if n := calls.Load(); n != 1 {
		t.Errorf("the handler was called %d times", n)
	}
}
