package kafkaconsumer_test

import (
	"context"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/readertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// The client waits for partitions that it gives away before it lets Run see that its context has
// ended.
func TestOneDrainWhilePartitionsMove(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	const drain = 8 * time.Second
	e := newEnv(t, "")
	begun := make(chan struct{}, 100)
	cfg := kafkaconsumer.Config{
		Client: []kgo.Opt{kgo.HeartbeatInterval(100 * time.Millisecond)}, DrainTimeout: drain, Logger: slog.New(slog.DiscardHandler),
	}
	hold := e.Receiver(func(ctx context.Context, _ pgx.Tx, _ consumer.Event) error {
		begun <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	for i := range readertest.Partitions {
		e.Write(i, consumer.Event{IdempotencyKey: string(rune('a' + i))}, readertest.Secret)
	}
	c := e.consumer(cfg, hold)
	stop := e.Start(c.Run)
	for range readertest.Partitions {
		<-begun
	}
	e.Start(e.consumer(cfg, e.Receiver(readertest.Effect)).Run)
	testkit.Eventually(t, "partitions move", func() bool { return c.Lag().Partitions < readertest.Partitions })
	<-time.After(drain / 2)
	from := time.Now()
	stop()
	if took := time.Since(from); took > drain*5/4 {
		t.Errorf("Run ended %v after its context, with a drain of %v", took, drain)
	}
}

// The client waits for its own commit for as long as the brokers are away, and so would Run.
func TestStopWhileBrokersAreAway(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	e := newEnv(t, "")
	e.produceMany("k", 200)
	var away atomic.Bool
	host := kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		if away.Load() {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, network, address)
	})
	c := e.consumer(kafkaconsumer.Config{Client: []kgo.Opt{host}, Logger: slog.New(slog.DiscardHandler)}, e.Receiver(func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		<-time.After(50 * time.Millisecond)
		return readertest.Effect(ctx, tx, event)
	}))
	stop := e.Start(c.Run)
	e.Reach(5)
	away.Store(true)
	e.broker.Kill()
	e.Reach(10)
	<-time.After(1500 * time.Millisecond) // the client begins to commit meanwhile
	from := time.Now()
	stop()
	if took := time.Since(from); took > 30*time.Second {
		t.Errorf("Run ended %v after its context", took)
	}
}
