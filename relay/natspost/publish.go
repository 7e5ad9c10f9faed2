package natspost

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A Message is what one attempt publishes.
type Message struct {
	// ID by which the stream recognises the message if it arrives again within its duplicate window.
	ID string
	// Header yields the names and values of the other headers.
	Header  iter.Seq2[string, string]
	Payload []byte
}

// headerRoom is how much of what a server takes is left for headers before their size is measured.
const headerRoom = 64 << 10

// Subject returns the subject of an event of the given type and order, and what is wrong with it.
func (c *Client) Subject(eventType, order string) (subject string, err error) {
	if c.cfg.Partitions == 0 {
		subject = strings.Join(c.aroundType, eventType)
	} else {
		subject = expand(c.cfg.Settings.Subject, eventType, c.cfg.Destination, c.cfg.partition(order))
	}
	if text := subjectProblem(subject); text != "" {
		return "", fmt.Errorf("the subject %.100q, made of the event's type, %s", subject, text)
	}
	return subject, nil
}

// Publish makes one attempt: it publishes a message to a subject, once, and waits for the stream's acknowledgement until the timeout of
// an attempt, or until ctx is done.
func (c *Client) Publish(ctx context.Context, subject string, m Message) policy.Result {
	p := c.begin(subject)
	defer c.end(p)
	to := c.counted(&p.waiter)
	if to == nil {
		var err error
		if to, err = c.connectedUntil(ctx, p); err != nil {
			return notConnected(err)
		}
	}
	defer to.end(&p.waiter)
	for name, value := range m.Header {
		p.set(name, value)
	}
	p.set(jetstream.MsgIDHeader, m.ID)
	p.set(jetstream.ExpectedStreamHeader, c.cfg.Stream)
	p.message.Data = m.Payload
	duplicate, err := c.send(ctx, to, p)
	if err == nil {
		return policy.Result{Reason: policy.ReasonOK, Posted: true, Duplicate: duplicate}
	}
	if errors.Is(err, context.DeadlineExceeded) && to.silent(p.since) {
		c.drop(to)
	}
	ctx, cancel := context.WithDeadline(ctx, p.deadline)
	defer cancel()
	return c.refused(ctx, to, subject, err)
}

// connectedUntil is connected within the time of an attempt.
func (c *Client) connectedUntil(ctx context.Context, p *publication) (*conn, error) {
	ctx, cancel := context.WithDeadline(ctx, p.deadline)
	defer cancel()
	return c.connected(ctx, &p.waiter)
}

// send publishes a message over a connection and waits for its answer.
func (c *Client) send(ctx context.Context, to *conn, p *publication) (duplicate bool, err error) {
	if most := to.nats.MaxPayload(); int64(len(p.message.Data)) > most-headerRoom { // the library would keep a trace of each that is too large
		p.message.Reply = ""
		if size := int64(p.message.Size() - len(p.subject)); size > most {
			return false, tooLargeError(size)
		}
	}
	if p.message.Reply, err = to.reply(&p.waiter); err != nil {
		return false, err
	}
	if err := to.nats.PublishMsg(&p.message); err != nil {
		return false, err
	}
	select {
	case a := <-p.answers:
		if a.err != nil {
			return false, a.err
		}
		return c.parseAck(a.message)
	case <-p.timer.C:
		return false, context.DeadlineExceeded
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
