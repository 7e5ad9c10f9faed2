package kafkapost

import (
	"fmt"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
)

// Settings are what only a destination of Kafka has. The zero value is not usable: Topic is
// required.
type Settings struct {
	// Topic that events are written to. {type} stands for the event's type and {destination} for
	// the destination's name, as in "outbox.{type}".
	Topic string
	// Key is what decides about a record's partition, and so about order. Empty: [KeyOrdering].
	Key Key
	// Mechanism by which user and password prove themselves. Empty: none.
	Mechanism Mechanism
}

// Key is what becomes the key of a record.
type Key string

const (
	// KeyOrdering is the event's ordering key: its events stay in order. An event without one has
	// no key, and goes to any partition.
	KeyOrdering Key = "ordering_key"
	// KeyIdempotency is the event's idempotency key: for topics that are compacted, or readers that
	// want a key in each record. Order is lost.
	KeyIdempotency Key = "idempotency_key"
)

// Mechanism is one of SASL.
type Mechanism string

// The mechanisms.
const (
	Plain       Mechanism = "plain"
	ScramSHA256 Mechanism = "scram-sha-256"
	ScramSHA512 Mechanism = "scram-sha-512"
)

const (
	typePlace        = "{type}"
	destinationPlace = "{destination}"
	topicExample     = `write one such as "invoices" or "outbox.{type}"`
)

// maxTopic is how long a topic's name may be.
const maxTopic = 249

// isTopicSign reports whether a topic's name may hold a character. A pattern of so many signs would
// take 200 KB of every relay's memory.
func isTopicSign(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '.' || r == '_' || r == '-'
}

// Problems returns the mistakes in the settings of the named destination. path is where they stand.
func (s Settings) Problems(path, destination string) []check.Problem {
	var v check.Problems
	rest := strings.NewReplacer(typePlace, "", destinationPlace, "").Replace(s.Topic)
	switch {
	case s.Topic == "":
		v.Require(false, path+".topic", "is not set; %s", topicExample)
	case strings.ContainsAny(rest, "{}"):
		v.Require(false, path+".topic", "%q holds a { that begins neither {type} nor {destination}; %s", s.Topic, topicExample)
	default:
		text := topicProblem(s.topic("t", destination))
		v.Require(text == "", path+".topic", "%q %s; %s", s.Topic, text, topicExample)
	}
	v.Require(s.Key == "" || s.Key == KeyOrdering || s.Key == KeyIdempotency, path+".key", "%q is not known; write %s or %s", s.Key, KeyOrdering, KeyIdempotency)
	switch s.Mechanism {
	case "", Plain, ScramSHA256, ScramSHA512:
	default:
		v.Require(false, path+".sasl", "%q is not known; write %s, %s or %s", s.Mechanism, Plain, ScramSHA256, ScramSHA512)
	}
	return v
}

// topic returns the topic of an event type.
func (s Settings) topic(eventType, destination string) string {
	if !strings.Contains(s.Topic, "{") {
		return s.Topic
	}
	return strings.NewReplacer(typePlace, eventType, destinationPlace, destination).Replace(s.Topic)
}

// topicProblem says why no broker has a topic of that name; empty: one may.
func topicProblem(topic string) string {
	switch {
	case topic == "." || topic == "..":
		return "is not a name of a topic"
	case topic == "", len(topic) > maxTopic, strings.ContainsFunc(topic, func(r rune) bool { return !isTopicSign(r) }):
		return fmt.Sprintf("is not 1 to %d letters, digits, '.', '_' and '-'", maxTopic)
	}
	return ""
}
