package relay

import (
	"context"
	"net/http"
	"net/url"

	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// What a configuration says of destinations.
type (
	// A Destination is where deliveries go, and how.
	Destination = post.Destination
	// Wire says what its requests look like and how they travel.
	Wire = post.Wire
	// TLS of an https destination.
	TLS = post.TLS
	// Egress says where the relay may connect to, and through what.
	Egress = post.Egress
	// NATS is what only a destination of NATS has.
	NATS = natspost.Settings
	// Kafka is what only a destination of Kafka has.
	Kafka = kafkapost.Settings
	// Reached is what a destination answered to a request without an event.
	Reached = post.Reached
)

// Values of a destination's settings, and their defaults.
const (
	DefaultTimeout      = post.DefaultTimeout
	DefaultLaneInFlight = post.DefaultLaneInFlight
	NoProxy             = post.NoProxy

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

// ParseURL parses the URL of a destination. That of a log may name several servers, separated by commas.
func ParseURL(raw string) (*url.URL, error) { return post.ParseURL(raw) }

// ReachAll connects to every destination and says which could be reached. It sends no event.
func ReachAll(ctx context.Context, destinations []Destination, egress Egress) []Reached {
	return post.ReachAll(ctx, destinations, egress)
}

// CheckNATSCredentials says what is wrong with the content of a credentials file of NATS; nil: nothing.
func CheckNATSCredentials(content string) error { return natspost.CheckCredentials(content) }

// CheckNATSSeed says what is wrong with the seed of an NKey; nil: nothing.
func CheckNATSSeed(content string) error { return natspost.CheckSeed(content) }

// Beside returns what carries requests to a URL of a destination's receiver beside its deliveries, as [post.Beside] says.
func Beside(d Destination, e Egress, u *url.URL) (*http.Transport, error) {
	return post.Beside(d, e, u)
}
