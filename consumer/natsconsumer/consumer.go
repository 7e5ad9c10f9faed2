package natsconsumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
)

// Config says what to read and how. Stream and Durable are required.
type Config struct {
	// Stream names the stream. It must exist: what it keeps, and for how long, is its owner's to
	// decide.
	Stream string

	// Durable names the durable consumer that remembers what was acknowledged, such as "search";
	// with Partitions "search-0", "search-1" and so on. All processes of one receiver use the same
	// name, and those of another receiver another one. It is created when it does not exist, and
	// begins with the stream's first message. A JetStream name: no blanks, dots, '*', '>', '/' or
	// '\'.
	Durable string

	// Subject chooses messages of the stream, with the wildcards of NATS. With Partitions it
	// contains {partition} once, such as "outbox.{partition}.>". Empty: all of them.
	Subject string

	// Partitions is the number over which the relay spreads the ordering keys. Never lower it while
	// messages of the higher ones are unread: nothing reads them. Run logs an error when it starts
	// while the stream has messages of higher ones, read or not. 0: no order.
	Partitions int

	// Workers is how many messages this process works at once without Partitions; with them there
	// is one worker for each. 0: 8.
	Workers int

	// AckWait is after which time without a sign of life a message goes to another process. A
	// handler that runs longer gives signs of life; so this bounds how long a crash delays the
	// message. 0: 10 seconds.
	AckWait time.Duration

	// Schedule holds the delays after the first, second, … failure of a message; the last repeats.
	// Empty: 1s, 5s, 30s, 1m.
	Schedule []time.Duration

	// DrainTimeout is how long Run lets handlers continue after its context has ended. Then their
	// contexts end too. 0: 20 seconds.
	DrainTimeout time.Duration

	// Refused is called with a message that no repetition will change, before it is terminated, to
	// keep it elsewhere. An error, or a panic, makes the message come again. It is called
	// concurrently. Nil: the message stays in the stream, and the log says so.
	Refused func(ctx context.Context, refusal Refusal) error

	// Logger receives what an operator must act on. It gets sequences, statuses and reasons, never
	// payloads or headers. Nil: slog.Default().
	Logger *slog.Logger
}

// A Refusal is a message that its receiver has refused for good.
type Refusal struct {
	Message jetstream.Msg // not to be acknowledged
	Status  int           // what an HTTP client would have been answered, such as 422
	Problem string        // the name of the problem (docs/wire.md), such as "event-unknown"; empty where a handler answered its own way
	Detail  string        // why, as the receiver says to a sender
}

// A Consumer reads a stream. Its methods may be called concurrently.
type Consumer struct {
	cfg     Config // completed
	js      jetstream.JetStream
	receive http.Handler
}

// New returns a consumer of the stream, which [Consumer.Run] starts. js is used for everything and
// not closed; its connection should reconnect for ever (nats.MaxReconnects(-1)). New fails when cfg
// cannot work, and asks no server.
func New(js jetstream.JetStream, cfg Config, receiver http.Handler) (*Consumer, error) {
	switch {
	case js == nil:
		return nil, errors.New("natsconsumer: New needs a JetStream")
	case receiver == nil:
		return nil, errors.New("natsconsumer: New needs a receiver, such as that of consumer.New or the Handler of an inbox")
	case cfg.Stream == "":
		return nil, errors.New("natsconsumer: Config.Stream is empty: name the stream that the relay publishes to")
	case cfg.Durable == "" || strings.ContainsAny(cfg.Durable, " \t.*>/\\"):
		return nil, fmt.Errorf("natsconsumer: Config.Durable: %q is not a name of JetStream: write one without blanks, dots, '*', '>', '/' and '\\', such as \"search\"", cfg.Durable)
	case cfg.Partitions < 0 || cfg.Partitions > 1024:
		return nil, fmt.Errorf("natsconsumer: Config.Partitions: %d is out of range; write 1 to 1024, or 0 for no order", cfg.Partitions)
	case cfg.Partitions > 0 && strings.Count(cfg.Subject, partition) != 1:
		return nil, fmt.Errorf("natsconsumer: Config.Subject: %q must contain %s once, where the relay's subject has it, since Partitions is set", cfg.Subject, partition)
	case cfg.Partitions == 0 && strings.Contains(cfg.Subject, partition):
		return nil, fmt.Errorf("natsconsumer: Config.Subject contains %s, but Partitions is 0: set it to the destination's partitions", partition)
	case cfg.Workers < 0 || cfg.AckWait < 0 || cfg.DrainTimeout < 0:
		return nil, errors.New("natsconsumer: Config.Workers, AckWait and DrainTimeout may not be negative")
	case cfg.AckWait > 0 && cfg.AckWait < time.Second:
		return nil, fmt.Errorf("natsconsumer: Config.AckWait: %v is too short for signs of life to arrive; write 1s or more", cfg.AckWait)
	}
	cfg.Workers = cmp.Or(cfg.Workers, 8)
	cfg.AckWait = cmp.Or(cfg.AckWait, 10*time.Second)
	cfg.DrainTimeout = cmp.Or(cfg.DrainTimeout, 20*time.Second)
	var err error
	if cfg.Schedule, err = message.Schedule("natsconsumer", cfg.Schedule); err != nil {
		return nil, err
	}
	return &Consumer{cfg: cfg, js: js, receive: receiver}, nil
}

