package post

import (
	"context"
	"crypto/tls"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// newKafka returns the carrier of kafka and kafka+ssl: one record an attempt. agent says who sends
// it.
func newKafka(e *Endpoint, agent string) carrier {
	d := e.Destination
	e.setHeader("")
	var secure func() *tls.Config
	if e.URL.Scheme == "kafka+ssl" {
		secure = d.Wire.TLS.current
	}
	client := kafkapost.New(kafkapost.Config{
		Settings: d.Kafka, Destination: d.Name, Brokers: servers(e.URL.Host, "9092"), TLS: secure, Authorization: d.Wire.Authorization,
		Dial: e.dial, Timeout: d.Timeout, Largest: d.largest(), Agent: strings.NewReplacer("/", "-", "+", "-").Replace(agent),
	})
	return overLog{
		logClient: client, to: e,
		address: func(m *Message) (string, error) { return client.Topic(*m.EventType) },
		publish: func(ctx context.Context, topic string, m *Message, req *Request) policy.Result {
			ctx, cancel := context.WithTimeout(ctx, d.Timeout)
			defer cancel()
			return client.Publish(ctx, topic, kafkapost.Message{
				OrderingKey: valueOrEmpty(m.OrderingKey), IdempotencyKey: *m.Key, Header: req.kafkaHeader(), Payload: m.Payload,
			})
		},
	}
}

// kafkaHeader returns the headers of a record. Attributes of CloudEvents have another prefix there,
// but are signed by their names in a request.
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
	v.Add(d.Kafka.Problems(path+".kafka", d.Name))
	v.Add(d.logProblems(path, "Kafka", "basic_auth or bearer_token"))
	if d.Wire.Authorization != nil {
		basic := strings.HasPrefix(d.Wire.Authorization(), "Basic ")
		v.Require(!basic || d.Kafka.Mechanism != "", path+".kafka.sasl", "is not set beside basic_auth; write plain, scram-sha-256 or scram-sha-512, as the brokers have it")
		v.Require(basic || d.Kafka.Mechanism == "", path+".kafka.sasl", "has no effect on bearer_token, which is sent by the mechanism oauthbearer; remove it")
	} else {
		v.Require(d.Kafka.Mechanism == "", path+".kafka.sasl", "is set without basic_auth; write {username: …, password: \"${…}\"} there")
	}
	return v
}
