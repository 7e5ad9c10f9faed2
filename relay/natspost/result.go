package natspost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Error codes of a server's JetStream that package jetstream does not name.
const (
	codeAccountResources   = 10002
	codeClusterUnavailable = 10008
	codeResources          = 10023
	codeMemory             = 10028
	codeNotEnabledAccount  = 10039
	codeStorage            = 10047
	codeMessageTooLarge    = 10054
	codeOtherStream        = 10060
	codeNotEnabled         = 10076
	codeStoreFailed        = 10077
	codeHeaderTooLarge     = 10097
	codeSealed             = 10109
	codeStreamOffline      = 10118
	codeDuplicateInProcess = 10158
	codeStreamUnavailable  = 10194
)

// notConnected returns the result of an attempt that found no connection. Nothing was sent.
func notConnected(err error) policy.Result {
	v := policy.ClassifyError(err, false)
	switch {
	case isUnauthorized(err):
		v.Reason = policy.ReasonUnauthorized
		v.Message = plain.Clip(unauthorizedText(err))
	case errors.Is(err, nats.ErrTLS), v.Reason == policy.ReasonTLS:
		v.Reason = policy.ReasonTLS
		v.Message = plain.Clip(err.Error() + tlsHint(err))
	case errors.Is(err, nats.ErrSecureConnWanted):
		v.Reason = policy.ReasonTLS
		v.Message = "the server offers no TLS, and the url asks for it; write nats:// if that is meant, or the address of a server with TLS"
	case v.Reason == policy.ReasonTimeout, errors.Is(err, nats.ErrTimeout):
		v.Reason = policy.ReasonTimeout
		v.Message = "the server does not answer as one of NATS in time"
	case errors.Is(err, nats.ErrNoInfoReceived), strings.Contains(err.Error(), "INFO"):
		v.Reason = policy.ReasonMalformed
		v.Message = "what answers at this address is not a server of NATS"
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrMaxConnectionsExceeded), errors.Is(err, nats.ErrMaxAccountConnectionsExceeded),
		strings.Contains(err.Error(), "maximum connections exceeded"), strings.Contains(err.Error(), "maximum account active connections exceeded"):
		v.Reason = policy.ReasonConnect
	}
	return v
}

// refused returns the result of a message that was given to a connection, and not acknowledged.
func (c *Client) refused(ctx context.Context, to *conn, subject string, err error) policy.Result {
	v := policy.ClassifyError(err, true)
	var api *jetstream.APIError
	var size tooLargeError
	switch {
	case errors.As(err, &size):
		v = tooLarge(to, strconv.FormatInt(int64(size), 10))
	case errors.As(err, &api):
		v.Reason = reasonOf(api)
		v.Message = plain.Clip(c.apiText(api, subject))
	case errors.Is(err, nats.ErrPermissionViolation):
		v.Reason = policy.ReasonUnauthorized
		v.Message = plain.Clip(violationText(err))
	case errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrNoResponders):
		v.Reason, v.Message = c.diagnose(ctx, to, subject)
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionDraining):
		v = closed(ctx, to)
	case errors.Is(err, context.DeadlineExceeded):
		v.Message = fmt.Sprintf("no acknowledgement of stream %q within the timeout; it may have stored the message", c.cfg.Stream)
	case errors.Is(err, jetstream.ErrInvalidJSAck):
		v.Reason = policy.ReasonMalformed
		v.Message = plain.Clip(fmt.Sprintf("what answered on subject %q is not the stream %q: another program subscribes to it and replies", subject, c.cfg.Stream))
	case errors.Is(err, nats.ErrMaxPayload):
		v = tooLarge(to, "more")
	case errors.Is(err, nats.ErrHeadersNotSupported):
		v.Reason = policy.ReasonMalformed
		v.Message = "the server takes no headers; it needs NATS 2.2 or later"
	}
	return v
}

// closed returns the result of an attempt whose connection ended before the answer.
func closed(ctx context.Context, to *conn) policy.Result {
	v := policy.Result{Reason: policy.ReasonNetwork, Posted: true, Message: "the server closed the connection before it acknowledged the message"}
	switch last := to.endedBy(ctx); {
	case last == nil || errors.Is(last, io.EOF):
	case isUnauthorized(last):
		v.Reason, v.Message = policy.ReasonUnauthorized, plain.Clip(unauthorizedText(last))
	default:
		v.Message = plain.Clip(v.Message + ": " + last.Error())
	}
	return v
}

// A tooLargeError is the size of a message that no server takes.
type tooLargeError int64

