package kafkaconsumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
)

// Config says what to read and how. Group, Topics and brokers are required.
type Config struct {
	// Group is the consumer group, whose offsets say what was read. All processes of one receiver
	// use the same one, and those of another receiver another one. A new group begins with the
	// oldest records.
	Group string

	// Topics are those that the relay writes to. They must exist.
	Topics []string

	// Client says how to reach the brokers: kgo.SeedBrokers, and for instance kgo.DialTLSConfig and
	// kgo.SASL. Options about groups, offsets and commits are set by this package.
	Client []kgo.Opt

	// Ahead bounds how many records of each partition wait in memory. 0: 500.
	Ahead int

	// Schedule holds the delays after the first, second, … failure of a record; the last repeats.
	// Empty: 1s, 5s, 30s, 1m.
	Schedule []time.Duration

	// DrainTimeout is how long a handler may continue after the context of Run has ended, or after
	// its partition was given to another process, or its topic was made again. Then its context
	// ends too. 0: 20 seconds. Longer than 40 seconds is refused: the group's other processes would
	// wait for it. They wait for a process that died while partitions change hands, too: 20 seconds
	// longer than this.
	DrainTimeout time.Duration

	// Refused is called with a record that no repetition will change, before it is passed, to keep
	// it elsewhere. An error, or a panic, makes the record be tried again. It is called
	// concurrently. Nil: the record stays in its topic for as long as that keeps records, and the
	// log names its offset.
	Refused func(ctx context.Context, refusal Refusal) error

	// Logger receives what an operator must act on. It gets offsets, statuses and reasons, never
	// payloads or headers. Nil: slog.Default().
	Logger *slog.Logger
}

// A Refusal is a record that its receiver has refused for good.
type Refusal struct {
	Record  *kgo.Record
	Status  int    // what an HTTP client would have been answered, such as 422
	Problem string // the name of the problem (docs/wire.md), such as "event-unknown"; empty where a handler answered its own way
	Detail  string // why, as the receiver says to a sender
}

// A Consumer reads topics. Its methods may be called concurrently.
type Consumer struct {
	cfg     Config // completed
	receive http.Handler

	mu         sync.Mutex
	partitions map[partition]*worker // that this process has; nil: it takes none, Run has not begun or ends
	remade     map[string]bool       // topics that were made again, until they are assigned

	committing sync.WaitGroup // ends when the client is closed
}

// partition names a partition of a topic.
type partition struct {
	topic  string
	number int32
}

const (
	maxDrain = 40 * time.Second
	// giveBack is how long after its drain a process may take to give its partitions back before
	// its group gives up on it.
	giveBack = 20 * time.Second
	// commitTimeout and leaveTimeout bound what waits for brokers that may be away.
	commitTimeout = 10 * time.Second
	leaveTimeout  = 5 * time.Second
)

// New returns a consumer of the topics, which [Consumer.Run] starts. It fails when cfg cannot work,
// and asks no broker.
func New(cfg Config, receiver http.Handler) (*Consumer, error) {
	switch {
	case receiver == nil:
		return nil, errors.New("kafkaconsumer: New needs a receiver, such as that of consumer.New or the Handler of an inbox")
	case cfg.Group == "":
		return nil, errors.New("kafkaconsumer: Config.Group is empty: name the receiver's consumer group, such as \"search\"")
	case len(cfg.Topics) == 0 || slices.Contains(cfg.Topics, ""):
		return nil, errors.New("kafkaconsumer: Config.Topics is empty or has an empty name: name the topics that the relay writes to")
	case cfg.Ahead < 0 || cfg.DrainTimeout < 0:
		return nil, errors.New("kafkaconsumer: Config.Ahead and DrainTimeout may not be negative")
	case cfg.DrainTimeout > maxDrain:
		return nil, fmt.Errorf("kafkaconsumer: Config.DrainTimeout: %v is too long, the group's other processes would wait for this one; write %v or less", cfg.DrainTimeout, maxDrain)
	}
	if err := kgo.ValidateOpts(cfg.Client...); err != nil {
		return nil, fmt.Errorf("kafkaconsumer: Config.Client: %w", err)
	}
	cfg.Ahead = cmp.Or(cfg.Ahead, 500)
	cfg.DrainTimeout = cmp.Or(cfg.DrainTimeout, 20*time.Second)
	var err error
	if cfg.Schedule, err = message.Schedule("kafkaconsumer", cfg.Schedule); err != nil {
		return nil, err
	}
	return &Consumer{cfg: cfg, receive: receiver}, nil
}

