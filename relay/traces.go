package relay

import (
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/relay/spans"
)

// Spans makes the spans of attempts.
type Spans = spans.Spans

// SpanIDs makes the ids of spans. It implements the IDGenerator of OpenTelemetry's SDK.
type SpanIDs = spans.IDs

// NewSpans returns Spans that the provider records. The provider must take its ids from [SpanIDs], or the links of retries
// lead nowhere. version is that of the program.
func NewSpans(provider trace.TracerProvider, version string) *Spans {
	return spans.New(provider, version)
}
