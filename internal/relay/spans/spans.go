package spans

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// system is what the conventions call the messaging system.
const system = "outbox_relay"

// Names of attributes that the conventions do not have.
const (
	attemptKey   = attribute.Key("outbox.attempt")
	eventTypeKey = attribute.Key("outbox.event_type")
	replayKey    = attribute.Key("outbox.replay")
	outcomeKey   = attribute.Key("outbox.outcome")
	reasonKey    = attribute.Key("outbox.reason")
	linkKey      = attribute.Key("outbox.link")
)

// Spans makes the spans of attempts. It is safe for concurrent use.
type Spans struct{ tracer trace.Tracer }

// New returns Spans that the provider records. The provider must take its ids from [IDs], or the
// links of retries lead nowhere. version is that of the program.
func New(provider trace.TracerProvider, version string) *Spans {
	return &Spans{provider.Tracer("github.com/outbox-relay/outbox-relay", trace.WithInstrumentationVersion(version), trace.WithSchemaURL(semconv.SchemaURL))}
}

// Start begins the span of an attempt, and returns it with the trace context for its request. first
// says that no request was sent under the promise of this delivery. The caller ends the span with
// [End], or drops it if nothing was sent.
//
// The kind follows the conventions: a client's where the producer has made the trace context of the
// event, a producer's where this span makes it.
func (s *Spans) Start(m post.Message, first bool, to *url.URL) (span trace.Span, propagated post.TraceContext) {
	kind := trace.SpanKindClient
	parent := parentOf(m.Headers)
	ids := identifiers{traceID: parent.TraceID()}
	if !parent.IsValid() {
		kind, ids.traceID = trace.SpanKindProducer, traceIDOf(&m)
	}
	ids.spanID = firstAttempt(ids.traceID, &m)
	options := []trace.SpanStartOption{trace.WithSpanKind(kind), trace.WithAttributes(attributesOf(&m, to)...)}
	if !first {
		options = append(options, trace.WithLinks(ids.link()))
		ids.spanID = trace.SpanID{}
	}
	ctx := context.WithValue(trace.ContextWithRemoteSpanContext(context.Background(), parent), identifiersKey{}, ids)
	ctx, span = s.tracer.Start(ctx, "deliver "+m.Destination, options...)
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return span, post.TraceContext{Parent: carrier["traceparent"], State: carrier["tracestate"]}
}

// End ends the span of an attempt with what it came to. What the receiver wrote stays out of it, as
// does everything that may repeat a payload or a credential.
func End(span trace.Span, came policy.Decision, at time.Time) {
	if span.IsRecording() {
		span.SetAttributes(outcomeKey.String(string(came.Outcome)), reasonKey.String(string(came.Reason)))
		if came.StatusCode != 0 {
			span.SetAttributes(semconv.HTTPResponseStatusCode(came.StatusCode))
		}
		if came.Outcome != policy.Delivered {
			span.SetAttributes(semconv.ErrorTypeKey.String(string(came.Reason)))
			span.SetStatus(codes.Error, string(came.Reason))
		}
	}
	span.End(trace.WithTimestamp(at))
}

// attributesOf returns what is known of an attempt before it is made. Of the URL only host and port
// are shown.
func attributesOf(m *post.Message, to *url.URL) []attribute.KeyValue {
	host, _, _ := strings.Cut(to.Host, ",") // the URL of NATS may name several servers; any of them gets it
	server := url.URL{Host: host}
	all := []attribute.KeyValue{
		semconv.MessagingSystemKey.String(system),
		semconv.MessagingOperationName("deliver"),
		semconv.MessagingOperationTypeSend,
		semconv.MessagingDestinationName(m.Destination),
		semconv.MessagingMessageID(strconv.FormatInt(m.EventID, 10)),
		semconv.MessagingMessageBodySize(len(m.Payload)),
		semconv.ServerAddress(server.Hostname()),
		attemptKey.Int(m.Attempt),
	}
	if port, err := strconv.Atoi(server.Port()); err == nil {
		all = append(all, semconv.ServerPort(port))
	}
	if m.EventType != nil {
		all = append(all, eventTypeKey.String(*m.EventType))
	}
	if m.Replay {
		all = append(all, replayKey.Bool(true))
	}
	return all
}

// parentOf returns the producer's trace context; an invalid one when the event has none that can be
// read. encoding/json makes no difference between upper and lower case, nor do headers.
func parentOf(headers []byte) trace.SpanContext {
	if headers == nil {
		return trace.SpanContext{}
	}
	var own struct {
		TraceParent string `json:"traceparent"`
		TraceState  string `json:"tracestate"`
	}
	if json.Unmarshal(headers, &own) != nil {
		return trace.SpanContext{}
	}
	carrier := propagation.MapCarrier{"traceparent": own.TraceParent, "tracestate": own.TraceState}
	return trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
}
