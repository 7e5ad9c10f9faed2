package main

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/traces"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A collector takes spans by OTLP over HTTP.
type collector struct {
	*httptest.Server
	mu    sync.Mutex // guards the rest
	spans []*tracepb.Span
	raw   bytes.Buffer // all requests, with their resources
	auth  []string
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var data tracepb.TracesData
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &data) != nil {
			t.Errorf("%s: %v, or no spans: %q", r.URL, err, body)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.raw.Write(body)
		c.auth = append(c.auth, r.Header.Get("Authorization"))
		for _, resource := range data.GetResourceSpans() {
			for _, scope := range resource.GetScopeSpans() {
				c.spans = append(c.spans, scope.GetSpans()...)
			}
		}
	}))
	t.Cleanup(c.Close)
	return c
}

// attempts returns the spans of the relay, in their order.
func (c *collector) attempts() []*tracepb.Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	attempts := slices.DeleteFunc(slices.Clone(c.spans), func(s *tracepb.Span) bool { return !strings.HasPrefix(s.GetName(), "deliver ") })
	slices.SortFunc(attempts, func(a, b *tracepb.Span) int { return int(a.GetStartTimeUnixNano()) - int(b.GetStartTimeUnixNano()) })
	return attempts
}

// attributeOf returns what a span says, as a text.
func attributeOf(s *tracepb.Span, key string) string {
	for _, a := range s.GetAttributes() {
		if a.GetKey() == key {
			if n, isInt := a.GetValue().GetValue().(*commonpb.AnyValue_IntValue); isInt {
				return fmt.Sprint(n.IntValue)
			}
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

// traceParent returns the context that a span hands on.
func traceParent(s *tracepb.Span) string {
	return fmt.Sprintf("00-%x-%x-01", s.GetTraceId(), s.GetSpanId())
}

// producerSpan records a span of a producer, and returns the headers of an event that it enqueues.
func producerSpan(t *testing.T, c *collector) (headers string, parent trace.SpanContext) {
	t.Helper()
	endpoint, err := url.Parse(c.URL + "/v1/traces")
	pgtest.Must(t, err)
	service := traces.Open(traces.Config{Endpoint: endpoint, ServiceName: "finance", SampleRatio: 1, IDs: relay.SpanIDs{}})
	defer service.Close(t.Context())
	ctx, span := service.Provider().Tracer("test").Start(t.Context(), "issue invoice")
	defer span.End()
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return fmt.Sprintf(`{"traceparent": %q, "tracestate": "vendor=1", "X-Event-Own": "CANARY-own"}`, carrier["traceparent"]), span.SpanContext()
}

// The trace goes from the producer through two attempts, made by two relays one after the other, to
// the receiver.
func TestTracesContinue(t *testing.T) {
	t.Parallel()
	dsn, c := pgtest.New(t, migrations.Outbox), newCollector(t)
	db := open(t, dsn)
	requests := make(chan *http.Request, 2)
	var accept atomic.Bool
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !accept.Load() {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, `{"title": "CANARY-answer"}`)
		}
		requests <- r
	}))
	defer receiver.Close()
	file := writeFile(t, filepath.Join(t.TempDir(), "outbox-relay.yaml"), `
destinations: {shop: {url: "`+receiver.URL+`/CANARY-path?token=CANARY-query", headers: {X-Api-Key: CANARY-header}, signing_secrets: [`+goodSecret+`]}}
defaults: {retry: {schedule: [1h]}}
traces: {endpoint: "`+c.URL+`", headers: {Authorization: Bearer collector}}
`)
	headers, parent := producerSpan(t, c)
	run := func(status string, number int) *http.Request {
		s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_METRICS_LISTEN=127.0.0.1:0"}, "--config", file)
		metrics := monitorOf(t, s) + "/metrics"
		r := receive(t, requests, s)
		until(t, db, "SELECT EXISTS (SELECT FROM outbox_delivery WHERE status = $1 AND attempts = $2 AND claimed_by IS NULL)", status, number)
		relaytest.Eventually(t, "the span is counted", func() bool {
			_, text := fetch(t, metrics)
			return strings.Contains(text, `outbox_trace_spans_total{result="success"} 1`)
		})
		s.end(t, 0)
		if strings.Contains(s.stderr.String(), "collector\"") {
			t.Errorf("the log names the credential:\n%s", s.stderr)
		}
		return r
	}
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('invoice.paid', '\"CANARY-payload\"', 'key', $1)", headers)
	first := run("pending", 1)
	accept.Store(true)
	execute(t, db, "UPDATE outbox_delivery SET next_attempt_at = now()")
	second := run("delivered", 2)

	attempts := c.attempts()
	if len(attempts) != 2 {
		t.Fatalf("%d spans of attempts: %v", len(attempts), attempts)
	}
	for i, s := range attempts {
		if hex.EncodeToString(s.GetTraceId()) != parent.TraceID().String() || hex.EncodeToString(s.GetParentSpanId()) != parent.SpanID().String() {
			t.Errorf("attempt %d is no child of the producer's span %s: %v", i+1, parent.SpanID(), s)
		}
		if s.GetName() != "deliver shop" || s.GetKind() != tracepb.Span_SPAN_KIND_CLIENT || s.GetTraceState() != "vendor=1" {
			t.Errorf("attempt %d: %v", i+1, s)
		}
	}
	if r := first; r.Header.Get("Traceparent") != traceParent(attempts[0]) {
		t.Errorf("request 1 carries %s, want %s", r.Header.Get("Traceparent"), traceParent(attempts[0]))
	}
	if r := second; r.Header.Get("Traceparent") != traceParent(attempts[1]) || r.Header.Get("Tracestate") != "vendor=1" || r.Header.Get("X-Event-Own") != "CANARY-own" {
		t.Errorf("request 2: %v, want the traceparent %s", r.Header, traceParent(attempts[1]))
	}
	if links := attempts[0].GetLinks(); len(links) != 0 {
		t.Errorf("the first attempt links to %v", links)
	}
	if links := attempts[1].GetLinks(); len(links) != 1 || !bytes.Equal(links[0].GetSpanId(), attempts[0].GetSpanId()) || !bytes.Equal(links[0].GetTraceId(), attempts[0].GetTraceId()) {
		t.Errorf("the retry links to %v, want the span of the first attempt, %x", links, attempts[0].GetSpanId())
	}
	checkAttributes(t, attempts)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, secret := range []string{"CANARY", goodSecret, "collector"} {
		if bytes.Contains(c.raw.Bytes(), []byte(secret)) {
			t.Errorf("%q is in a span", secret)
		}
	}
	if !slices.Contains(c.auth, "Bearer collector") {
		t.Errorf("the collector was given %q", c.auth)
	}
}