// partition is what stands for a partition's number in a subject.
const partition = "{partition}"

// lane is what one durable consumer of JetStream gives.
type lane struct {
	durable string
	subject string
	workers int
	pending int // messages under way at once, in all processes
}

// lanes returns a lane for each partition, or one for everything.
func (c *Consumer) lanes() []lane {
	if c.cfg.Partitions == 0 {
		return []lane{{c.cfg.Durable, c.cfg.Subject, c.cfg.Workers, max(1000, c.cfg.Workers)}}
	}
	lanes := make([]lane, c.cfg.Partitions)
	for i := range lanes {
		n := strconv.Itoa(i)
		lanes[i] = lane{c.cfg.Durable + "-" + n, strings.Replace(c.cfg.Subject, partition, n, 1), 1, 1}
	}
	return lanes
}

// Run works messages until ctx ends: then it takes no more, lets the handlers that are running end,
// for DrainTimeout at most, and returns nil. It may run in any number of processes. An outage of
// the servers, of any length, does not end it. It returns an error at the start only: when the
// stream does not exist, its durable consumer cannot be created, or the stream would remove what
// the receiver refuses.
func (c *Consumer) Run(ctx context.Context) error {
	lanes := c.lanes()
	sources, err := c.sources(ctx, lanes)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(c.cfg.DrainTimeout, stop)
		context.AfterFunc(working, func() { timer.Stop() })
	})()
	var workers sync.WaitGroup
	for i, l := range lanes {
		for range l.workers {
			workers.Go(func() { c.work(ctx, working, l, sources[i]) })
		}
	}
	workers.Wait()
	return nil
}

// sources checks the stream and opens the durable consumer of each lane.
func (c *Consumer) sources(ctx context.Context, lanes []lane) ([]jetstream.Consumer, error) {
	if err := c.checkStream(ctx); err != nil {
		return nil, err
	}
	sources := make([]jetstream.Consumer, 0, len(lanes))
	for _, l := range lanes {
		source, err := c.open(ctx, l)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source)
	}
	return sources, nil
}

// checkStream refuses what would lose messages.
func (c *Consumer) checkStream(ctx context.Context) error {
	stream, err := c.js.Stream(ctx, c.cfg.Stream)
	if err != nil {
		return fmt.Errorf("natsconsumer: stream %q: %w", c.cfg.Stream, err)
	}
	if c.cfg.Partitions > 0 {
		c.reportUnread(ctx, stream)
	}
	if kept := stream.CachedInfo().Config.Retention; kept != jetstream.LimitsPolicy && c.cfg.Refused == nil {
		return fmt.Errorf("natsconsumer: stream %q removes messages that are done with (retention %v), also those that the receiver refuses: "+
			"set Config.Refused to keep these elsewhere, or use a stream with retention %v", c.cfg.Stream, kept, jetstream.LimitsPolicy)
	}
	return nil
}

// reportUnread says that the stream has messages of partitions that this receiver does not read:
// they would wait for ever, and no lag would show it. Which partitions have messages depends on the
// keys, so that the next one may have none.
func (c *Consumer) reportUnread(ctx context.Context, stream jetstream.Stream) {
	words := strings.Split(c.cfg.Subject, ".")
	at := slices.IndexFunc(words, func(word string) bool { return strings.Contains(word, partition) })
	before, after, _ := strings.Cut(words[at], partition)
	words[at] = "*"
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(strings.Join(words, ".")))
	if err != nil {
		return
	}
	highest := -1
	for subject := range info.State.Subjects {
		word := strings.Split(subject, ".")[at]
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(word, before), after))
		if err == nil && word == before+strconv.Itoa(n)+after {
			highest = max(highest, n)
		}
	}
	if highest >= c.cfg.Partitions {
		c.logger().ErrorContext(ctx, "natsconsumer: the stream has messages of partitions that Config.Partitions leaves out: nothing reads them, unless they were read before it was lowered; "+
			"set it to the partitions of the relay's destination", "stream", c.cfg.Stream, "highest", highest, "partitions", c.cfg.Partitions)
	}
}

// open creates the durable consumer of a lane, or brings it up to date.
func (c *Consumer) open(ctx context.Context, l lane) (jetstream.Consumer, error) {
	source, err := c.js.CreateOrUpdateConsumer(ctx, c.cfg.Stream, jetstream.ConsumerConfig{
		Durable: l.durable, FilterSubject: l.subject, AckPolicy: jetstream.AckExplicitPolicy, AckWait: c.cfg.AckWait, MaxAckPending: l.pending,
	})
	if err != nil {
		return nil, fmt.Errorf("natsconsumer: durable consumer %q of stream %q: %w", l.durable, c.cfg.Stream, err)
	}
	return source, nil
}

