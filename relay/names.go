package relay

import (
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
	"github.com/outbox-relay/outbox-relay/internal/relay/send"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/spans"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// What a Config holds of destinations, and of the way to them.
type (
	// A Destination is where deliveries go, and how.
	Destination = post.Destination
	// Wire says what its requests look like and how they travel.
	Wire = post.Wire
	// Batch says whether events of a destination share requests.
	Batch = post.Batch
	// TLS of an https destination.
	TLS = post.TLS
	// NATS is what only a destination of NATS has.
	NATS = natspost.Settings
	// Kafka is what only a destination of Kafka has.
	Kafka = kafkapost.Settings
	// A Secret signs requests; [ParseSecret] makes one.
	Secret = webhook.Secret
	// Retry says when a delivery is tried again, and how often.
	Retry = policy.RetryPolicy
	// Breaker says when a destination is held, so that it costs no attempts while it is down.
	Breaker = policy.BreakerPolicy
	// OnFailure says what a failed delivery does to the later ones of its ordering key: [Block] or
	// [Skip].
	OnFailure = policy.FailurePolicy
	// Responses moves status codes to another outcome than the standard table gives them.
	Responses = policy.Responses
	// A Route sends the event types that match Event to the destinations in To.
	Route = routes.Route
	// Egress says where the relay may connect to, and through what.
	Egress = post.Egress
)

// Values of a destination's settings, and their defaults.
const (
	DefaultTimeout      = post.DefaultTimeout
	DefaultLaneInFlight = post.DefaultLaneInFlight
	NoProxy             = post.NoProxy

	Block = policy.BlockFailed
	Skip  = policy.SkipFailed

	FormatRaw         = post.FormatRaw
	FormatCloudEvents = post.FormatCloudEvents
	ExcerptsProblem   = post.ExcerptsProblem
	ExcerptsText      = post.ExcerptsText
	ExcerptsNone      = post.ExcerptsNone

	KafkaKeyOrdering    = kafkapost.KeyOrdering
	KafkaKeyIdempotency = kafkapost.KeyIdempotency
	KafkaPlain          = kafkapost.Plain
	KafkaScramSHA256    = kafkapost.ScramSHA256
	KafkaScramSHA512    = kafkapost.ScramSHA512
)

// ParseSecret reads a secret as the configuration has it: whsec_ and base64. Errors never hold the
// secret.
func ParseSecret(text string) (Secret, error) { return webhook.ParseSecret(text) }

// What else a Config holds.
type (
	// Pooler says whether a connection pooler stands between the relay and its database. The zero
	// value finds out.
	Pooler = session.Pooler
	// PoolerMode says what a database URL leads to.
	PoolerMode = session.PoolerMode
	// Alerts says whom to tell when something needs a person.
	Alerts = alert.Config
	// A Channel tells people; [Slack] and [Webhook] make one.
	Channel = alert.Channel
	// Watching says how a relay looks after its database.
	Watching = watch.Config
	// History counts what a relay does, by the minute; [NewHistory] makes one.
	History = history.Recorder
	// Retention says for how long what is done with is kept.
	Retention = archive.Retention
	// Spans makes the spans of attempts; [NewSpans] makes one.
	Spans = spans.Spans
	// SpanIDs makes the ids of spans. It implements the IDGenerator of OpenTelemetry's SDK.
	SpanIDs = spans.IDs
	// A Problem is one mistake in a Config: the path of the setting, and what is wrong with it.
	Problem = check.Problem
)

// The values of [PoolerMode].
const (
	PoolerAuto        = session.PoolerAuto
	PoolerNone        = session.PoolerNone
	PoolerTransaction = session.PoolerTransaction
)

// Slack returns a channel that POSTs to an incoming webhook of Slack, or of what understands the
// same.
func Slack(url string, egress Egress) Channel { return alert.Slack(url, alert.NewTransport(egress)) }

// Webhook returns a channel that POSTs alerts as JSON.
func Webhook(url string, egress Egress) Channel {
	return alert.Webhook(url, alert.NewTransport(egress))
}

// NewHistory returns a History that has counted nothing.
func NewHistory() *History { return history.New() }

// NewSpans returns Spans that the provider records. The provider must take its ids from [SpanIDs],
// or the links of retries lead nowhere. version is that of the program.
func NewSpans(provider trace.TracerProvider, version string) *Spans {
	return spans.New(provider, version)
}

// What Hooks are told.
type (
	// An Attempt is one POST.
	Attempt = send.Attempt
	// LaneState is what one relay lets one destination have.
	LaneState = lane.State
	// An Outcome is what an attempt came to.
	Outcome = policy.Outcome
	// A Reason is why an attempt came to its outcome.
	Reason = policy.Reason
	// An Alert is what needs a person, or has ended.
	Alert = alert.Alert
	// Watched is what a relay saw of its database.
	Watched = watch.Watch
	// Backlog is what waits, by destination.
	Backlog = watch.Backlog
	// Archived is what one batch of a retention run moved or removed.
	Archived = archive.Result
)
