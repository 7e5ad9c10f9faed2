package natspost

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	err := c.lookAtStream(ctx, to, subject)
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

// lookAtStream returns a streamProblem if the stream cannot store messages of the subject, in which a last '>' stands for any words.
func (c *Client) lookAtStream(ctx context.Context, to *conn, subject string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &waiter{subject: "$JS.API.STREAM.INFO." + c.cfg.Stream, cancel: cancel, since: time.Now()}
	if !to.begin(w) {
		return nats.ErrConnectionClosed
	}
	defer to.end(w)
	stream, err := to.js.Stream(ctx, c.cfg.Stream)
	var api *jetstream.APIError
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), nats.ErrPermissionViolation):
		return fmt.Errorf("%w: %w", errUnseen, context.Cause(ctx))
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return streamProblem{fmt.Sprintf("there is no stream %q; create it with the subject %q, or correct the destination's stream", c.cfg.Stream, subject)}
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount), errors.Is(err, nats.ErrNoResponders):
		return streamProblem{"the server, or the account, has no JetStream; enable it, or correct the url or the credentials"}
	case errors.As(err, &api):
		return fmt.Errorf("ask about stream %q: %w", c.cfg.Stream, err)
	default:
		return err
	}
	config := stream.CachedInfo().Config
	if config.Sealed {
		return streamProblem{fmt.Sprintf("the stream %q is sealed, and takes nothing any more; name another one", c.cfg.Stream)}
	}
	if !slices.ContainsFunc(config.Subjects, func(bound string) bool { return overlap(bound, subject) }) {
		return streamProblem{fmt.Sprintf("the stream %q takes %s, and not %q; add that to its subjects, or correct the destination's subject",
			c.cfg.Stream, subjectList(config.Subjects), subject)}
	}
	return nil
}

func subjectList(subjects []string) string {
	if len(subjects) == 0 {
		return "no subjects, as a mirror of another stream"
	}
	if more := len(subjects) - 5; more > 0 {
		return fmt.Sprintf("%q and %d more", subjects[:5], more)
	}
	return strings.Trim(fmt.Sprintf("%q", subjects), "[]")
}

// Reach connects, and asks whether the stream exists and takes the destination's subjects, as far as the user may ask. It publishes nothing.
func (c *Client) Reach(ctx context.Context) error {
	w := &waiter{cancel: func(error) {}}
	to, err := c.begin(ctx, w)
	if err != nil {
		return errors.New(notConnected(err).Message)
	}
	defer to.end(w)
	if err := c.lookAtStream(ctx, to, pattern(c.cfg.Settings.Subject, c.cfg.Destination)); !errors.Is(err, errUnseen) {
		return err
	}
	return nil
}
