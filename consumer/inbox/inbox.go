package inbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// State is the state of a recorded event.
type State string

// The states of an event. Only an operator, with the command outbox-relay inbox, moves an event out
// of the last three.
const (
	StatePending    State = "pending"    // waits for a worker, its next attempt, or an earlier event of its key
	StateProcessing State = "processing" // a worker has it
	StateSucceeded  State = "succeeded"  // the handler's work is committed
	StateIgnored    State = "ignored"    // of no concern to this receiver; kept for review
	StateFailed     State = "failed"     // no worker tries again
)

// OnFailure says what a failed event means for later events of its ordering key.
type OnFailure string

// What a failed event may mean.
const (
	// FailureBlocks keeps later events waiting until an operator replays or ignores the failed one.
	// This is the default.
	FailureBlocks OnFailure = "block"
	// FailureSkips lets later events continue.
	FailureSkips OnFailure = "skip"
)

// Config configures an [Inbox]. Handle and what [consumer.Config] requires must be set. Everything
// else has a default.
type Config struct {
	// Config says whom to trust, as for consumer.New. Isolation is that of the transactions in
	// which Handle works. What Handle returns after Limits.HandlerTimeout is a failure. A worker
	// whose machine has vanished is given up after HandlerTimeout and CommitTimeout. CommitTimeout
	// also bounds every statement of the inbox itself. While Breaker is open events are recorded,
	// but none is worked.
	Config consumer.Config

	// Handle works an event. Required. Commit and Rollback of its transaction are refused. A
	// handler that ends the transaction by other means is found out when it returns, and its event
	// fails at once, because another attempt would repeat what is committed. Until then, or if its
	// process dies, another process may take the event over. Handle may change the row of its own
	// event in inbox_events, such as to remove the payload.
	Handle consumer.Handler[pgx.Tx]

	// Workers is how many events this process works at once in one call of Run. Default 8, or what
	// the pool allows if that is less. More than the pool allows is refused.
	//
	// Each worker needs a connection of the pool while its handler runs, and claims need one. The
	// rest is for recording events in a process that also works them. While more is due than the
	// workers can take, recording uses at most a third as many connections as there are workers.
	// Where several calls of Run, or several inboxes, share a pool, it must have that many for each
	// of them. Otherwise a handler that takes a second connection may wait for others that do the
	// same.
	Workers int

	// TypeWorkers bounds how many events of one exact type are worked at once by one call of Run:
	// {"report.requested": 1}. Each is at least 1. A type that is not named has no limit but
	// Workers.
	TypeWorkers map[string]int

	// PollInterval is how often to poll for events whose next attempt is due, and for those whose
	// wake-up was lost. Default 1 second. A longer one makes retries later; a new event does not
	// wait for it.
	PollInterval time.Duration

	// Schedule holds the delays after the first, second, … attempt. The last one repeats. Default
	// 5s, 30s, 5m, 30m, 4h.
	Schedule []time.Duration

	// Jitter lengthens every delay of Schedule by a random part of it, up to this fraction, so that
	// events which failed together do not return together. It never shortens one. 0 to 1; nil is
	// 0.1.
	Jitter *float64

	// MaxAttempts is how often the handler may fail before the event is failed. Default 8.
	MaxAttempts int

	// DrainTimeout is how long Run waits for running handlers after its context has ended. Then
	// their contexts end too, and their events are given back without spending an attempt. Default
	// 20 seconds.
	DrainTimeout time.Duration

	// OnFailure says what a failed event means for later events of its ordering key. Default
	// [FailureBlocks].
	OnFailure OnFailure
}

const (
	defaultWorkers     = 8
	defaultJitter      = 0.1
	defaultMaxAttempts = 8
)

// complete checks c and fills in defaults. connections is how many the pool has.
func (c *Config) complete(connections int) error {
	c.Config.Secrets = nil // the receiver has them, in a form that cannot be printed
	if c.Handle == nil {
		return errors.New("inbox: Config.Handle is nil: set what works the events")
	}
	if connections < 2 {
		return fmt.Errorf("inbox: an inbox needs a pool of at least 2 connections, this one has %d: raise MaxConns (pool_max_conns)", connections)
	}
	switch {
	case c.Workers < 0:
		return fmt.Errorf("inbox: Config.Workers is negative: %d", c.Workers)
	case c.Workers == 0:
		c.Workers = min(defaultWorkers, connections-1)
	case c.Workers > connections-1:
		return fmt.Errorf("inbox: Config.Workers is %d, which the pool cannot serve: it has %d connections, and one must be left for recording events; "+
			"raise MaxConns (pool_max_conns) or lower Workers", c.Workers, connections)
	}
	c.TypeWorkers = maps.Clone(c.TypeWorkers)
	for kind, n := range c.TypeWorkers {
		if n < 1 {
			return fmt.Errorf("inbox: Config.TypeWorkers[%q] is %d: it must be at least 1; Router.Fallback or Ignore is for events that are not wanted", kind, n)
		}
	}
	if err := cmp.Or(
		memory.OrDefault("inbox: Config.PollInterval", &c.PollInterval, time.Second),
		memory.OrDefault("inbox: Config.DrainTimeout", &c.DrainTimeout, 20*time.Second),
		c.completeRetries(),
	); err != nil {
		return err
	}
	switch c.OnFailure {
	case "":
		c.OnFailure = FailureBlocks
	case FailureBlocks, FailureSkips:
	default:
		return fmt.Errorf("inbox: Config.OnFailure: %q is not known; set FailureBlocks or FailureSkips", c.OnFailure)
	}
	return nil
}

