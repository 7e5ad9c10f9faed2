package webhook

import (
	"slices"
	"strings"
	"testing"
)

func TestSameName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"X-Real-Ip", "x-real-ip", "X_REAL_IP", "X.Real~Ip", "x!real|ip"} {
		if !SameName(name, "X-Real-Ip") || !ReservedForEvents(name) {
			t.Errorf("%s is another name", name)
		}
	}
	for _, name := range []string{"X-Real-Ipx", "X-Real-I", "XX-Real-Ip", "X0Real-Ip", "", "X--Real-Ip"} {
		if SameName(name, "X-Real-Ip") || ReservedForEvents(name) {
			t.Errorf("%s is the same name", name)
		}
	}
}

// What a receiver may take for a covered header has a name about which all receivers agree.
func TestSentName(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, sent string
		covered    bool
	}{
		{"x-event-tenant", "X-Event-Tenant", true},
		{"X_Event_Tenant", "X-Event-Tenant", true},
		{"x-event-a_b", "X-Event-A-B", true},
		{"CE.id", "Ce-Id", true},
		{"x_tenant", "X_tenant", false},
		{"x-tenant", "X-Tenant", false},
		{"x_event", "X_event", false},
	} {
		if got := SentName(c.name); got != c.sent || Covered(got) != c.covered {
			t.Errorf("%s is sent as %s, covered: %t", c.name, got, Covered(got))
		}
	}
}

// An event may bring no header that speaks for the relay, for a proxy or for who sends, however its
// name is spelled.
func TestReservedForEvents(t *testing.T) {
	t.Parallel()
	reserved := []string{
		"Accept-Encoding", "Authorization", "Cf-Connecting-Ip", "Connection", "Content-Encoding", "Content-Length", "Content-Type", "Cookie",
		"Expect", "Fastly-Client-Ip", "Forwarded", "Forwarded-For", "Host", "Http2-Settings", "Keep-Alive", "Proxy", "Remote-User", "Te",
		"Trailer", "Transfer-Encoding", "True-Client-Ip", "Upgrade", "User-Agent", "Via",
		"X-Client-Ip", "X-Cluster-Client-Ip", "X-Envoy-Original-Path", "X-Forwarded", "X-Http-Method", "X-Http-Method-Override",
		"X-Idempotency-Key", "X-Method-Override", "X-Original", "X-Originating-Ip", "X-Real-Ip", "X-Remote-User", "X-Rewrite-Url",
		"Proxy-Authorization", "Proxy-Connection", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Future",
		"X-Original-Url", "X-Original-Method", EventType, Replay, OutboxPrefix, OutboxPrefix + "Future",
		ID, Timestamp, Signature, "Webhook-Future",
	}
	free := []string{
		"Accept", "Accept-Language", "Baggage", "Ce-Id", "Content-Language", "Cookies", "Idempotency-Key", "Prefer", "Proxys", "Traceparent",
		"Tracestate", "Webhook", "X-Authorization", "X-Content-Type", "X-Forwardeds", "X-Host", "X-Outbox", "X-Real-Ip2",
		"X-Tenant", "X-User-Agent", "Xcookie", "XXOutbox-Id", "Hosts", "Content-Types", "Te2", "X--Real-Ip", "X-Http-Methods", "Vial",
	}
	for i, name := range slices.Concat(reserved, free) {
		for _, spelling := range []string{name, strings.ToLower(name), strings.ToUpper(name), strings.ReplaceAll(name, "-", "_"), strings.Replace(name, "-", "~", 1)} {
			if want := i < len(reserved); ReservedForEvents(spelling) != want {
				t.Errorf("%s is reserved: %t", spelling, !want)
			}
		}
	}
}