func checkAttributes(t *testing.T, attempts []*tracepb.Span) {
	t.Helper()
	for i, want := range []map[string]string{
		{"outbox.attempt": "1", "outbox.outcome": "retry", "outbox.reason": "server_error", "http.response.status_code": "500", "error.type": "server_error"},
		{"outbox.attempt": "2", "outbox.outcome": "delivered", "outbox.reason": "ok", "http.response.status_code": "200", "error.type": ""},
	} {
		want["messaging.system"], want["messaging.destination.name"], want["messaging.message.id"] = "outbox_relay", "shop", "1"
		want["messaging.operation.name"], want["messaging.operation.type"], want["outbox.event_type"] = "deliver", "send", "invoice.paid"
		want["server.address"] = "127.0.0.1"
		for key, value := range want {
			if got := attributeOf(attempts[i], key); got != value {
				t.Errorf("attempt %d: %s is %q, want %q", i+1, key, got, value)
			}
		}
	}
}

// What is not sampled is exported by no one, and what has no parent begins a trace, which the
// attempts of one event share.
func TestTracesAreSampled(t *testing.T) {
	t.Parallel()
	const unsampled = `{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}`
	for name, test := range map[string]struct {
		headers, ratio string
		spans          int
		flag           string
	}{
		"an unsampled parent": {headers: unsampled, ratio: "1", flag: "-00"},
		"no parent":           {headers: "{}", ratio: "1", spans: 2, flag: "-01"},
		"no parent, no share": {headers: "{}", ratio: "0", flag: "-00"},
		"a malformed parent":  {headers: `{"traceparent": "00-1-2-01", "tracestate": "vendor=1"}`, ratio: "1", spans: 2, flag: "-01"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn, c := pgtest.New(t, migrations.Outbox), newCollector(t)
			db := open(t, dsn)
			requests := make(chan *http.Request, 2)
			receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Outbox-Attempt") == "1" {
					w.WriteHeader(http.StatusConflict)
				}
				requests <- r
			}))
			defer receiver.Close()
			execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('invoice.paid', '{}', 'key', $1)", test.headers)
			s := start(t, []string{
				"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL, "OUTBOX_DEFAULTS_RETRY_SCHEDULE=10ms",
				"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.URL, "OUTBOX_TRACES_SAMPLE_RATIO=" + test.ratio,
			})
			first, second := receive(t, requests, s).Header, receive(t, requests, s).Header
			until(t, db, "SELECT EXISTS (SELECT FROM outbox_delivery WHERE status = 'delivered')")
			s.end(t, 0) // sends the last spans
			a, b := first.Get("Traceparent"), second.Get("Traceparent")
			if len(a) != 55 || len(b) != 55 || a[:35] != b[:35] || a == b || !strings.HasSuffix(a, test.flag) || !strings.HasSuffix(b, test.flag) {
				t.Errorf("the requests carry %q and %q, want two spans of one trace, with the flag %s", a, b, test.flag)
			}
			if first.Get("Tracestate") != "" {
				t.Errorf("tracestate %q of a trace that is not this one", first.Get("Tracestate"))
			}
			attempts := c.attempts()
			if len(attempts) != test.spans {
				t.Fatalf("%d spans, want %d", len(attempts), test.spans)
			}
			if test.spans == 2 && (attempts[0].GetKind() != tracepb.Span_SPAN_KIND_PRODUCER || traceParent(attempts[0]) != a ||
				len(attempts[1].GetLinks()) != 1 || !bytes.Equal(attempts[1].GetLinks()[0].GetSpanId(), attempts[0].GetSpanId())) {
				t.Errorf("%v", attempts)
			}
		})
	}
}
