package natspost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Bounds of a look at the stream.
const (
	lookTimeout = 2 * time.Second
	lookEvery   = time.Second
)

// A diagnosis is why no stream answered, as it was last found. Messages that fail together share one look.
type diagnosis struct {
	mu     sync.Mutex
	at     time.Time
	reason policy.Reason
	text   string
}

// A streamProblem says that a stream cannot store the messages of a destination.
type streamProblem struct{ text string }

func (p streamProblem) Error() string { return p.text }

// errUnseen is that the user may not ask about the stream, which publishing does not need.
var errUnseen = errors.New("the user may not ask about the stream")

// diagnose returns why nothing answered on a subject.
func (c *Client) diagnose(ctx context.Context, to *conn, subject string) (policy.Reason, string) {
	d := &c.diagnosis
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.at) < lookEvery {
		return d.reason, d.text
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	_, err := c.lookAtStream(ctx, to, subject)
	var problem streamProblem
	switch {
	case errors.As(err, &problem):
		d.reason, d.text = policy.ReasonNotFound, problem.text
	case err == nil:
		d.reason, d.text = policy.ReasonUnavailable, fmt.Sprintf("no stream answered on subject %q; stream %q has no leader at this moment", subject, c.cfg.Stream)
	default:
		d.reason, d.text = policy.ReasonUnavailable, fmt.Sprintf(
			"no stream answered on subject %q: stream %q does not exist, does not take this subject, or has no leader at this moment", subject, c.cfg.Stream)
	}
	d.text, d.at = plain.Clip(d.text), time.Now()
	return d.reason, d.text
}

// lookAtStream returns how the stream is configured. It returns a streamProblem if the stream cannot store messages of the subject, in which
// a last '>' stands for any words.
func (c *Client) lookAtStream(ctx context.Context, to *conn, subject string) (config jetstream.StreamConfig, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &waiter{subject: "$JS.API.STREAM.INFO." + c.cfg.Stream, refused: cancel}
	if !to.begin(w) {
		return config, nats.ErrConnectionClosed
	}
	defer to.end(w)
	stream, err := to.js.Stream(ctx, c.cfg.Stream)
	switch cause := context.Cause(ctx); {
	case err == nil:
		config = stream.CachedInfo().Config
		return config, c.configProblem(config, subject)
	case errors.Is(cause, nats.ErrPermissionViolation):
		if _, subscription := refusedSubject(cause); subscription {
			return config, streamProblem{violationText(cause)}
		}
		return config, fmt.Errorf("%w: %w", errUnseen, cause)
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return config, streamProblem{fmt.Sprintf("there is no stream %q; create it with the subject %q, or correct the destination's stream", c.cfg.Stream, subject)}
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount), errors.Is(err, nats.ErrNoResponders):
		return config, streamProblem{"the server, or the account, has no JetStream; enable it, or correct the url or the credentials"}
	}
	return config, fmt.Errorf("ask about stream %q: %w", c.cfg.Stream, err)
}

// configProblem returns a streamProblem if a stream of this configuration cannot store messages of the subject.
func (c *Client) configProblem(config jetstream.StreamConfig, subject string) error {
	switch {
	case config.Sealed:
		return streamProblem{fmt.Sprintf("the stream %q is sealed, and takes nothing any more; name another one", c.cfg.Stream)}
	case config.NoAck:
		return streamProblem{fmt.Sprintf("the stream %q acknowledges nothing (no_ack), so that no delivery would ever end; set its no_ack to false", c.cfg.Stream)}
	case !slices.ContainsFunc(config.Subjects, func(bound string) bool { return overlap(bound, subject) }):
		return streamProblem{fmt.Sprintf("the stream %q takes %s, and not %q; add that to its subjects, or correct the destination's subject",
			c.cfg.Stream, subjectList(config.Subjects), subject)}
	}
	return nil
}

func subjectList(subjects []string) string {
	if len(subjects) == 0 {
		return "no subjects, as a mirror of another stream"
	}
	quoted := make([]string, 0, 5)
	for _, subject := range subjects[:min(5, len(subjects))] {
		quoted = append(quoted, strconv.Quote(subject))
	}
	if more := len(subjects) - len(quoted); more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(quoted, ", "), more)
	}
	return strings.Join(quoted, ", ")
}

// Reach connects, and asks whether the stream exists and takes the destination's subjects, as far as the user may ask. It publishes nothing.
// The warnings are what the stream stores, and not as well as it could.
func (c *Client) Reach(ctx context.Context) (warnings []string, err error) {
	w := &waiter{}
	to, err := c.connected(ctx, w)
	if err != nil {
		return nil, errors.New(notConnected(err).Message)
	}
	defer to.end(w)
	config, err := c.lookAtStream(ctx, to, pattern(c.cfg.Settings.Subject, c.cfg.Destination))
	switch {
	case errors.Is(err, errUnseen):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return c.doubts(config, to.nats.MaxPayload()), nil
}

// doubts returns what makes a stream that can store the events store some of them twice, or not at all. payload is the max_payload of the server.
func (c *Client) doubts(config jetstream.StreamConfig, payload int64) (texts []string) {
	if window := config.Duplicates; window > 0 && window < c.cfg.Again {
		texts = append(texts, fmt.Sprintf("the stream %q forgets messages after %s (duplicate window), and an attempt without an answer is made again after %s: "+
			"messages will stand in it twice; set its duplicate window to 2m or more", c.cfg.Stream, plain.Span(window), plain.Span(c.cfg.Again)))
	}
	if config.Retention == jetstream.InterestPolicy {
		texts = append(texts, fmt.Sprintf("the stream %q keeps no message for a reader whose consumer does not exist yet (retention interest): events that are published before are lost to it; "+
			"create the consumers first, or use retention limits", c.cfg.Stream))
	}
	if config.Discard == jetstream.DiscardOld && (config.MaxMsgs > 0 || config.MaxBytes > 0 || config.MaxMsgsPerSubject > 0) {
		texts = append(texts, fmt.Sprintf("the stream %q removes its oldest messages when it is full, read or not (discard old): events that were delivered to it are lost to slow readers; "+
			"set its discard to new, or its limits in time", c.cfg.Stream))
	}
	if size := int64(config.MaxMsgSize); size > 0 && size < c.cfg.Largest {
		texts = append(texts, fmt.Sprintf("the stream %q takes messages of at most %d bytes, and an event may have %d: larger ones will fail; raise its max_msg_size",
			c.cfg.Stream, size, c.cfg.Largest))
	}
	if payload < c.cfg.Largest {
		texts = append(texts, fmt.Sprintf("the server takes messages of at most %d bytes, and an event may have %d: larger ones will fail; raise its max_payload", payload, c.cfg.Largest))
	}
	return texts
}