// Run works records until ctx ends: then it takes no more, lets the handlers that are running end,
// for DrainTimeout at most, commits offsets, leaves the group and returns nil. It may run in any
// number of processes, once in each Consumer. An outage of the brokers, of any length, does not end
// it; one that lasts while Run ends delays that by 30 seconds at most. It returns an error at the
// start only: when no broker answers, or a topic does not exist.
func (c *Consumer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx) // it ends all workers at once, whatever the client waits for
	defer cancel()
	c.mu.Lock()
	c.partitions, c.remade = map[partition]*worker{}, map[string]bool{}
	c.mu.Unlock()
	// A partition that has had enough takes part in the next fetch again: no fetch may be long.
	client, err := kgo.NewClient(append(append([]kgo.Opt{kgo.FetchMaxWait(500 * time.Millisecond)}, c.cfg.Client...),
		kgo.ConsumerGroup(c.cfg.Group), kgo.ConsumeTopics(c.cfg.Topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.AutoCommitMarks(), kgo.AutoCommitInterval(time.Second), kgo.BlockRebalanceOnPoll(), kgo.RebalanceTimeout(c.cfg.DrainTimeout+giveBack),
		kgo.OnPartitionsAssigned(func(_ context.Context, client *kgo.Client, got map[string][]int32) { c.assigned(ctx, client, got) }),
		kgo.AdjustFetchOffsetsFn(c.begin), kgo.OnPartitionsRevoked(c.revoked), kgo.OnPartitionsLost(c.lost))...)
	if err != nil {
		return fmt.Errorf("kafkaconsumer: %w", err)
	}
	defer c.committing.Wait()
	defer client.CloseAllowingRebalance()
	defer c.leave(client)
	if err := c.checkTopics(ctx, client); err != nil && ctx.Err() == nil {
		return err
	}
	for reported := (map[partition]string{}); ctx.Err() == nil; {
		fetched := client.PollRecords(ctx, c.cfg.Ahead)
		fetched.EachPartition(c.hand)
		client.AllowRebalance()
		if ctx.Err() == nil {
			c.handleErrors(ctx, client, fetched, reported)
		}
	}
	return nil
}

// errorPause is between two requests that failed: an error that lasts would otherwise come
// thousands of times a second.
const errorPause = 500 * time.Millisecond

// handleErrors logs the errors of a fetch, each once until the partition has records again, and has
// topics that were deleted and made again read from their beginning: the client would ask for the
// old ones for ever.
func (c *Consumer) handleErrors(ctx context.Context, client *kgo.Client, fetched kgo.Fetches, reported map[partition]string) {
	var again []string
	fetched.EachPartition(func(p kgo.FetchTopicPartition) {
		at := partition{p.Topic, p.Partition}
		if p.Err == nil {
			delete(reported, at)
			return
		}
		if reported[at] != p.Err.Error() {
			reported[at] = p.Err.Error()
			c.logger().WarnContext(ctx, "kafkaconsumer: no records; it continues to ask", "topic", p.Topic, "partition", p.Partition, "error", p.Err)
		}
		if errors.Is(p.Err, kerr.UnknownTopicID) && !slices.Contains(again, p.Topic) {
			again = append(again, p.Topic)
		}
	})
	if fetched.NumRecords() == 0 && len(fetched.Errors()) > 0 {
		_ = sleep.For(ctx, errorPause)
	}
	if len(again) > 0 {
		// An offset of the old topic that is marked later would be committed for the new one.
		c.stop(func(p partition) bool { return slices.Contains(again, p.topic) }, true)
		c.mu.Lock()
		for _, topic := range again {
			c.remade[topic] = true
		}
		c.mu.Unlock()
		client.PurgeTopicsFromConsuming(again...)
		client.AddConsumeTopics(again...)
	}
}

// checkTopics refuses a topic that does not exist: the client would wait for it without a word.
func (c *Consumer) checkTopics(ctx context.Context, client *kgo.Client) error {
	request := kmsg.NewPtrMetadataRequest()
	request.AllowAutoTopicCreation = false
	for _, name := range c.cfg.Topics {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr(name)
		request.Topics = append(request.Topics, topic)
	}
	found, err := request.RequestWith(ctx, client)
	if err != nil {
		return fmt.Errorf("kafkaconsumer: ask for the topics: %w", err)
	}
	for _, topic := range found.Topics {
		if err := kerr.ErrorForCode(topic.ErrorCode); err != nil {
			return fmt.Errorf("kafkaconsumer: topic %q: %w", *topic.Topic, err)
		}
	}
	return nil
}

