package spans

import (
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// recorded returns the spans that record makes.
func recorded(t *testing.T, record func(s *Spans)) tracetest.SpanStubs {
	t.Helper()
	memory := tracetest.NewInMemoryExporter()
	provider := sdk.NewTracerProvider(sdk.WithSyncer(memory), sdk.WithIDGenerator(IDs{}))
	record(New(provider, "test"))
	return memory.GetSpans()
}

func message(change func(*post.Message)) post.Message {
	key := "key"
	m := post.Message{EventID: 1, Destination: "shop", Attempt: 1, NotAfter: time.Unix(2e9, 0), Event: post.Event{
		Key: &key, CreatedAt: pgtype.Timestamptz{Time: time.Unix(1e9, 0), Valid: true},
	}}
	change(&m)
	return m
}

// The id of a first attempt follows from its delivery and promise, whatever its number and
// whichever relay asks.
func TestFirstAttemptIsFoundAgain(t *testing.T) {
	t.Parallel()
	const parent = `{"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}`
	same := func(*post.Message) {}
	for name, test := range map[string]struct {
		change func(*post.Message)
		links  bool // to the first attempt
	}{
		"a later attempt":     {func(m *post.Message) { m.Attempt, m.Fence = 5, 7 }, true},
		"the same number":     {same, true}, // after a probe, or an attempt in which a relay died
		"another destination": {func(m *post.Message) { m.Destination = "mail" }, false},
		"another event":       {func(m *post.Message) { m.EventID = 2 }, false},
		"another promise":     {func(m *post.Message) { m.NotAfter = m.NotAfter.Add(time.Microsecond) }, false},
	} {
		for _, headers := range [][]byte{nil, []byte(parent)} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				all := recorded(t, func(s *Spans) {
					to := &url.URL{Host: "h"}
					for i, change := range []func(*post.Message){same, test.change} {
						m := message(change)
						m.Headers = headers
						span, _ := s.Start(m, i == 0, to)
						End(span, policy.Decision{Outcome: policy.Delivered, Result: policy.Result{Reason: policy.ReasonOK}}, time.Now())
					}
				})
				first, second := all[0].SpanContext, all[1]
				if len(second.Links) != 1 || second.Links[0].SpanContext.SpanID() == first.SpanID() != test.links {
					t.Errorf("the link %v, and the first attempt %v", second.Links, first)
				}
				if second.SpanContext.SpanID() == first.SpanID() {
					t.Error("two spans have one id")
				}
			})
		}
	}
}

// Nothing but host and port of a URL may be shown, and nothing of an event that is not listed.
func TestSpansHoldNoSecret(t *testing.T) {
	t.Parallel()
	to, err := url.Parse("https://user:hunter2@shop.internal:8443/hunter2?token=hunter2")
	testkit.Must(t, err)
	all := recorded(t, func(s *Spans) {
		m := message(func(m *post.Message) { m.Payload, m.Headers = []byte("hunter2"), []byte(`{"X-Secret": "hunter2"}`) })
		span, _ := s.Start(m, true, to)
		End(span, policy.Decision{Outcome: policy.Fail, Result: policy.Result{Reason: policy.ReasonRejected, StatusCode: 422, Message: "hunter2"}}, time.Now())
	})
	got := map[string]string{}
	for _, a := range all[0].Attributes {
		got[string(a.Key)] = a.Value.String()
	}
	want := map[string]string{
		"messaging.system": "outbox_relay", "messaging.operation.name": "deliver", "messaging.operation.type": "send",
		"messaging.destination.name": "shop", "messaging.message.id": "1", "messaging.message.body.size": "7", "server.address": "shop.internal",
		"server.port": "8443", "outbox.attempt": "1", "outbox.outcome": "fail", "outbox.reason": "rejected", "error.type": "rejected",
		"http.response.status_code": "422",
	}
	for key, value := range want {
		if got[key] != value {
			t.Errorf("%s is %q, want %q", key, got[key], value)
		}
	}
	if len(got) != len(want) || all[0].Status.Description != "rejected" {
		t.Errorf("%v, %+v", got, all[0].Status)
	}
}

// A destination may be several servers of NATS.
func TestSpansNameOneServer(t *testing.T) {
	t.Parallel()
	all := recorded(t, func(s *Spans) {
		span, _ := s.Start(message(func(*post.Message) {}), true, &url.URL{Scheme: "nats", Host: "a:4222,b:4223"})
		span.End()
	})
	got := map[string]string{}
	for _, a := range all[0].Attributes {
		got[string(a.Key)] = a.Value.String()
	}
	if got["server.address"] != "a" || got["server.port"] != "4222" {
		t.Errorf("%v", got)
	}
}

func TestIDsOfOtherSpansAreRandom(t *testing.T) {
	t.Parallel()
	a, b := trace.TraceID{}, trace.SpanID{}
	for range 100 {
		traceID, spanID := IDs{}.NewIDs(t.Context())
		if !traceID.IsValid() || !spanID.IsValid() || traceID == a || spanID == b || (IDs{}).NewSpanID(t.Context(), traceID) == spanID {
			t.Fatalf("%s %s after %s %s", traceID, spanID, a, b)
		}
		a, b = traceID, spanID
	}
}
