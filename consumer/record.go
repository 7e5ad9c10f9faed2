package consumer

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

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// State is what has become of an event so far.
type State string

// The states of an event. Only an operator takes one out of the last three, with the command outbox-relay inbox.
const (
	StatePending    State = "pending"    // waits for a worker, for its next attempt, or for an earlier event of its ordering key
	StateProcessing State = "processing" // a worker has it
	StateSucceeded  State = "succeeded"  // the handler's work is committed
	StateIgnored    State = "ignored"    // of no concern to this receiver; kept for review
	StateFailed     State = "failed"     // nobody tries again by himself
)

// OnFailure says what a failed event means to those behind it that have the same ordering key.
type OnFailure string

// What a failed event may mean.
const (
	// FailureBlocks keeps them waiting until an operator replays or ignores the failed one. The default.
	FailureBlocks OnFailure = "block"
	// FailureSkips lets them go on.
	FailureSkips OnFailure = "skip"
)

// InboxConfig says how an [Inbox] works. Handle and what [Config] requires must be set; everything else has a default.
type InboxConfig struct {
	// Config says whom to trust, as for [Middleware]. Isolation is that of the transactions in which Handle works. What Handle
	// returns after HandlerTimeout is a failure, and a worker whose machine has vanished is given up after HandlerTimeout and
	// CommitTimeout, which bounds every statement of the inbox itself. While Breaker is open events are recorded, but none
	// is worked.
	Config

	// Handle works an event. Required. Commit and Rollback of its transaction are refused. One that ends the transaction by other
	// means is found out when it returns, and its event failed at once, whether it succeeded, failed or was timed out: to try
	// again would repeat what it has committed. Until then, or if its process dies, another process may take the event over.
	// It may change the row of its own event in inbox_events, such as to remove the payload.
	Handle Handler[pgx.Tx]

	// Workers is how many events this process works at once in one call of Run. Each needs a connection of the pool while
	// its handler runs; what the pool has beyond that and one for claims is for recording events in a process that also
	// works them. Default 8, or what the pool allows if that is less. More than
	// it allows is refused. Where several calls of Run, or several inboxes, share a pool, it must have that many for each of
	// them: or a handler that takes a second connection from it may wait for others that do the same.
	Workers int

	// TypeWorkers bounds how many events of one exact type are worked at once in this process, by one call of Run:
	// {"report.requested": 1}. A type that is not named has no limit but Workers.
	TypeWorkers map[string]int

	// PollInterval is how often to look for events unasked: those whose time for another attempt has come, and those whose
	// wake-up was lost. Default 1 second. Longer makes retries later; a new event does not wait for it.
	PollInterval time.Duration

	// Schedule holds the delays after the first, second, … attempt; the last repeats. Default 5s, 30s, 5m, 30m, 4h.
	Schedule []time.Duration

	// Jitter lengthens every delay of Schedule by a random part of it, up to this fraction, so that events which failed
	// together do not return together. Never shortens one. 0 to 1; nil is 0.1.
	Jitter *float64

	// MaxAttempts is how often the handler may fail before the event is failed. Default 8.
	MaxAttempts int

	// DrainTimeout is how long Run lets handlers go on after its own context has ended. Then their contexts end too, and
	// their events are given back without spending an attempt. Default 20 seconds.
	DrainTimeout time.Duration

	// OnFailure says what a failed event means to those behind it with the same ordering key. Default [FailureBlocks].
	OnFailure OnFailure
}

const (
	defaultWorkers     = 8
	defaultJitter      = 0.1
	defaultMaxAttempts = 8
)

