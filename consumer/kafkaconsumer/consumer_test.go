package kafkaconsumer_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/kafkaconsumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/readertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

func TestPromises(t *testing.T) {
	t.Parallel()
	readertest.Run(t, func(t *testing.T) readertest.Log { return newEnv(t, "").Carrier })
}

func TestEachEventTakesEffectOnceWhileBrokersAnswerWithErrors(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	newEnv(t, "reading").Once()
}

func TestKeysKeepTheirOrder(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	e := newEnv(t, "reading")
	e.Order(func() {
		e.broker.Kill()
		pgtest.Must(t, e.broker.Restart(t.Context()))
	})
}

func TestWhatIsRefusedAtTheStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	receive := e.Receiver(readertest.Effect)
	brokers := []kgo.Opt{kgo.SeedBrokers(e.address)}
	c, err := kafkaconsumer.New(kafkaconsumer.Config{Group: "g", Topics: []string{"none"}, Client: brokers}, receive)
	pgtest.Must(t, err)
	testkit.ErrorContains(t, "Run", c.Run(t.Context()), `topic "none": UNKNOWN_TOPIC_OR_PARTITION`)
	for want, cfg := range map[string]kafkaconsumer.Config{
		"Config.Group is empty":  {Topics: []string{topic}},
		"Config.Topics is empty": {Group: "g"},
		"may not be negative":    {Group: "g", Topics: []string{topic}, Ahead: -1},
		"too long":               {Group: "g", Topics: []string{topic}, DrainTimeout: time.Hour},
		"not positive":           {Group: "g", Topics: []string{topic}, Schedule: []time.Duration{0}},
		"Config.Client":          {Group: "g", Topics: []string{topic}, Client: []kgo.Opt{kgo.SeedBrokers()}},
	} {
		if _, err := kafkaconsumer.New(cfg, receive); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New says %v, want %q", err, want)
		}
	}
}

// The client hands out partitions beside the loop that polls it, also while Run ends. That their
// workers end is checked where the goroutines of all tests are.
func TestRunEndsWhileItGetsPartitions(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	for range testsize.Of(50, 10) {
		ctx, cancel := context.WithCancel(t.Context())
		c, err := kafkaconsumer.New(kafkaconsumer.Config{
			Group: "ends", Topics: []string{topic},
			Client: []kgo.Opt{kgo.SeedBrokers(e.address), kgo.WithHooks(joined(cancel))},
		}, e.Receiver(readertest.Effect))
		pgtest.Must(t, err)
		pgtest.Must(t, c.Run(ctx))
		if lag := c.Lag(); lag != (kafkaconsumer.Lag{}) {
			t.Fatalf("after its end, the consumer has %+v", lag)
		}
	}
}

func TestRunThatEndsAtItsStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	c, err := kafkaconsumer.New(kafkaconsumer.Config{
		Group: "start", Topics: []string{topic}, Client: []kgo.Opt{kgo.SeedBrokers(e.address)},
	}, e.Receiver(readertest.Effect))
	pgtest.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	pgtest.Must(t, c.Run(ctx))
}

// A record that is being worked counts as waiting, whatever comes behind it.
func TestLagCountsTheRecordThatIsWorked(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "")
	begun, finish := make(chan struct{}), make(chan struct{})
	c := e.consumer(kafkaconsumer.Config{Logger: slog.New(slog.DiscardHandler)}, e.Receiver(func(context.Context, pgx.Tx, consumer.Event) error {
		select {
		case begun <- struct{}{}:
			<-finish
		case <-finish:
		}
		return errors.New("not yet")
	}))
	e.Start(c.Run)
	defer close(finish)
	e.produceMany("first", 1)
	<-begun
	e.produceMany("behind", 2)
	testkit.Eventually(t, "three records to wait", func() bool { return c.Lag().Waiting == 3 })
}

// joined is called when the brokers have told a client its partitions.
type joined func()

var _ kgo.HookBrokerRead = joined(nil)

func (j joined) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, _ error) {
	if key == (*kmsg.SyncGroupRequest)(nil).Key() {
		j()
	}
}
