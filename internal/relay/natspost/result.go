package natspost

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// notConnected returns the result of an attempt that found no connection. Nothing was sent.
func notConnected(err error) policy.Result {
	v := policy.ClassifyError(err, false)
	text := err.Error()
	switch {
	case errors.Is(err, errExpired):
		v.Reason = policy.ReasonUnauthorized
	case accessRefused.MatchString(text):
		v.Reason, text = policy.ReasonUnauthorized, text+adviceIdentity
	case errors.Is(err, nats.ErrTLS), v.Reason == policy.ReasonTLS:
		v.Reason, text = policy.ReasonTLS, text+tlsHint(text)
	case errors.Is(err, nats.ErrSecureConnWanted):
		v.Reason = policy.ReasonTLS
		text = "the server offers no TLS, and the url asks for it; write nats:// if that is meant, or the address of a server with TLS"
	case v.Reason == policy.ReasonTimeout, errors.Is(err, nats.ErrTimeout):
		v.Reason, text = policy.ReasonTimeout, "the server does not answer as one of NATS in time"
	case strings.Contains(text, "INFO"):
		v.Reason, text = policy.ReasonMalformed, "what answers at this address is not a server of NATS"
	case errors.Is(err, nats.ErrNoServers), strings.Contains(text, "connections exceeded"):
		v.Reason = policy.ReasonConnect
	}
	v.Message = plain.Clip(text)
	return v
}

// refused returns the result of a message that was given to a connection, and not acknowledged.
func (c *Client) refused(ctx context.Context, to *conn, message *nats.Msg, err error) policy.Result {
	v := policy.ClassifyError(err, true)
	text := err.Error()
	var api *jetstream.APIError
	switch {
	case accessRefused.MatchString(text):
		v.Reason, text = policy.ReasonUnauthorized, text+adviceIdentity
	case errors.Is(err, errClosed):
		v.Reason = policy.ReasonNetwork
	case errors.As(err, &api):
		v.Reason, text = c.streamError(api, message.Subject)
	case errors.Is(err, nats.ErrPermissionViolation):
		v.Reason, text = policy.ReasonUnauthorized, violationText(err)
	case errors.Is(err, jetstream.ErrNoStreamResponse):
		v.Reason, text = c.diagnose(ctx, to, message.Subject)
	case errors.Is(err, context.DeadlineExceeded):
		text = fmt.Sprintf("no acknowledgement of stream %q within the timeout; it may have stored the message", c.cfg.Stream)
	case errors.Is(err, jetstream.ErrInvalidJSAck):
		v.Reason = policy.ReasonMalformed
		text = fmt.Sprintf("what answered on subject %q is not the stream %q: another program subscribes to it and replies", message.Subject, c.cfg.Stream)
	case errors.Is(err, nats.ErrMaxPayload): // not sent, because the server would close the connection
		v = policy.Result{Reason: policy.ReasonTooLarge}
		text = fmt.Sprintf("the message is too large for this server: it has %d bytes with its headers, and the server's max_payload is %d; raise that and replay the event, or send less",
			message.Size()-len(message.Subject), to.nats.MaxPayload())
	}
	v.Message = plain.Clip(text)
	return v
}

// What an operator can do about an error. {stream} and {subject} stand for what they say.
const (
	adviceIdentity    = ": the server refuses the relay's user; correct nats.credentials_file, nats.nkey_file, basic_auth or bearer_token of the destination"
	adviceNoRoom      = "the account or the server has no room for the stream; raise its limits"
	adviceTooLarge    = "raise max_msg_size of the stream {stream} and replay the event, or send less"
	adviceNoJetStream = "the server, or the account, has no JetStream; enable it, or correct the url or the credentials"
	adviceOtherStream = "another stream than {stream} takes the subject {subject}; correct stream or subject of the destination, or the subjects of the stream"
)

// streamErrors has the error codes of JetStream, few of which package jetstream names.
var streamErrors = map[jetstream.ErrorCode]struct {
	reason policy.Reason
	advice string
}{
	10002: {policy.ReasonUnavailable, adviceNoRoom}, // of the account
	10008: {policy.ReasonUnavailable, ""},           // the cluster is not there
	10023: {policy.ReasonUnavailable, adviceNoRoom}, // of the server
	10028: {policy.ReasonUnavailable, adviceNoRoom}, // in memory
	10039: {policy.ReasonNotFound, adviceNoJetStream},
	10047: {policy.ReasonUnavailable, adviceNoRoom}, // in files
	10054: {policy.ReasonTooLarge, adviceTooLarge},
	10059: {policy.ReasonNotFound, "there is no stream {stream}; create it, or correct the destination's stream"},
	10060: {policy.ReasonNotFound, adviceOtherStream},
	10076: {policy.ReasonNotFound, adviceNoJetStream},
	10077: {policy.ReasonUnavailable, "the stream {stream} is full and discards new messages; raise its limits, or remove messages"},
	10097: {policy.ReasonTooLarge, adviceTooLarge}, // of the headers
	10109: {policy.ReasonNotFound, "the stream {stream} takes nothing any more; name another one"},
	10118: {policy.ReasonUnavailable, ""}, // the stream is offline
	10158: {policy.ReasonTransient, ""},   // the stream has not decided yet about the same message, sent before
	10194: {policy.ReasonUnavailable, ""}, // the stream is not available
}

// streamError returns the reason that an error of JetStream stands for, what it means, and what to
// do.
func (c *Client) streamError(api *jetstream.APIError, subject string) (reason policy.Reason, text string) {
	text = fmt.Sprintf("%s (%d)", api.Description, api.ErrorCode)
	known, ok := streamErrors[api.ErrorCode]
	switch {
	case !ok && api.Code >= 500:
		return policy.ReasonServerError, text
	case !ok: // not failed: no answer but that of size is known to be final
		return policy.ReasonUnexpected, text
	case known.advice != "":
		text += ": " + strings.NewReplacer("{stream}", strconv.Quote(c.cfg.Stream), "{subject}", strconv.Quote(subject)).Replace(known.advice)
	}
	return known.reason, text
}

// accessRefused is in the text of an error by which a server refuses who connects.
var accessRefused = regexp.MustCompile(`(?i)authorization violation|authentication (expired|revoked|timeout)|nkeys not supported`)

// violationText says what right is missing.
func violationText(err error) string {
	if _, subscription := refusedSubject(err); subscription {
		return err.Error() + ": acknowledgements cannot arrive; allow the user to subscribe to that, or set nats.inbox_prefix to what it may subscribe to"
	}
	return err.Error() + ": allow the user to publish to that subject"
}

func tlsHint(text string) string {
	switch {
	case strings.Contains(text, "unknown authority"):
		return " (set tls.ca_file to the authority's certificate)"
	case strings.Contains(text, "certificate required"), strings.Contains(text, "bad certificate"), strings.Contains(text, "closed by remote after TLS"):
		return " (if the server asks for a client certificate, set tls.cert_file and tls.key_file)"
	case strings.Contains(text, "certificate is valid for"), strings.Contains(text, "doesn't contain any IP SANs"):
		return " (if the url is right, set tls.server_name to a name of the certificate)"
	}
	return ""
}