// hand gives records to their partition's worker.
func (c *Consumer) hand(p kgo.FetchTopicPartition) {
	c.mu.Lock()
	w := c.partitions[partition{p.Topic, p.Partition}]
	c.mu.Unlock()
	if w != nil && len(p.Records) > 0 {
		w.reportRemoved(p.LogStartOffset)
		w.push(p.Records, p.HighWatermark)
	}
}

// assigned starts a worker for each partition that this process gets, until ctx ends. The client
// may also get some while it leaves the group, when Run has ended all workers: they get none.
func (c *Consumer) assigned(ctx context.Context, client *kgo.Client, got map[string][]int32) {
	c.stop(among(got), true) // none, if the client revokes what it had before it gets it again
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.partitions == nil {
		return
	}
	for topic, numbers := range got {
		for _, number := range numbers {
			w := newWorker(c, client, partition{topic, number})
			c.partitions[w.partition] = w
			w.start(ctx)
		}
	}
}

// begin has a topic that was made again read from its beginning. Before Kafka 4.1 offsets are
// committed by name: the client may have committed one of the old topic for the new one.
func (c *Consumer) begin(_ context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for topic, partitions := range offsets {
		if c.remade[topic] {
			delete(c.remade, topic)
			for number := range partitions {
				partitions[number] = kgo.NewOffset().AtStart()
			}
		}
	}
	return offsets, nil
}

// revoked ends the workers of partitions that go to another process, and commits what they have
// done, so that it does not come again there.
func (c *Consumer) revoked(_ context.Context, client *kgo.Client, gone map[string][]int32) {
	c.stop(among(gone), false)
	c.mu.Lock()
	left := c.partitions == nil // leave has committed
	c.mu.Unlock()
	if !left {
		c.commit(client)
	}
}

// commit commits what is marked, or gives up after a while. The client may wait for longer: in an
// outage its earlier commit ends only when it leaves the group.
func (c *Consumer) commit(client *kgo.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), commitTimeout)
	defer cancel()
	committed := make(chan error, 1)
	c.committing.Go(func() { committed <- client.CommitMarkedOffsets(ctx) })
	var err error
	select {
	case err = <-committed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		c.logger().WarnContext(ctx, "kafkaconsumer: offsets are not committed; the records come again, as duplicates", "error", err)
	}
}

// lost ends the workers of partitions that others have already.
func (c *Consumer) lost(_ context.Context, _ *kgo.Client, gone map[string][]int32) {
	c.stop(among(gone), true)
}

// among returns a function that reports whether a partition is one of those that the client names.
func among(named map[string][]int32) func(partition) bool {
	return func(p partition) bool { return slices.Contains(named[p.topic], p.number) }
}

// stop ends the workers of some partitions, and waits for them. gone: what they still finish is not
// committed.
func (c *Consumer) stop(which func(partition) bool, gone bool) {
	var ending []*worker
	c.mu.Lock()
	maps.DeleteFunc(c.partitions, func(p partition, w *worker) bool {
		if which(p) {
			ending = append(ending, w)
		}
		return which(p)
	})
	c.mu.Unlock()
	end(ending, gone)
}

// end ends workers together and waits for them.
func end(ending []*worker, gone bool) {
	for _, w := range ending {
		w.halt(gone)
	}
	for _, w := range ending {
		w.running.Wait()
	}
}

// leave ends all workers, commits what they have done, lets no further one start, and leaves the
// group.
func (c *Consumer) leave(client *kgo.Client) {
	c.mu.Lock()
	ending := slices.Collect(maps.Values(c.partitions))
	c.partitions = nil
	c.mu.Unlock()
	end(ending, false)
	c.commit(client)
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	_ = client.LeaveGroupContext(ctx) // otherwise the group ends its membership in time
}

// Lag is what waits for this process, in records.
type Lag struct {
	Partitions int   // that this process has
	Waiting    int64 // in them, the one that is being worked among them
	Failing    int   // partitions whose next record has failed
}

// Lag returns what waited when the brokers were last asked for records. It makes no request, so a
// scrape may call it.
func (c *Consumer) Lag() Lag {
	c.mu.Lock()
	defer c.mu.Unlock()
	sum := Lag{Partitions: len(c.partitions)}
	for _, w := range c.partitions {
		waiting, failing := w.lag()
		sum.Waiting += waiting
		if failing {
			sum.Failing++
		}
	}
	return sum
}

func (c *Consumer) logger() *slog.Logger { return cmp.Or(c.cfg.Logger, slog.Default()) }
