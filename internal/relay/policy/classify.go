package policy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"code.dny.dev/ssrf"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Outcome is what becomes of a delivery after a claim.
type Outcome string

const (
	// Delivered: the receiver answered 2xx.
	Delivered Outcome = "delivered"
	// Retry: attempt again on the schedule, or fail if that was the last attempt.
	Retry Outcome = "retry"
	// Fail: never attempt again; tell an operator.
	Fail Outcome = "fail"
	// Hold: give the claim back and spend no attempt. Nothing was sent, or the destination as a
	// whole is at fault.
	Hold Outcome = "hold"
)

// Reason is why. The set is closed: metric labels, log fields and decisions share it.
type Reason string

const (
	ReasonOK Reason = "ok" // 2xx

	// What the receiver answered.
	ReasonTransient    Reason = "transient"    // 408, 409, 423, 425: in time it will work
	ReasonRateLimited  Reason = "rate_limited" // 429
	ReasonServerError  Reason = "server_error" // 5xx but 501 and 503
	ReasonUnavailable  Reason = "unavailable"  // 503
	ReasonUnauthorized Reason = "unauthorized" // 401, 403, 407
	ReasonNotFound     Reason = "not_found"    // 404, 405
	ReasonRedirect     Reason = "redirect"     // 3xx: never followed
	ReasonRejected     Reason = "rejected"     // this request will never be accepted
	ReasonGone         Reason = "gone"         // 410: the destination is paused
	ReasonUnexpected   Reason = "unexpected"   // any other status

	// What kept it from answering.
	ReasonDNS       Reason = "dns"
	ReasonConnect   Reason = "connect"
	ReasonTLS       Reason = "tls"
	ReasonTimeout   Reason = "timeout"
	ReasonNetwork   Reason = "network"   // the connection broke
	ReasonMalformed Reason = "malformed" // what came back is not HTTP
	ReasonEgress    Reason = "egress"    // the address may not be dialled
	ReasonPanic     Reason = "panic"     // a defect of the relay

	// What kept it from being sent.
	ReasonInvalidEvent Reason = "invalid_event"    // the event cannot be expressed as a request
	ReasonTooLarge     Reason = "too_large"        // the payload is above the destination's limit
	ReasonEventMissing Reason = "event_missing"    // the row is gone from outbox
	ReasonCrashLoop    Reason = "crash_loop"       // relays died of it, sent alone
	ReasonSuspect      Reason = "suspect"          // relays died while holding it: it waits, or is sent alone
	ReasonNotAfter     Reason = "not_after_passed" // what was promised in X-Outbox-Not-After has ended
	ReasonLease        Reason = "lease"            // too little of the lease was left
	ReasonShutdown     Reason = "shutdown"         // the relay is stopping (also cuts off what is being sent)
	ReasonPaused       Reason = "paused"           // a 410 came while it waited for its turn
	ReasonRetryAfter   Reason = "retry_after"      // the destination has asked this relay to wait longer
	ReasonRemoved      Reason = "removed"          // its destination was removed from the configuration
	ReasonBreaker      Reason = "breaker"          // the destination is down: its breaker opened while it waited
	ReasonOrder        Reason = "order"            // one before it of its ordering key was not delivered
	ReasonDatabase     Reason = "database"         // the payload could not be read
	ReasonEarly        Reason = "early"            // the event is not available yet
	ReasonFull         Reason = "full"             // its destination could not have sent it soon
)

// Outcomes returns every outcome.
func Outcomes() []Outcome { return []Outcome{Delivered, Retry, Fail, Hold} }

// RuleBroken begins the message of an event that breaks a rule of its table. The name of the rule
// follows. No change of a destination makes such an event fit to be sent.
const RuleBroken = "the event breaks the rule "

// Reasons returns every reason.
func Reasons() []Reason {
	return []Reason{
		ReasonOK,
		ReasonTransient, ReasonRateLimited, ReasonServerError, ReasonUnavailable, ReasonUnauthorized, ReasonNotFound, ReasonRedirect,
		ReasonRejected, ReasonGone, ReasonUnexpected,
		ReasonDNS, ReasonConnect, ReasonTLS, ReasonTimeout, ReasonNetwork, ReasonMalformed, ReasonEgress, ReasonPanic,
		ReasonInvalidEvent, ReasonTooLarge, ReasonEventMissing, ReasonCrashLoop, ReasonSuspect, ReasonNotAfter, ReasonLease,
		ReasonShutdown, ReasonPaused, ReasonRetryAfter, ReasonRemoved, ReasonBreaker, ReasonOrder, ReasonDatabase, ReasonEarly, ReasonFull,
	}
}

// A Result is what happened to one claim of a delivery. What that means for the delivery is decided
// by Decide.
type Result struct {
	Reason     Reason
	StatusCode int           // 0 without a response
	Message    string        // for operators, at most plain.MaxBytes; empty when delivered
	RetryAfter time.Duration // what the receiver asked for
	Posted     bool          // false: nothing was sent, no attempt is spent
	Unreached  bool          // an attempt that found no connection: the receiver cannot have seen it
	Duplicate  bool          // delivered, and the receiver says that it had the message already

	DroppedHeaders int  // headers of the event that the destination does not let through
	Shared         bool // the failure of a request that failed for another event as well, whose result counts
	Batch          int  // how many events the request carried, in the result of one of them; 0: in those of the others, and of an event sent alone
}

