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
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"code.dny.dev/ssrf"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// published is the table of the README, written a second time: every status code has one line.
func published(code int) (Outcome, Reason) {
	retry := map[int]Reason{
		408: ReasonTransient, 409: ReasonTransient, 423: ReasonTransient, 425: ReasonTransient,
		429: ReasonRateLimited, 503: ReasonUnavailable,
		401: ReasonUnauthorized, 403: ReasonUnauthorized, 407: ReasonUnauthorized,
		404: ReasonNotFound, 405: ReasonNotFound,
	}
	fail := []int{400, 406, 411, 413, 414, 415, 422, 431, 501}
	reason, listed := retry[code]
	switch {
	case listed:
		return Retry, reason
	case slices.Contains(fail, code):
		return Fail, ReasonRejected
	case code == 410:
		return Fail, ReasonGone
	}
	switch code / 100 {
	case 2:
		return Delivered, ReasonOK
	case 3:
		return Retry, ReasonRedirect
	case 5:
		return Retry, ReasonServerError
	}
	return Retry, ReasonUnexpected
}

// decideFirst decides on the first attempt.
func decideFirst(v Result, moved Responses) Decision {
	return Decide(v, Circumstances{Attempt: 1, Retry: RetryPolicy{}.WithDefaults(), Responses: moved})
}

func TestEveryStatusHasThePublishedOutcome(t *testing.T) {
	t.Parallel()
	for code := range 1000 {
		got := decideFirst(ClassifyResponse(code, http.Header{}, "evidence", Responses{}, time.Now()), Responses{})
		outcome, reason := published(code)
		if got.Outcome != outcome || got.Reason != reason || got.StatusCode != code || !got.Posted {
			t.Errorf("%d: %s, %s, %d, posted %t; want %s, %s", code, got.Outcome, got.Reason, got.StatusCode, got.Posted, outcome, reason)
		}
		if delivered := outcome == Delivered; delivered != (got.Message == "") {
			t.Errorf("%d: message %q", code, got.Message)
		} else if !delivered && (!strings.HasPrefix(got.Message, fmt.Sprint(code)) || !strings.HasSuffix(got.Message, ": evidence")) {
			t.Errorf("%d: the message %q does not hold code and evidence", code, got.Message)
		}
	}
}

func TestResponsesMoveCodesToAnotherOutcome(t *testing.T) {
	t.Parallel()
	moved := Responses{Retry: []int{400, 410, 422}, Fail: []int{302, 404, 500, 503}}
	for code, want := range map[int]Outcome{400: Retry, 410: Retry, 422: Retry, 302: Fail, 404: Fail, 500: Fail, 503: Fail} {
		if got := decideFirst(ClassifyResponse(code, nil, "", moved, time.Now()), moved); got.Outcome != want {
			t.Errorf("%d: %s, want %s", code, got.Outcome, want)
		}
	}
	for code := range 1000 {
		if slices.Contains(moved.Retry, code) || slices.Contains(moved.Fail, code) {
			continue
		}
		want, _ := published(code)
		if got := decideFirst(ClassifyResponse(code, nil, "", moved, time.Now()), moved); got.Outcome != want {
			t.Errorf("%d: %s although it was not moved, want %s", code, got.Outcome, want)
		}
	}
}

// A 410 pauses the destination; who retries on 410 has said that it does not mean "stop".
func TestMovedGoneDoesNotPauseTheDestination(t *testing.T) {
	t.Parallel()
	retried := Responses{Retry: []int{410}}
	v := ClassifyResponse(410, nil, "", retried, time.Now())
	s := Decide(v, Circumstances{Attempt: 8, Retry: retryPolicy(0, time.Second), Responses: retried})
	if s.Outcome != Fail || s.PausesDestination {
		t.Errorf("the last attempt is %s, and pauses: %t", s.Outcome, s.PausesDestination)
	}
	failed := Responses{Fail: []int{410}}
	if v := decideFirst(ClassifyResponse(410, nil, "", failed, time.Now()), failed); v.Outcome != Fail || !v.PausesDestination {
		t.Errorf("410 listed under fail: %s, and pauses: %t", v.Outcome, v.PausesDestination)
	}
	if s := Decide(Result{Reason: ReasonGone, Posted: true}, Circumstances{Attempt: 1, Retry: retryPolicy(0, time.Second), AlreadyPaused: true}); s.Outcome != Retry || s.PausesDestination {
		t.Errorf("a second 410 is %s, and pauses: %t", s.Outcome, s.PausesDestination)
	}
}

