package alert

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A name that cannot be looked up is called that, whatever kept the lookup from an answer: no
// receiver is to be started then.
func TestLookupsAreNamed(t *testing.T) {
	t.Parallel()
	for _, failed := range []net.DNSError{
		{Err: "no such host", Name: "shop.internal", IsNotFound: true},
		{Err: "server misbehaving", Name: "shop.internal", Server: "10.0.0.10:53", IsTemporary: true},
		{Err: "read udp 10.1.2.3:51234->10.0.0.10:53: i/o timeout", Name: "shop.internal", Server: "10.0.0.10:53", IsTimeout: true},
		{Err: "dial udp 10.0.0.10:53: connect: network is unreachable", Name: "shop.internal", Server: "10.0.0.10:53"},
	} {
		err := &net.OpError{Op: "dial", Net: "tcp", Err: &failed}
		if stored, found := ReasonOf(err.Error()), policy.ErrorReason(err); stored != policy.ReasonDNS || found != policy.ReasonDNS {
			t.Errorf("%q is %s as an error, %s as a text", err, found, stored)
		}
		a := Alert{Rule: RuleBreakerOpen, Subject: "shop", FirstError: err.Error()}
		if text := a.Text(); !strings.Contains(text, "name that does not resolve") || !strings.Contains(text, "destinations.shop.url") || !strings.Contains(text, "DNS") || strings.Contains(text, "Start the receiver") {
			t.Error(text)
		}
	}
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	if reason := ReasonOf(refused.Error()); reason != policy.ReasonConnect {
		t.Errorf("%q is %s", refused, reason)
	}
	testkit.Equal(t, "an answer", ReasonOf(errors.New("500 Internal Server Error: lookup failed").Error()), policy.ReasonServerError)
}

// Where no relay has said why the archive did not run, no log is named that says it.
func TestRemedyOfTheArchive(t *testing.T) {
	t.Parallel()
	a := Alert{Rule: RuleArchive, Subject: "db", Detail: "last on 2026-01-02 03:04 UTC"}
	if text := a.Text(); strings.Contains(text, "The log of the relays") || !strings.Contains(text, "perhaps none ran when it was due") {
		t.Error(text)
	}
	a.FirstError = "process 7 has had a transaction open for 5m"
	testkit.Contains(t, "found", a.Text(), "The log of the relays says more (archive)")
}

// Who asks for TLS where plain HTTP is spoken has no wrong certificate.
func TestPlainHTTPAtAnHTTPSURL(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"tls: first record does not look like a TLS handshake", "the answer is no HTTP: server gave HTTP response to HTTPS client",
	} {
		a := Alert{Rule: RuleBreakerOpen, Subject: "shop", FirstError: text}
		testkit.Contains(t, "the alert", a.Text(), "does not speak TLS, which its URL asks for", "Correct the scheme or the port of destinations.shop.url")
	}
}