// Gone reports whether the receiver said that it is gone for good. The first of a destination's
// results that says so pauses it: see [Decision].
func (v Result) Gone() bool { return v.Reason == ReasonGone }

// Responses lists HTTP status codes whose outcome differs from the standard table.
type Responses struct {
	// Retry on the schedule.
	Retry []int
	// Fail at once.
	Fail []int
}

// Problems returns the mistakes in the lists.
func (r Responses) Problems(path string) []check.Problem {
	var v check.Problems
	for _, list := range []struct {
		name  string
		codes []int
	}{{"retry", r.Retry}, {"fail", r.Fail}} {
		for _, code := range list.codes {
			v.Require(code >= 300 && code <= 599, path+"."+list.name, "%d is not a status code that can be moved; write 300 to 599", code)
		}
	}
	for _, code := range r.Retry {
		for _, other := range r.Fail {
			v.Require(code != other, path, "%d stands in both lists", code)
		}
	}
	return v
}

// ClassifyResponse classifies a response by its status alone; a body is evidence for operators,
// nothing more.
func ClassifyResponse(status int, header http.Header, excerpt string, moved Responses, now time.Time) Result {
	v := Result{StatusCode: status, Posted: true}
	switch {
	case status >= 200 && status <= 299:
		v.Reason = ReasonOK
		return v
	case status >= 300 && status <= 399:
		v.Reason = ReasonRedirect
	case status == 401 || status == 403 || status == 407:
		v.Reason = ReasonUnauthorized
	case status == 404 || status == 405:
		v.Reason = ReasonNotFound
	case status == 408 || status == 409 || status == 423 || status == 425:
		v.Reason = ReasonTransient
	case status == 429:
		v.Reason = ReasonRateLimited
	case status == 410 && slices.Contains(moved.Retry, status): // gone would pause the destination after the last attempt
		v.Reason = ReasonTransient
	case status == 410:
		v.Reason = ReasonGone
	case webhook.Refuses(status):
		v.Reason = ReasonRejected
	case status == 503:
		v.Reason = ReasonUnavailable
	case status >= 500 && status <= 599:
		v.Reason = ReasonServerError
	default:
		v.Reason = ReasonUnexpected
	}
	if status == 429 || status == 503 {
		v.RetryAfter = parseRetryAfter(header, now)
	}
	v.Message = strings.TrimSpace(fmt.Sprintf("%d %s", status, http.StatusText(status)))
	if status >= 300 && status <= 399 {
		v.Message += " (redirects are never followed; set the destination's url to the final address)"
	}
	if excerpt != "" {
		v.Message += ": " + excerpt
	}
	v.Message = plain.Clip(v.Message)
	return v
}

// ClassifyError classifies the error of a POST that yielded no response. Whether the receiver saw
// the request is unknown if there was a connection, so it is an attempt, and it is sent again.
func ClassifyError(err error, connected bool) Result {
	return Result{Reason: ErrorReason(err), Message: plain.Clip(err.Error()), Posted: true, Unreached: !connected}
}

// ErrorReason returns the reason that the error of a POST stands for.
func ErrorReason(err error) Reason {
	var (
		dns         *net.DNSError
		op          *net.OpError
		certificate *tls.CertificateVerificationError
		alert       tls.AlertError
		record      tls.RecordHeaderError
		unknownCA   x509.UnknownAuthorityError
		timeout     interface{ Timeout() bool }
	)
	switch {
	case errors.Is(err, ssrf.ErrProhibitedIP), errors.Is(err, ssrf.ErrProhibitedNetwork), errors.Is(err, ssrf.ErrProhibitedPort), errors.Is(err, ssrf.ErrInvalidHostPort):
		return ReasonEgress
	case errors.Is(err, context.Canceled):
		return ReasonShutdown
	case errors.As(err, &dns): // also without an answer in time: the receiver has no part in it
		return ReasonDNS
	case errors.As(err, &certificate), errors.As(err, &alert), errors.As(err, &record), errors.As(err, &unknownCA),
		strings.Contains(err.Error(), "tls: "):
		return ReasonTLS
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return ReasonTimeout
	case errors.As(err, &op) && (op.Op == "dial" || op.Op == "proxyconnect"):
		return ReasonConnect
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.As(err, &op),
		strings.Contains(err.Error(), "server closed idle connection"), strings.HasPrefix(err.Error(), "http2: "),
		strings.HasPrefix(err.Error(), "stream error: "): // of one request over HTTP/2
		return ReasonNetwork
	default:
		return ReasonMalformed
	}
}

// BreaksRule returns the result of an event that breaks a rule of the outbox.
func BreaksRule(rule string) Result {
	return Result{Reason: ReasonInvalidEvent, Message: RuleBroken + rule}
}

// Panicked returns the result of an attempt that tripped a defect. It holds the text of a runtime
// error, which holds no data, and of any other panic only its type: its value may be part of a
// request.
func Panicked(defect any) Result {
	text := fmt.Sprintf("panic: a value of type %T", defect)
	if err, ok := defect.(runtime.Error); ok {
		text = "panic: " + err.Error()
	}
	return Result{Reason: ReasonPanic, Message: plain.Clip(text), Posted: true}
}