const (
	// pullWait is how long a request for a message waits at the server. A stop waits for its end: a
	// message that arrived behind it would be missing for AckWait.
	pullWait = 2 * time.Second
	// outagePause is between two requests while the servers do not answer.
	outagePause = 500 * time.Millisecond
)

// work takes one message after the other until ctx ends.
func (c *Consumer) work(ctx, working context.Context, l lane, source jetstream.Consumer) {
	for away := false; ctx.Err() == nil; {
		msg, err := source.Next(jetstream.FetchMaxWait(pullWait))
		if err == nil {
			c.take(working, msg)
		}
		if err == nil || quiet(err) {
			away = false
			continue
		}
		// The servers may be away, or the durable consumer may be gone: deleted by hand, or with
		// its stream or its server. The error does not say which, so the consumer is opened again.
		// A new one begins with the stream's first message: what was done before is a duplicate.
		_ = sleep.For(ctx, outagePause)
		again, openErr := c.open(ctx, l)
		if openErr == nil {
			source = again
		} else {
			err = openErr
		}
		if !away && ctx.Err() == nil {
			c.logger().WarnContext(ctx, "natsconsumer: no messages; it continues to ask", "stream", c.cfg.Stream, "durable", l.durable, "error", err)
		}
		away = true
	}
}

// quiet reports whether err says only that no message came in time.
func quiet(err error) bool {
	return errors.Is(err, jetstream.ErrNoMessages) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout)
}

// take has a message worked, and gives signs of life meanwhile.
func (c *Consumer) take(ctx context.Context, msg jetstream.Msg) {
	ended := make(chan struct{})
	var settling sync.WaitGroup
	defer settling.Wait()
	settling.Go(func() {
		defer close(ended)
		c.settle(ctx, msg)
	})
	alive := time.NewTicker(c.cfg.AckWait / 3)
	defer alive.Stop()
	for {
		select {
		case <-ended:
			return
		case <-alive.C:
			_ = msg.InProgress() // without it the message comes again, as a duplicate
		}
	}
}

// settle passes a message to the receiver and reports the result to the server. When that does not
// arrive, the message comes again.
func (c *Consumer) settle(ctx context.Context, msg jetstream.Msg) {
	about, err := msg.Metadata()
	if err != nil {
		c.logger().ErrorContext(ctx, "natsconsumer: not a message of JetStream", "error", err)
		return
	}
	out := message.Deliver(ctx, c.receive, message.Message{Header: headerOf(msg), Body: msg.Data(), Stored: about.Timestamp})
	switch {
	case out.Verdict == message.Done:
		err = msg.Ack()
	case out.Verdict == message.Refused && c.refuse(ctx, msg, about, out):
		err = msg.TermWithReason(cmp.Or(out.Problem, strconv.Itoa(out.Status)))
	case ctx.Err() != nil: // the process stops; another one takes the message at once
		err = msg.Nak()
	default:
		wait := out.Delay(int(about.NumDelivered), c.cfg.Schedule)
		c.logger().WarnContext(ctx, "natsconsumer: the message comes again", "stream", about.Stream, "durable", about.Consumer, "sequence", about.Sequence.Stream,
			"deliveries", about.NumDelivered, "status", out.Status, "problem", out.Problem, "wait", wait)
		err = msg.NakWithDelay(wait)
	}
	if err != nil {
		c.logger().DebugContext(ctx, "natsconsumer: the message will come again", "sequence", about.Sequence.Stream, "error", err)
	}
}

// refuse hands a message that is refused for good to Config.Refused, and reports whether it may be
// terminated.
func (c *Consumer) refuse(ctx context.Context, msg jetstream.Msg, about *jetstream.MsgMetadata, out message.Outcome) (kept bool) {
	log := c.logger().With("stream", about.Stream, "durable", about.Consumer, "sequence", about.Sequence.Stream, "status", out.Status, "problem", out.Problem)
	if c.cfg.Refused == nil {
		log.ErrorContext(ctx, "natsconsumer: the receiver refuses the message; it stays in the stream and is not delivered again", "detail", out.Detail)
		return true
	}
	return message.Keep(ctx, log, "natsconsumer", "the message comes again", func() error {
		return c.cfg.Refused(ctx, Refusal{Message: msg, Status: out.Status, Problem: out.Problem, Detail: out.Detail})
	})
}

// headerOf returns the headers that the relay has sent, without those of NATS.
func headerOf(msg jetstream.Msg) http.Header {
	header := make(http.Header, len(msg.Headers()))
	for name, values := range msg.Headers() {
		if !strings.HasPrefix(name, "Nats-") {
			header[name] = values
		}
	}
	return header
}

func (c *Consumer) logger() *slog.Logger { return cmp.Or(c.cfg.Logger, slog.Default()) }