// Inbox takes events in two steps: its Handler records them and answers at once, its Run works them
// later. It shares the memory of events with consumer.New and consumer.Once, so an event that comes
// by both ways counts once. Its methods may be called concurrently, in any number of processes. The
// zero value is of no use: see [New].
type Inbox struct{ engine *engine }

// engine is the state of an Inbox. It embeds what an Inbox must not export.
type engine struct {
	memory.Settings
	cfg     Config
	pool    *pgxpool.Pool
	name    string // of this process, for operators
	handler http.Handler
	tables  sync.Map // *eventsTable by oid

	notifying coalescer // at most one notification is on its way

	// recording holds a token for each event that is being recorded while this process also works
	// events. It leaves a connection for each worker and one for claims. Otherwise recorders would
	// queue before workers, and no worker could finish.
	recording chan struct{}

	// beside holds such a token while more is due than the workers can take. It has room for a
	// third as many tokens as there are workers. Otherwise recorders would take most of the
	// database, and events would wait longer and longer. An event that is not recorded waits with
	// its sender.
	beside chan struct{}

	mu      sync.Mutex           // guards runners
	runners map[*runner]struct{} // calls of Run
}

// New returns an inbox whose events and effects are in pool's database. It fails when pool is nil
// or cfg cannot work.
func New(pool *pgxpool.Pool, cfg Config) (*Inbox, error) {
	if pool == nil {
		return nil, errors.New("inbox: New needs a pool")
	}
	host, _ := os.Hostname()
	in := &engine{pool: pool, name: host + "/" + strconv.Itoa(os.Getpid()), runners: map[*runner]struct{}{}}
	recording := cfg.Config
	recording.Breaker = nil // what handlers depend on may be down: an event is recorded all the same
	connections := int(pool.Config().MaxConns)
	receive, err := memory.NewReceiver(recording, func(s memory.Settings) (memory.Memory, error) {
		in.Settings = s
		return in, cfg.complete(connections)
	})
	if err != nil {
		return nil, err
	}
	in.cfg = cfg
	in.recording = make(chan struct{}, max(1, connections-cfg.Workers-1))
	in.beside = make(chan struct{}, max(1, cfg.Workers/3))
	in.handler = receive.Handler(nil) // no event is worked in its request
	return &Inbox{in}, nil
}

// Handler returns the http.Handler that records events. It answers 202 once the event is committed,
// and 200 to a duplicate in any state. It refuses what consumer.Middleware refuses. The body of a
// 202 or 200 is a small JSON object with the event's state. The process needs no Run.
func (in *Inbox) Handler() http.Handler { return in.engine.handler }

// Admit records the event of a request and wakes a worker.
func (in *engine) Admit(ctx context.Context, rq *memory.Request) (memory.Found, error) {
	found, err := in.record(ctx, rq)
	if err != nil || found.Admission != memory.Recorded {
		return found.Found, err
	}
	if found.late {
		found.due = in.advance(ctx, rq.Event.OrderingKey)
	}
	if found.due { // only then, so that the event is reported as recorded before a worker reports it
		found.Answered = func(flush func()) {
			if !in.wakeHere() {
				flush() // the client need not wait for the notification
				in.wakeOthers(ctx)
			}
		}
	}
	return found.Found, nil
}

// advance lets the first event of an ordering key go before later ones. If it fails, that happens
// after the next attempt of one of them.
func (in *engine) advance(ctx context.Context, orderingKey string) (promoted bool) {
	promoted, err := in.release(context.WithoutCancel(ctx), orderingKey)
	if err != nil {
		in.Logger().WarnContext(ctx, "consumer: could not let a late event of an ordering key go first", "receiver", in.Receiver, "source", in.Source, "error", in.Redacted(err))
	}
	return promoted
}

// recordedHeaders returns the headers of a request from which a worker rebuilds the event, and
// those that help a person who reads the row. It leaves out credentials, which do not belong into a
// table. It adds a header for each known field of the event that the request did not prove by a
// header, because a worker reads nothing else.
func recordedHeaders(e *headers.Event, header http.Header) http.Header {
	kept := http.Header{}
	for name, values := range header {
		if storable(values) && (!e.Foreign && strings.HasPrefix(name, webhook.OutboxPrefix) ||
			name == "Content-Type" || name == webhook.ID) {
			kept[name] = values
		}
	}
	if !e.Foreign {
		kept.Set(webhook.IdempotencyKey, e.IdempotencyKey)
	}
	headers.Write(kept, e)
	return kept
}

// storable reports whether jsonb can hold the values. One odd header must not fail the recording.
func storable(values []string) bool {
	return !slices.ContainsFunc(values, func(value string) bool { return !utf8.ValidString(value) || strings.Contains(value, "\x00") })
}

// recordedEvent is the inverse of recordedHeaders.
func (in *engine) recordedEvent(key string, recorded []byte) (headers.Event, error) {
	var header http.Header
	if err := json.Unmarshal(recorded, &header); err != nil {
		return headers.Event{}, fmt.Errorf("read recorded headers: %w", err)
	}
	event, malformed := headers.Read(header, key)
	if malformed != "" {
		return headers.Event{}, fmt.Errorf("read recorded headers: %s is malformed", malformed)
	}
	event.Receiver, event.Source = in.Receiver, in.Source
	event.Foreign = header.Get(webhook.IdempotencyKey) == ""
	return event, nil
}
