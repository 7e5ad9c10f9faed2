package traces

import (
	"context"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// Config says where spans go, and which.
type Config struct {
	// Endpoint is the URL that batches are POSTed to.
	Endpoint *url.URL
	// Headers of every request, such as a credential. They appear in no log.
	Headers map[string]string
	// ServiceName is the resource's service.name, Version its service.version, and Instance its
	// service.instance.id.
	ServiceName, Version, Instance string
	// SampleRatio is the share of the traces without a parent that are recorded, 0 to 1. With a
	// parent, its flag decides.
	SampleRatio float64
	// IDs gives spans their ids.
	IDs sdk.IDGenerator
	// Log for a collector that does not answer.
	Log zerolog.Logger
	// Counted follows spans that were exported, or dropped. It must be safe for concurrent use, and
	// return at once. May be nil.
	Counted func(exported bool, spans int)
}

// Bounds of what waits for the collector, in spans.
const (
	queueSize = 2048
	batchSize = 512
)

const (
	// batchAge is how long a span may wait for others.
	batchAge = 2 * time.Second
	// exportTimeout bounds the attempts to send one batch.
	exportTimeout = 15 * time.Second
)

// Traces records spans and exports them. It is safe for concurrent use.
type Traces struct {
	sdk      *sdk.TracerProvider
	client   *client
	exporter *exporter
}

// Open returns Traces, which export until Close is called.
func Open(cfg Config) *Traces {
	if cfg.Counted == nil {
		cfg.Counted = func(bool, int) {}
	}
	sender := newClient(&cfg)
	encoder, _ := otlptrace.New(context.Background(), sender) // whose only error is that of sender.Start
	e := &exporter{to: encoder, cfg: &cfg}
	// What OTEL_RESOURCE_ATTRIBUTES names comes beside this; the SDK adds it.
	about := resource.NewWithAttributes(semconv.SchemaURL, attributes(&cfg)...)
	batches := sdk.NewBatchSpanProcessor(e, sdk.WithMaxQueueSize(queueSize), sdk.WithMaxExportBatchSize(batchSize),
		sdk.WithBatchTimeout(batchAge), sdk.WithExportTimeout(exportTimeout))
	return &Traces{client: sender, exporter: e, sdk: sdk.NewTracerProvider(
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(cfg.SampleRatio))), sdk.WithIDGenerator(cfg.IDs),
		sdk.WithResource(about), sdk.WithSpanProcessor(&queue{SpanProcessor: batches, exporter: e}),
	)}
}

func attributes(cfg *Config) []attribute.KeyValue {
	return []attribute.KeyValue{semconv.ServiceName(cfg.ServiceName), semconv.ServiceVersion(cfg.Version), semconv.ServiceInstanceID(cfg.Instance)}
}

// Provider returns what makes tracers.
func (t *Traces) Provider() trace.TracerProvider { return t.sdk }

// Close exports what waits, and ends. Once ctx is done, the rest is dropped.
func (t *Traces) Close(ctx context.Context) {
	t.client.hurry() // what fails now is not tried again
	stop := context.AfterFunc(ctx, t.client.abort)
	_ = t.sdk.Shutdown(context.WithoutCancel(ctx)) // with a context that is done it would do nothing
	stop()
	t.client.abort()
}

// queue passes spans on to the SDK's queue while that has room. The SDK would drop the others
// without a word.
type queue struct {
	sdk.SpanProcessor
	exporter *exporter
}

// OnEnd implements [sdk.SpanProcessor].
func (q *queue) OnEnd(s sdk.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	if q.exporter.waiting.Add(1) > queueSize {
		q.exporter.waiting.Add(-1)
		q.exporter.cfg.Counted(false, 1)
		return
	}
	q.SpanProcessor.OnEnd(s)
}

// exporter counts what becomes of spans. It keeps errors from the SDK, which would write each of
// them to the standard error.
type exporter struct {
	to      sdk.SpanExporter
	cfg     *Config
	waiting atomic.Int64 // spans between their end and the collector
	failing bool         // the last batch was not taken; the SDK exports one at a time
	dropped int          // since the collector took the last one
}

// ExportSpans implements [sdk.SpanExporter].
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	defer e.waiting.Add(-int64(len(spans)))
	err := e.to.ExportSpans(ctx, spans)
	refused := refusedBy(err)
	if refused < 0 { // all of them
		refused = len(spans)
	}
	if n := len(spans) - refused; n > 0 {
		e.cfg.Counted(true, n)
	}
	if refused > 0 {
		e.cfg.Counted(false, refused)
	}
	switch failing := err != nil; {
	case failing && !e.failing:
		e.cfg.Log.Warn().Str("endpoint", e.cfg.Endpoint.Host).Str("error", reason(err)).
			Msg("traces: the collector does not take spans, which are dropped until it does; outbox_trace_spans_total counts them" + grpcHint(e.cfg.Endpoint))
	case !failing && e.failing:
		e.cfg.Log.Info().Str("endpoint", e.cfg.Endpoint.Host).Int("dropped", e.dropped).Msg("traces: the collector takes spans again")
		e.dropped = 0
	}
	e.dropped += refused
	e.failing = err != nil
	return nil
}

// Shutdown implements [sdk.SpanExporter].
func (e *exporter) Shutdown(ctx context.Context) error { return e.to.Shutdown(ctx) }

// grpcHint explains the mistake that is made most often.
func grpcHint(endpoint *url.URL) string {
	if endpoint.Port() == "4317" {
		return "; port 4317 is usually that of gRPC, and 4318 that of HTTP, which the relay speaks"
	}
	return ""
}