func (e tooLargeError) Error() string { return strconv.FormatInt(int64(e), 10) + " bytes are too many" }

// tooLarge returns the result of a message of the given size that is not sent, because the server would close the connection.
func tooLarge(to *conn, size string) policy.Result {
	return policy.Result{Reason: policy.ReasonTooLarge, Message: fmt.Sprintf(
		"the message is too large for this server: it has %s bytes with its headers, and the server's max_payload is %d; raise that and replay the event, or send less", size, to.nats.MaxPayload())}
}

// reasonOf returns the reason that an answer of JetStream stands for.
func reasonOf(api *jetstream.APIError) policy.Reason {
	switch int(api.ErrorCode) {
	case codeMessageTooLarge, codeHeaderTooLarge:
		return policy.ReasonTooLarge
	case codeOtherStream, codeSealed, codeNotEnabled, codeNotEnabledAccount, int(jetstream.JSErrCodeStreamNotFound):
		return policy.ReasonNotFound
	case codeStoreFailed, codeAccountResources, codeResources, codeMemory, codeStorage, codeClusterUnavailable, codeStreamOffline, codeStreamUnavailable:
		return policy.ReasonUnavailable
	case codeDuplicateInProcess: // the stream has not decided yet about the same message, sent before
		return policy.ReasonTransient
	}
	if api.Code >= 500 {
		return policy.ReasonServerError
	}
	return policy.ReasonUnexpected // not failed: an operator must see it, and no answer but that of size is known to be final
}

// apiText says what an answer of JetStream means, and what to do.
func (c *Client) apiText(api *jetstream.APIError, subject string) string {
	text := fmt.Sprintf("%s (%d)", api.Description, api.ErrorCode)
	switch int(api.ErrorCode) {
	case codeOtherStream:
		return fmt.Sprintf("%s: another stream than %q takes the subject %q; correct stream or subject of the destination, or the subjects of the stream", text, c.cfg.Stream, subject)
	case codeStoreFailed:
		return fmt.Sprintf("%s: the stream %q is full and discards new messages; raise its limits, or remove messages", text, c.cfg.Stream)
	case codeAccountResources, codeResources, codeMemory, codeStorage:
		return text + ": the account or the server has no room for the stream; raise its limits"
	case codeMessageTooLarge, codeHeaderTooLarge:
		return fmt.Sprintf("%s: raise max_msg_size of the stream %q and replay the event, or send less", text, c.cfg.Stream)
	case codeSealed:
		return fmt.Sprintf("%s: the stream %q takes nothing any more; name another one", text, c.cfg.Stream)
	case codeNotEnabled, codeNotEnabledAccount:
		return text + ": the server, or the account, has no JetStream; enable it, or correct the url or the credentials"
	case int(jetstream.JSErrCodeStreamNotFound):
		return fmt.Sprintf("%s: there is no stream %q; create it, or correct the destination's stream", text, c.cfg.Stream)
	}
	return text
}

// isUnauthorized reports whether a server refuses who connects.
func isUnauthorized(err error) bool {
	text := strings.ToLower(err.Error())
	for _, refusal := range []string{"authorization violation", "authentication expired", "authentication revoked", "authentication timeout", "nkeys not supported"} {
		if strings.Contains(text, refusal) {
			return true
		}
	}
	return errors.Is(err, errExpired)
}

func unauthorizedText(err error) string {
	if errors.Is(err, errExpired) {
		return err.Error()
	}
	return err.Error() + ": the server refuses the relay's user; correct credentials_file, nkey_file, basic_auth or bearer_token of the destination"
}

// violationText says what right is missing.
func violationText(err error) string {
	if _, subscription := refusedSubject(err); subscription {
		return err.Error() + ": acknowledgements cannot arrive; allow the user to subscribe to that, or set inbox_prefix to what it may subscribe to"
	}
	return err.Error() + ": allow the user to publish to that subject"
}

func tlsHint(err error) string {
	switch text := err.Error(); {
	case strings.Contains(text, "unknown authority"):
		return " (set tls.ca_file to the authority's certificate)"
	case strings.Contains(text, "certificate required"), strings.Contains(text, "bad certificate"), strings.Contains(text, "closed by remote after TLS"):
		return " (if the server asks for a client certificate, set tls.cert_file and tls.key_file)"
	case strings.Contains(text, "certificate is valid for"), strings.Contains(text, "doesn't contain any IP SANs"):
		return " (if the url is right, set tls.server_name to a name of the certificate)"
	}
	return ""
}