// complete checks c and fills in defaults. connections is how many the pool has.
func (c InboxConfig) complete(connections int) (*settings, InboxConfig, error) {
	s, err := c.Config.complete()
	if err != nil {
		return nil, c, err
	}
	c.Secrets = nil // settings has them, in a form that cannot be printed
	if c.Handle == nil {
		return nil, c, errors.New("consumer: InboxConfig.Handle is nil: set what works the events")
	}
	if connections < 2 {
		return nil, c, fmt.Errorf("consumer: an inbox needs a pool of at least 2 connections, this one has %d: raise MaxConns (pool_max_conns)", connections)
	}
	switch {
	case c.Workers < 0:
		return nil, c, fmt.Errorf("consumer: InboxConfig.Workers is negative: %d", c.Workers)
	case c.Workers == 0:
		c.Workers = min(defaultWorkers, connections-1)
	case c.Workers > connections-1:
		return nil, c, fmt.Errorf("consumer: InboxConfig.Workers is %d, which the pool cannot serve: it has %d connections, and one must be left for recording events; "+
			"raise MaxConns (pool_max_conns) or lower Workers", c.Workers, connections)
	}
	c.TypeWorkers = maps.Clone(c.TypeWorkers)
	for kind, n := range c.TypeWorkers {
		if n < 1 {
			return nil, c, fmt.Errorf("consumer: InboxConfig.TypeWorkers[%q] is %d: it must be at least 1; Router.Fallback or Ignore is for events that nobody wants", kind, n)
		}
	}
	if err := cmp.Or(
		defaultIn("InboxConfig", "PollInterval", &c.PollInterval, time.Second),
		defaultIn("InboxConfig", "DrainTimeout", &c.DrainTimeout, 20*time.Second),
		c.completeRetries(),
	); err != nil {
		return nil, c, err
	}
	switch c.OnFailure {
	case "":
		c.OnFailure = FailureBlocks
	case FailureBlocks, FailureSkips:
	default:
		return nil, c, fmt.Errorf("consumer: InboxConfig.OnFailure: %q is not known; set FailureBlocks or FailureSkips", c.OnFailure)
	}
	return s, c, nil
}

// Inbox takes events in two steps: its Handler records them and answers at once, its Run works them later. What is
// recorded is in the same memory of events as what [Middleware] and [Once] have processed, so that an event which comes by
// both ways counts once. Its methods may be called concurrently, in any number of processes.
type Inbox struct {
	*settings
	cfg  InboxConfig
	pool *pgxpool.Pool
	name string // of this process, for operators

	notifying coalescer // at most one notification is on its way

	// recording holds a token for each event that is being recorded while this process works events, too: as many as leave
	// a connection to each worker and one to claims. Or recorders would queue before workers, who finish nothing then.
	recording chan struct{}

	mu     sync.Mutex          // guards shifts
	shifts map[*shift]struct{} // calls of Run
}

// NewInbox returns an inbox whose events and effects are in pool's database. It fails when pool is nil or cfg cannot work.
func NewInbox(pool *pgxpool.Pool, cfg InboxConfig) (*Inbox, error) {
	if pool == nil {
		return nil, errors.New("consumer: NewInbox needs a pool")
	}
	s, cfg, err := cfg.complete(int(pool.Config().MaxConns))
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	return &Inbox{
		settings: s,
		cfg:      cfg,
		pool:     pool,
		name:     host + "/" + strconv.Itoa(os.Getpid()),
		shifts:   map[*shift]struct{}{},

		recording: make(chan struct{}, max(1, int(pool.Config().MaxConns)-cfg.Workers-1)),
	}, nil
}

// MustNewInbox is [NewInbox]. It panics with the error's text.
func MustNewInbox(pool *pgxpool.Pool, cfg InboxConfig) *Inbox { return must(NewInbox(pool, cfg)) }

// Handler returns the http.Handler that records events. It answers 202 once the event is committed, 200 to a duplicate
// whatever has become of it, and refuses what [Middleware] refuses; the body of both is a small JSON object with the
// event's state. It needs no Run in its own process.
func (in *Inbox) Handler() http.Handler {
	s := *in.settings
	s.Breaker = nil // what handlers depend on may be down: an event is recorded all the same
	return &recorder{inbox: in, receiver: &receiver{settings: &s}}
}

// recorder is what Handler returns. It answers as the middleware's receiver does.
type recorder struct {
	inbox *Inbox
	*receiver
}

