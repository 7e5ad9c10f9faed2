package kafkapost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// failed returns the result of an attempt, begun at the given time, that ended with err.
func (c *Client) failed(since time.Time, topic string, err error) policy.Result {
	var answer *kerr.Error
	broken := c.links.broken(since)
	switch {
	case errors.As(err, &answer), broken != nil && errors.As(broken, &answer):
		reason := reasonOf(answer)
		return policy.Result{Reason: reason, Posted: reason != policy.ReasonTooLarge, Unreached: isLogin(answer), Message: plain.Clip(text(answer, topic))}
	case broken != nil:
		v := policy.ClassifyError(broken, false)
		v.Message = plain.Clip(broken.Error() + c.hint(broken))
		return v
	case errors.Is(err, kgo.ErrRecordRetries):
		return policy.Result{Reason: policy.ReasonUnavailable, Posted: true, Message: fmt.Sprintf(
			"topic %q acknowledged the record in none of %d tries: the brokers refused it for now, or the connection ended; one of the tries may have stored it",
			topic, brokerRetries+1)}
	case errors.Is(err, kgo.ErrRecordTimeout), errors.Is(err, context.DeadlineExceeded):
		return policy.Result{Reason: policy.ReasonTimeout, Posted: true, Message: fmt.Sprintf(
			"no acknowledgement of topic %q within the timeout; it may have stored the record", topic)}
	case errors.Is(err, context.Canceled), errors.Is(err, kgo.ErrClientClosed):
		return policy.Result{Reason: policy.ReasonShutdown, Posted: true, Message: plain.Clip(err.Error())}
	}
	return policy.ClassifyError(err, true)
}

// isLogin reports whether an answer refuses the user, so that no record can have been sent. The
// library returns it, or only that time ran out.
func isLogin(answer *kerr.Error) bool {
	return answer.Code == kerr.SaslAuthenticationFailed.Code || answer.Code == kerr.UnsupportedSaslMechanism.Code || answer.Code == kerr.IllegalSaslState.Code
}

// isFinal reports whether a broker has answered, after the login, and would answer the same again.
func isFinal(err error) bool {
	var answer *kerr.Error
	return errors.As(err, &answer) && !answer.Retriable && !isLogin(answer)
}

// reasonOf returns the reason that an answer of a broker stands for.
func reasonOf(answer *kerr.Error) policy.Reason {
	switch answer.Code {
	case kerr.MessageTooLarge.Code, kerr.RecordListTooLarge.Code:
		return policy.ReasonTooLarge
	case kerr.UnknownTopicOrPartition.Code, kerr.UnknownTopicID.Code, kerr.InvalidTopicException.Code:
		return policy.ReasonNotFound
	case kerr.TopicAuthorizationFailed.Code, kerr.ClusterAuthorizationFailed.Code, kerr.SaslAuthenticationFailed.Code,
		kerr.UnsupportedSaslMechanism.Code, kerr.IllegalSaslState.Code, kerr.TransactionalIDAuthorizationFailed.Code:
		return policy.ReasonUnauthorized
	case kerr.InvalidRecord.Code, kerr.InvalidTimestamp.Code, kerr.PolicyViolation.Code:
		return policy.ReasonRejected
	case kerr.ThrottlingQuotaExceeded.Code:
		return policy.ReasonRateLimited
	case kerr.NotEnoughReplicas.Code, kerr.NotEnoughReplicasAfterAppend.Code, kerr.LeaderNotAvailable.Code, kerr.NotLeaderForPartition.Code,
		kerr.BrokerNotAvailable.Code, kerr.KafkaStorageError.Code, kerr.CoordinatorNotAvailable.Code, kerr.CoordinatorLoadInProgress.Code:
		return policy.ReasonUnavailable
	case kerr.RequestTimedOut.Code:
		return policy.ReasonTimeout
	}
	return policy.ReasonServerError // not failed: an operator must see it, and no other answer is known to be final
}

// text says what an answer of a broker means, and what to do.
func text(answer *kerr.Error, topic string) string {
	name := fmt.Sprintf("%s (%d)", answer.Message, answer.Code)
	switch reasonOf(answer) {
	case policy.ReasonTooLarge:
		return fmt.Sprintf("%s: the record is larger than topic %q takes; raise its max.message.bytes and replay the event, or send less", name, topic)
	case policy.ReasonNotFound:
		return fmt.Sprintf("%s: there is no topic %q, or the user may not see it; create it, or correct the destination's topic", name, topic)
	case policy.ReasonUnauthorized:
		if answer.Code == kerr.TopicAuthorizationFailed.Code || answer.Code == kerr.ClusterAuthorizationFailed.Code {
			return fmt.Sprintf("%s: allow the user to write to topic %q (and IdempotentWrite, with brokers before 2.8)", name, topic)
		}
		return name + ": the brokers refuse the relay's user; correct basic_auth, bearer_token or kafka.sasl of the destination"
	case policy.ReasonRejected:
		return fmt.Sprintf("%s: the policy of topic %q refuses the record", name, topic)
	case policy.ReasonUnavailable:
		return fmt.Sprintf("%s: topic %q cannot be written now: too few replicas are in sync, or its partition has no leader", name, topic)
	}
	return name + ": " + answer.Description
}

// hint says what to do about a connection that was not made; empty: that is not known.
func (c *Client) hint(err error) string {
	switch text := err.Error(); {
	case errors.Is(err, io.EOF) && c.cfg.Authorization != nil:
		return " (the broker closed the connection while the relay logged in: correct basic_auth, bearer_token or kafka.sasl, or write kafka+ssl:// if it wants TLS)"
	case errors.Is(err, io.EOF):
		return " (the broker closed the connection at once: it may want TLS, kafka+ssl://, or a login, kafka.sasl)"
	case strings.Contains(text, "unknown authority"):
		return " (set tls.ca_file to the authority's certificate)"
	case strings.Contains(text, "certificate required"), strings.Contains(text, "bad certificate"):
		return " (the brokers ask for a client certificate: set tls.cert_file and tls.key_file)"
	case strings.Contains(text, "first record does not look like a TLS handshake"), c.cfg.TLS != nil && errors.Is(err, context.DeadlineExceeded):
		return " (the broker speaks no TLS at this port: write kafka:// instead of kafka+ssl://, or the port with TLS)"
	}
	return ""
}
