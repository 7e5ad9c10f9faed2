package traces

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/rs/zerolog"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// An export is Traces on their way to a handler, with what is counted and logged.
type export struct {
	*Traces
	url               string
	exported, dropped atomic.Int64
	log               testkit.Buffer
}

func newExport(t *testing.T, collector http.HandlerFunc) *export {
	t.Helper()
	server := httptest.NewServer(collector)
	t.Cleanup(server.Close)
	endpoint, err := url.Parse(server.URL + "/v1/traces")
	testkit.Must(t, err)
	e := &export{url: server.URL}
	e.Traces = Open(Config{
		Endpoint: endpoint, Headers: map[string]string{"X-Token": "hunter2"}, ServiceName: "relay", Version: "v1", Instance: "r1", SampleRatio: 1,
		IDs: relay.SpanIDs{}, Log: zerolog.New(&e.log), Counted: func(exported bool, spans int) {
			if exported {
				e.exported.Add(int64(spans))
			} else {
				e.dropped.Add(int64(spans))
			}
		},
	})
	e.client.firstWait = time.Millisecond
	return e
}

// end ends n spans.
func (e *export) end(n int) {
	tracer := e.Provider().Tracer("test")
	for range n {
		_, span := tracer.Start(context.Background(), "span")
		span.End()
	}
}

// flush exports what waits.
func (e *export) flush(t *testing.T) {
	t.Helper()
	testkit.Must(t, e.sdk.ForceFlush(t.Context()))
}

func (e *export) expect(t *testing.T, exported, dropped int64) {
	t.Helper()
	if e.exported.Load() != exported || e.dropped.Load() != dropped {
		t.Errorf("%d spans are exported and %d dropped, want %d and %d", e.exported.Load(), e.dropped.Load(), exported, dropped)
	}
}

func TestSpansReachTheCollector(t *testing.T) {
	t.Parallel()
	var data tracepb.TracesData
	e := newExport(t, func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || proto.Unmarshal(body, &data) != nil || r.Header.Get("X-Token") != "hunter2" || r.Header.Get("Content-Type") != "application/x-protobuf" {
			t.Errorf("%v: %v", r.Header, err)
		}
	})
	e.end(2)
	e.Close(t.Context())
	e.expect(t, 2, 0)
	resource := data.GetResourceSpans()[0]
	said := map[string]string{}
	for _, a := range resource.GetResource().GetAttributes() {
		said[a.GetKey()] = a.GetValue().GetStringValue()
	}
	if said["service.name"] != "relay" || said["service.version"] != "v1" || said["service.instance.id"] != "r1" || len(resource.GetScopeSpans()[0].GetSpans()) != 2 {
		t.Errorf("%v", &data)
	}
}

// A sender must not wait for the collector, nor may what waits for it grow.
func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	e := newExport(t, func(http.ResponseWriter, *http.Request) { <-release })
	e.end(queueSize + 100)
	e.expect(t, 0, 100)
	close(release)
	e.Close(t.Context())
	e.expect(t, queueSize, 100)
	e.end(1) // after the end: nothing waits, and nothing is sent
}

func TestUnavailableCollectorIsTriedAgain(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	e := newExport(t, func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	e.end(1)
	e.flush(t)
	e.Close(t.Context())
	e.expect(t, 1, 0)
	if text := e.log.String(); text != "" || requests.Load() != 3 {
		t.Errorf("%d requests, log: %s", requests.Load(), text)
	}
}

// However many batches are lost, the log has one line about it, and one when it is over.
func TestFailingCollectorIsLoggedOnce(t *testing.T) {
	t.Parallel()
	var fails atomic.Bool
	fails.Store(true)
	e := newExport(t, func(w http.ResponseWriter, r *http.Request) {
		if fails.Load() {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}
	})
	for range 3 {
		e.end(2)
		e.flush(t)
	}
	e.expect(t, 0, 6)
	fails.Store(false)
	for range 2 {
		e.end(1)
		e.flush(t)
	}
	e.Close(t.Context())
	e.expect(t, 2, 6)
	lines := strings.Split(strings.TrimSpace(e.log.String()), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], "it answered 307") || !strings.Contains(lines[0], "outbox_trace_spans_total") || !strings.Contains(lines[1], `"dropped":6`) {
		t.Errorf("%q", lines)
	}
	if strings.Contains(e.log.String(), "hunter2") || strings.Contains(e.log.String(), "/v1/traces") {
		t.Errorf("the log holds a credential, or a path: %s", e.log.String())
	}
}

// An ExportTraceServiceResponse with partial_success {rejected_spans: 2, error_message: "no"}.
func TestRefusedSpansAreDropped(t *testing.T) {
	t.Parallel()
	e := newExport(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("\x0a\x06\x08\x02\x12\x02no")) })
	e.end(5)
	e.Close(t.Context())
	e.expect(t, 3, 2)
	testkit.Contains(t, "found", e.log.String(), "it refused 2 of the spans")
	for _, answer := range []string{"", "{}", "\x0a", "\x0a\xff", "\x0a\x02\x08", "\x0a\x00", "\x0a\x04\x12\x02no", "\x0a\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"} {
		if n := rejectedSpans([]byte(answer)); n != 0 {
			t.Errorf("%q refuses %d spans, want none", answer, n)
		}
	}
}

// A collector that hangs holds up the end no longer than its caller allows.
func TestCloseDoesNotWaitForACollectorThatHangs(t *testing.T) {
	t.Parallel()
	release, begun := make(chan struct{}), make(chan struct{}, 10)
	e := newExport(t, func(http.ResponseWriter, *http.Request) {
		begun <- struct{}{}
		<-release
	})
	e.end(batchSize + 1) // a batch that hangs, and one behind it
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	e.Close(ctx)
	close(release)
	e.expect(t, 0, batchSize+1)
}

// The collector at the usual port of gRPC is the mistake that the log should name.
func TestPortOfGRPCIsExplained(t *testing.T) {
	t.Parallel()
	for endpoint, want := range map[string]bool{"http://collector:4317/v1/traces": true, "http://collector:4318/v1/traces": false} {
		u, err := url.Parse(endpoint)
		if err != nil || strings.Contains(grpcHint(u), "4318") != want {
			t.Errorf("%s: %q, %v", endpoint, grpcHint(u), err)
		}
	}
}

// At a stop nothing is tried again, however long the collector asks to wait.
func TestCloseTriesNothingAgain(t *testing.T) {
	t.Parallel()
	requests := make(chan struct{}, 10)
	e := newExport(t, func(w http.ResponseWriter, _ *http.Request) {
		requests <- struct{}{}
		w.Header().Set("Retry-After", "3600")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	e.end(batchSize)
	<-requests
	e.Close(t.Context())
	e.expect(t, 0, batchSize)
	testkit.Contains(t, "found", e.log.String(), "it answered 429")
}
