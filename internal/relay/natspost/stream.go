package natspost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A streamProblem says that a stream cannot store the messages of a destination.
type streamProblem string

func (p streamProblem) Error() string { return string(p) }

// diagnose returns why nothing answered on a subject. Messages that fail together share one answer.
func (c *Client) diagnose(ctx context.Context, to *conn, subject string) (policy.Reason, string) {
	found, _, _ := c.diagnosing.Do(subject, func() (any, error) {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_, err := c.streamConfig(ctx, to, subject)
		return err, nil
	})
	text := fmt.Sprintf("no stream answered on subject %q", subject)
	switch problem := found.(type) {
	case streamProblem:
		return policy.ReasonNotFound, problem.Error()
	case error:
		return policy.ReasonUnavailable, fmt.Sprintf("%s: stream %q does not exist, does not take this subject, or has no leader at this moment", text, c.cfg.Stream)
	}
	return policy.ReasonUnavailable, fmt.Sprintf("%s; stream %q has no leader at this moment", text, c.cfg.Stream)
}

// streamConfig returns how the stream is configured. It returns a streamProblem if the stream
// cannot store messages of the subject, in which a last '>' stands for any words.
func (c *Client) streamConfig(ctx context.Context, to *conn, subject string) (config jetstream.StreamConfig, err error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	a := &attempt{"$JS.API.STREAM.INFO." + c.cfg.Stream, fail}
	if !to.begin(a) {
		return config, nats.ErrConnectionClosed
	}
	defer to.end(a)
	stream, err := to.js.Stream(ctx, c.cfg.Stream)
	switch cause := context.Cause(ctx); {
	case err == nil:
		config = stream.CachedInfo().Config
		return config, c.configProblem(config, subject)
	case errors.Is(cause, nats.ErrPermissionViolation):
		if _, subscription := refusedSubject(cause); subscription {
			return config, streamProblem(violationText(cause))
		}
		return config, cause
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return config, streamProblem(fmt.Sprintf("there is no stream %q; create it with the subject %q, or correct the destination's stream", c.cfg.Stream, subject))
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount), errors.Is(err, nats.ErrNoResponders):
		return config, streamProblem(adviceNoJetStream)
	}
	return config, fmt.Errorf("ask about stream %q: %w", c.cfg.Stream, err)
}

// configProblem returns a streamProblem if a stream of this configuration cannot store messages of
// the subject.
func (c *Client) configProblem(config jetstream.StreamConfig, subject string) error {
	switch {
	case config.Sealed:
		return streamProblem(fmt.Sprintf("the stream %q is sealed, and takes nothing any more; name another one", c.cfg.Stream))
	case config.NoAck:
		return streamProblem(fmt.Sprintf("the stream %q acknowledges nothing (no_ack), so that no delivery would ever end; set its no_ack to false", c.cfg.Stream))
	case !slices.ContainsFunc(config.Subjects, func(bound string) bool { return overlap(bound, subject) }):
		return streamProblem(fmt.Sprintf("the stream %q takes %s, and not %q; add that to its subjects, or correct the destination's subject",
			c.cfg.Stream, subjectList(config.Subjects), subject))
	}
	return nil
}

func subjectList(subjects []string) string {
	if len(subjects) == 0 {
		return "no subjects, as a mirror of another stream"
	}
	quoted := make([]string, len(subjects))
	for i, subject := range subjects {
		quoted[i] = strconv.Quote(subject)
	}
	return plain.Some(quoted, 5)
}

// Reach connects, and asks whether the stream exists and takes the destination's subjects, as far
// as the user may ask. It publishes nothing. The warnings are what the stream stores, and not as
// well as it could.
func (c *Client) Reach(ctx context.Context) (warnings []string, err error) {
	a := &attempt{fail: func(error) {}} // streamConfig reports what the server refuses
	to, err := c.connected(ctx, a)
	if err != nil {
		return nil, errors.New(notConnected(err).Message)
	}
	defer to.end(a)
	config, err := c.streamConfig(ctx, to, pattern(c.cfg.Settings.Subject, c.cfg.Destination))
	switch {
	case errors.Is(err, nats.ErrPermissionViolation): // to ask, which publishing does not need
		return nil, nil
	case err != nil:
		return nil, err
	}
	return c.doubts(config, to.nats.MaxPayload()), nil
}

// doubts returns what makes a stream that can store the events store some of them twice, or not at
// all. payload is the max_payload of the server.
func (c *Client) doubts(config jetstream.StreamConfig, payload int64) (texts []string) {
	var v check.Problems
	v.Require(config.Duplicates == 0 || config.Duplicates >= c.cfg.Again, "", "the stream %q forgets messages after %s (duplicate window), and an attempt without an answer is made again after %s: "+
		"messages will stand in it twice; set its duplicate window to 2m or more", c.cfg.Stream, plain.Span(config.Duplicates), plain.Span(c.cfg.Again))
	v.Require(config.Retention != jetstream.InterestPolicy, "", "the stream %q keeps no message for a reader whose consumer does not exist yet (retention interest): "+
		"events that are published before are lost to it; create the consumers first, or use retention limits", c.cfg.Stream)
	limited := config.MaxMsgs > 0 || config.MaxBytes > 0 || config.MaxMsgsPerSubject > 0
	v.Require(config.Discard != jetstream.DiscardOld || !limited, "", "the stream %q removes its oldest messages when it is full, read or not (discard old): "+
		"events that were delivered to it are lost to slow readers; set its discard to new, or its limits in time", c.cfg.Stream)
	v.Require(config.MaxMsgSize <= 0 || int64(config.MaxMsgSize) >= c.cfg.Largest, "",
		"the stream %q takes messages of at most %d bytes, and an event may have %d: larger ones will fail; raise its max_msg_size", c.cfg.Stream, config.MaxMsgSize, c.cfg.Largest)
	v.Require(payload >= c.cfg.Largest, "",
		"the server takes messages of at most %d bytes, and an event may have %d: larger ones will fail; raise its max_payload", payload, c.cfg.Largest)
	for _, problem := range v {
		texts = append(texts, problem.Text)
	}
	return texts
}
