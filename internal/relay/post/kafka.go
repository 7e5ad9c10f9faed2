package post

import (
	"context"
	"crypto/tls"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// overKafka is the [carrier] of kafka and kafka+ssl: one record an attempt.
type overKafka struct {
	to     *Endpoint
	client *kafkapost.Client
}

// newKafka prepares the records of an endpoint. agent says who sends them.
func newKafka(e *Endpoint, agent string) carrier {
	d := e.Destination
	e.setHeader("")
	var secure func() *tls.Config
	if e.URL.Scheme == "kafka+ssl" {
		secure = d.Wire.TLS.current
	}
	return overKafka{e, kafkapost.New(kafkapost.Config{
		Settings: d.Kafka, Destination: d.Name, Brokers: servers(e.URL.Host, "9092"), TLS: secure, Authorization: d.Wire.Authorization,
		Dial: e.dial, Timeout: d.Timeout, Largest: d.largest(), Agent: strings.NewReplacer("/", "-", "+", "-").Replace(agent),
	})}
}

// Deliver implements [carrier].
func (c overKafka) Deliver(ctx context.Context, m Message, ready func() *policy.Result) policy.Result {
	req, err := NewRequest(c.to, m, time.Now())
	if err != nil {
		return Refused(err)
	}
	topic, err := c.client.Topic(*m.EventType)
	if err != nil {
		return Refused(err)
	}
	if ready != nil {
		if instead := ready(); instead != nil {
			return *instead
		}
	}
	c.to.begin()
	defer c.to.end()
	ctx, cancel := context.WithTimeout(ctx, c.to.Destination.Timeout)
	defer cancel()
	result := c.client.Publish(ctx, topic, kafkapost.Message{
		OrderingKey: valueOrEmpty(m.OrderingKey), IdempotencyKey: *m.Key, Header: req.kafkaHeader(), Payload: m.Payload,
	})
	result.DroppedHeaders = req.dropped
	return result
}

// Reach implements [carrier].
func (c overKafka) Reach(ctx context.Context) ([]string, error) { return c.client.Reach(ctx) }

// CloseIdleConnections implements [carrier].
func (c overKafka) CloseIdleConnections() { c.client.CloseIdleConnections() }

// kafkaHeader returns the headers of a record. Attributes of CloudEvents have another prefix there.
func (r *Request) kafkaHeader() []kafkapost.Header {
	header := make([]kafkapost.Header, 0, len(r.header))
	for _, f := range r.header {
		name := f.name
		if attribute, found := strings.CutPrefix(name, "Ce-"); found {
			name = "ce_" + strings.ToLower(attribute)
		}
		header = append(header, kafkapost.Header{Name: name, Value: f.value})
	}
	return header
}

// kafkaProblems returns the mistakes in a destination of Kafka.
func (d Destination) kafkaProblems(path string) []check.Problem {
	var v check.Problems
	v.Add(d.Kafka.Problems(path, d.Name))
	v.Add(d.logProblems(path, "Kafka", "basic_auth or bearer_token"))
	if d.Wire.Authorization != nil {
		basic := strings.HasPrefix(d.Wire.Authorization(), "Basic ")
		v.Require(!basic || d.Kafka.Mechanism != "", path+".sasl", "is not set beside basic_auth; write plain, scram-sha-256 or scram-sha-512, as the brokers have it")
		v.Require(basic || d.Kafka.Mechanism == "", path+".sasl", "has no effect on bearer_token, which is sent by the mechanism oauthbearer; remove it")
	} else {
		v.Require(d.Kafka.Mechanism == "", path+".sasl", "is set without basic_auth; write {username: …, password: \"${…}\"} there")
	}
	return v
}