func TestRetryAfterIsHeardOnlyFromTheTwoStatusesThatMeanIt(t *testing.T) {
	t.Parallel()
	header := http.Header{"Retry-After": {"77"}}
	for code := range 1000 {
		want := time.Duration(0)
		if code == 429 || code == 503 {
			want = 77 * time.Second
		}
		if got := ClassifyResponse(code, header, "", Responses{}, time.Now()).RetryAfter; got != want {
			t.Errorf("%d: %s, want %s", code, got, want)
		}
	}
}

func TestErrorReason(t *testing.T) {
	t.Parallel()
	dial := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	read := func(err error) error { return &net.OpError{Op: "read", Net: "tcp", Err: err} }
	for _, c := range []struct {
		err  error
		want Reason
	}{
		{dial(&net.DNSError{Err: "no such host", IsNotFound: true}), ReasonDNS},
		{dial(&net.DNSError{Err: "server misbehaving", IsTemporary: true}), ReasonDNS},
		{dial(&net.DNSError{Err: "i/o timeout", IsTimeout: true}), ReasonDNS},
		{dial(os.NewSyscallError("connect", syscall.ECONNREFUSED)), ReasonConnect},
		{dial(os.NewSyscallError("connect", syscall.EHOSTUNREACH)), ReasonConnect},
		{dial(os.ErrDeadlineExceeded), ReasonTimeout},
		{dial(fmt.Errorf("%w: 169.254.169.254", ssrf.ErrProhibitedIP)), ReasonEgress},
		{dial(ssrf.ErrProhibitedNetwork), ReasonEgress},
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, ReasonTLS},
		{x509.UnknownAuthorityError{}, ReasonTLS},
		{tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}, ReasonTLS},
		{tls.AlertError(40), ReasonTLS},
		{errors.New("remote error: tls: handshake failure"), ReasonTLS},
		{context.DeadlineExceeded, ReasonTimeout},
		{read(os.ErrDeadlineExceeded), ReasonTimeout},
		{fmt.Errorf("cut: %w", context.Canceled), ReasonShutdown},
		{io.EOF, ReasonNetwork},
		{io.ErrUnexpectedEOF, ReasonNetwork},
		{read(syscall.ECONNRESET), ReasonNetwork},
		{syscall.EPIPE, ReasonNetwork},
		{net.ErrClosed, ReasonNetwork},
		{errors.New("http: server closed idle connection"), ReasonNetwork},
		{errors.New("http2: server sent GOAWAY and closed the connection"), ReasonNetwork},
		{errors.New("stream error: stream ID 3; INTERNAL_ERROR; received from peer"), ReasonNetwork},
		{errors.New(`malformed HTTP status code "99"`), ReasonMalformed},
		{errors.New("net/http: server response headers exceeded 65536 bytes; aborted"), ReasonMalformed},
	} {
		if got := ErrorReason(c.err); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
		if v := decideFirst(ClassifyError(c.err, true), Responses{}); v.Outcome != Retry || !v.Posted || v.Message == "" || v.StatusCode != 0 {
			t.Errorf("%v: an error without a response is an attempt that is repeated, not %+v", c.err, v)
		}
	}
}

// A reason that the list lacks would have no metric until it first happens.
func TestReasonsAreAllListed(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("classify.go")
	testkit.Must(t, err)
	var declared []string
	for _, found := range regexp.MustCompile(`(?m)^\tReason\w+ +(?:Reason)? += "(\w+)"`).FindAllStringSubmatch(string(source), -1) {
		declared = append(declared, found[1])
	}
	var listed []string
	for _, r := range Reasons() {
		listed = append(listed, string(r))
	}
	if !slices.Equal(declared, listed) || len(listed) < 30 {
		t.Errorf("declared %q, listed %q", declared, listed)
	}
}
