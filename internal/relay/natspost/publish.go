package natspost

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A Message is what one attempt publishes.
type Message struct {
	// ID by which the stream recognises the message if it arrives again within its duplicate
	// window.
	ID string
	// Header yields the names and values of the other headers.
	Header  iter.Seq2[string, string]
	Payload []byte
}

// Subject returns the subject of an event of the given type and order, and what is wrong with it.
func (c *Client) Subject(eventType, order string) (subject string, err error) {
	subject = expand(c.cfg.Settings.Subject, eventType, c.cfg.Destination, c.cfg.partition(order))
	if text := subjectProblem(subject); text != "" {
		return "", fmt.Errorf("the subject %.100q, made of the event's type, %s", subject, text)
	}
	return subject, nil
}

// Publish makes one attempt: it publishes a message to a subject, once, and waits for the stream's
// acknowledgement until the timeout of an attempt, or until ctx is done.
func (c *Client) Publish(ctx context.Context, subject string, m Message) policy.Result {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	defer time.AfterFunc(c.cfg.Timeout, func() { fail(context.DeadlineExceeded) }).Stop()
	a := &attempt{subject, fail}
	to, err := c.connected(ctx, a)
	if err != nil {
		return notConnected(err)
	}
	defer to.end(a)
	message := c.messages.Get().(*nats.Msg)
	defer c.messages.Put(message)
	clear(message.Header)
	message.Subject, message.Data = subject, m.Payload
	values := make([]string, 0, 24)
	for name, value := range m.Header {
		values = append(values, value)
		message.Header[name] = values[len(values)-1 : len(values) : len(values)]
	}
	message.Header.Set(jetstream.MsgIDHeader, m.ID)
	message.Header.Set(jetstream.ExpectedStreamHeader, c.cfg.Stream)
	arrived := atomic.LoadUint64(&to.nats.InMsgs)
	ack, err := c.send(ctx, to, message)
	switch {
	case err == nil:
		return policy.Result{Reason: policy.ReasonOK, Posted: true, Duplicate: ack.Duplicate}
	case errors.Is(err, context.DeadlineExceeded) && atomic.LoadUint64(&to.nats.InMsgs) == arrived: // such a connection may lead nowhere
		to.leave()
	}
	return c.refused(ctx, to, message, err)
}

// send publishes a message over a connection and waits for its acknowledgement.
func (c *Client) send(ctx context.Context, to *conn, message *nats.Msg) (*jetstream.PubAck, error) {
	// If the library published again, that would be an attempt that nothing counts.
	future, err := to.js.PublishMsgAsync(message, jetstream.WithRetryAttempts(0))
	switch {
	case err == nil:
	case to.nats.IsClosed():
		<-ctx.Done() // close says why
		return nil, context.Cause(ctx)
	default:
		return nil, err
	}
	select {
	case ack := <-future.Ok():
		if ack.Stream != c.cfg.Stream || ack.Sequence == 0 { // of a program that is not the stream: nothing is stored
			return nil, jetstream.ErrInvalidJSAck
		}
		return ack, nil
	case err := <-future.Err():
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
