package kafkapost

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Message is what one attempt writes.
type Message struct {
	// OrderingKey and IdempotencyKey of the event; the former may be empty.
	OrderingKey, IdempotencyKey string
	Header                      []Header
	Payload                     []byte
}

// A Header is one of a record.
type Header struct{ Name, Value string }

// Topic returns the topic of an event type, and what is wrong with it.
func (c *Client) Topic(eventType string) (topic string, err error) {
	topic = c.cfg.topic(eventType, c.cfg.Destination)
	if text := topicProblem(topic); text != "" {
		return "", fmt.Errorf("the topic %.100q, made of the event's type, %s", topic, text)
	}
	return topic, nil
}

// Publish makes one attempt: it writes one record to a topic, and waits until all replicas in sync
// have it, or ctx is done.
func (c *Client) Publish(ctx context.Context, topic string, m Message) policy.Result {
	since := time.Now()
	err := c.produce(ctx, topic, m, false)
	if errors.Is(err, kerr.MessageTooLarge) || errors.Is(err, kerr.RecordListTooLarge) { // which may be about the records that were written together with it
		err = c.produceAlone(ctx, topic, m)
	}
	if err != nil {
		return c.failed(since, topic, err)
	}
	return policy.Result{Reason: policy.ReasonOK, Posted: true}
}

// produceAlone writes a record in its own batch.
func (c *Client) produceAlone(ctx context.Context, topic string, m Message) error {
	select {
	case c.alone <- struct{}{}:
		defer func() { <-c.alone }()
		return c.produce(ctx, topic, m, true)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// produce writes a record: alone in its batch, which is for one goroutine at a time, or together
// with those of other attempts.
func (c *Client) produce(ctx context.Context, topic string, m Message, alone bool) error {
	client, err := c.use(alone)
	if err != nil {
		return err
	}
	defer c.unuse(client)
	record := &kgo.Record{Topic: topic, Value: m.Payload, Headers: make([]kgo.RecordHeader, 0, len(m.Header))}
	switch {
	case c.cfg.Key == KeyIdempotency:
		record.Key = []byte(m.IdempotencyKey)
	case m.OrderingKey != "":
		record.Key = []byte(m.OrderingKey)
	}
	for _, h := range m.Header {
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: h.Name, Value: []byte(h.Value)})
	}
	err = client.ProduceSync(ctx, record).FirstErr()
	if errors.Is(err, kerr.UnknownTopicID) { // it was removed and made again, which the library takes for an error for ever
		client.PurgeTopicsFromProducing(topic)
	}
	c.dropIfDead(ctx, client, err)
	return err
}