// ServeHTTP takes one request through its steps: check, record, answer, wake.
func (rd *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rq, refusal := rd.check(w, r)
	if refusal != nil {
		rd.finish(w, r, &rq, Report{Result: ResultRejected, Err: refusal}, refusal.answer())
		return
	}
	found, err := rd.inbox.record(r.Context(), &rq, r.Header)
	switch report := (Report{Event: rq.event, Err: err}); {
	case err != nil:
		report.Result = ResultUnavailable
		rd.finish(w, r, &rq, report, unavailable().answer())
	case found.admission == busy:
		report.Result = ResultInFlight
		rd.finish(w, r, &rq, report, inFlight().answer())
	case found.admission == reused:
		report.Result = ResultKeyReused
		rd.finish(w, r, &rq, report, keyReused().answer())
	case found.admission == diverted:
		report.Result, report.Err = ResultOtherDestination, rd.diverted(&rq.event)
		rd.finish(w, r, &rq, report, otherDestination().answer())
	case found.admission == forgotten:
		report.Result = ResultForgotten
		rd.finish(w, r, &rq, report, tooOld().answer())
	case found.admission == duplicate:
		report.Result = ResultDuplicate
		rd.finish(w, r, &rq, report, stateAnswer(http.StatusOK, found.state).replayed())
	default:
		report.Result = ResultRecorded
		if found.late {
			found.due = rd.inbox.advance(r.Context(), rq.event.OrderingKey)
		}
		if !found.due {
			rd.finish(w, r, &rq, report, stateAnswer(http.StatusAccepted, found.state))
			return
		}
		woken := rd.inbox.wakeHere()
		rd.finish(w, r, &rq, report, stateAnswer(http.StatusAccepted, found.state))
		if !woken {
			_ = http.NewResponseController(w).Flush() // the client need not wait for the notification
			rd.inbox.wakeOthers(r.Context())
		}
	}
}

// advance lets the first event of an ordering key go before those that come behind it. If it fails, that happens when one of
// them has been tried again.
func (in *Inbox) advance(ctx context.Context, orderingKey string) (promoted bool) {
	promoted, err := in.release(context.WithoutCancel(ctx), orderingKey)
	if err != nil {
		in.logger().WarnContext(ctx, "consumer: could not let a late event of an ordering key go first", "receiver", in.Receiver, "source", in.Source, "error", in.redacted(err))
	}
	return promoted
}

func stateAnswer(status int, state State) *answer {
	return &answer{
		status: status,
		header: http.Header{"Content-Type": {"application/json"}},
		body:   []byte(`{"state":"` + string(state) + `"}` + "\n"),
	}
}

// recordedHeaders returns what of a request a worker needs to make the same event of it, and what may help a person who
// looks at the row. Credentials are not among it: they have no place in a table.
//
// What the sender did not say in a header that can be believed, but is known of the event, is said in one: a worker reads
// nothing else.
func recordedHeaders(e *Event, header http.Header) http.Header {
	kept := http.Header{}
	for name, values := range header {
		if storable(values) && (!e.Foreign && strings.HasPrefix(name, webhook.OutboxPrefix) ||
			name == "Content-Type" || name == webhook.ID) {
			kept[name] = values
		}
	}
	if !e.Foreign {
		kept.Set(webhook.IdempotencyKey, e.Key)
	}
	set := func(name, value string) {
		if value != "" && kept.Get(name) == "" {
			kept.Set(name, value)
		}
	}
	number := func(name string, n int64) {
		if n != 0 {
			set(name, strconv.FormatInt(n, 10))
		}
	}
	moment := func(name string, t time.Time) {
		if !t.IsZero() {
			set(name, t.UTC().Format(time.RFC3339Nano)) // in another zone the year 9999 may be over
		}
	}
	set(webhook.EventType, e.Type)
	number(webhook.EventVersion, int64(e.Version))
	number(webhook.EventID, e.ID)
	moment(webhook.CreatedAt, e.CreatedAt)
	set(webhook.RelatedReference, e.RelatedReference)
	set(webhook.OrderingKey, e.OrderingKey)
	number(webhook.Sequence, e.Sequence)
	number(webhook.Attempt, int64(e.Attempt))
	set(webhook.DeliveryID, e.DeliveryID)
	moment(webhook.NotAfter, e.NotAfter)
	if e.Replay {
		set(webhook.Replay, "true")
	}
	set(webhook.TraceParent, e.TraceParent)
	set(webhook.TraceState, e.TraceState)
	return kept
}

// storable refuses what jsonb cannot hold: one odd header must not fail the recording.
func storable(values []string) bool {
	return !slices.ContainsFunc(values, func(value string) bool { return !utf8.ValidString(value) || strings.Contains(value, "\x00") })
}

// recordedEvent is the inverse of recordedHeaders.
func (s *settings) recordedEvent(key string, headers []byte) (Event, error) {
	var header http.Header
	if err := json.Unmarshal(headers, &header); err != nil {
		return Event{}, fmt.Errorf("read recorded headers: %w", err)
	}
	event, problem := eventOf(header, key)
	if problem != nil {
		return Event{}, fmt.Errorf("read recorded headers: %w", problem)
	}
	event.Receiver, event.Source = s.Receiver, s.Source
	event.Foreign = header.Get(webhook.IdempotencyKey) == ""
	return event, nil
}
