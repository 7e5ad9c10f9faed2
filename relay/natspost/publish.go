package natspost

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A Message is what one attempt publishes.
type Message struct {
	EventType string
	// ID by which the stream recognises the message if it arrives again within its duplicate window.
	ID string
	// Header must not be used by the caller afterwards.
	Header  map[string][]string
	Payload []byte
}

// headerRoom is how much of what a server takes is left for headers before their size is measured.
const headerRoom = 64 << 10

// Subject returns the subject of an event of the given type and order, and what is wrong with it.
func (c *Client) Subject(eventType, order string) (subject string, err error) {
	subject = expand(c.cfg.Settings.Subject, eventType, c.cfg.Destination, c.cfg.partition(order))
	if text := subjectProblem(subject); text != "" {
		return "", fmt.Errorf("the subject %.100q, made of the event's type, %s", subject, text)
	}
	return subject, nil
}

// Publish makes one attempt: it publishes a message to a subject, once, and waits for the stream's acknowledgement until ctx is done.
func (c *Client) Publish(ctx context.Context, subject string, m Message) policy.Result {
	m.Header[jetstream.MsgIDHeader] = []string{m.ID}
	m.Header[jetstream.ExpectedStreamHeader] = []string{c.cfg.Stream}
	waiting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &waiter{subject: subject, cancel: cancel, since: time.Now()}
	to, err := c.begin(ctx, w)
	if err != nil {
		return notConnected(err)
	}
	defer to.end(w)
	msg := &nats.Msg{Subject: subject, Header: m.Header, Data: m.Payload}
	if most := to.nats.MaxPayload(); int64(len(m.Payload)) > most-headerRoom { // the library would keep a trace of each that is too large
		if size := int64(msg.Size() - len(subject)); size > most {
			return tooLarge(to, strconv.FormatInt(size, 10))
		}
	}
	ack, err := to.js.PublishMsg(waiting, msg, c.once...)
	if err == nil {
		return policy.Result{Reason: policy.ReasonOK, Posted: true, Duplicate: ack.Duplicate}
	}
	if cause := context.Cause(waiting); cause != nil && ctx.Err() == nil {
		err = cause // what the server sent beside the answers
	}
	if errors.Is(err, context.DeadlineExceeded) && to.silent(w.since) {
		c.drop(to)
	}
	return c.refused(ctx, to, subject, err)
}
