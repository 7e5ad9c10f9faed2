package run

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/traces"
)

// tracesGrace is how long the last spans may take to reach the collector at a stop.
const tracesGrace = 2 * time.Second

// openTraces starts the export of spans, and returns what makes them; nil: they are off. end sends
// the last ones.
func openTraces(c *config.Config, version string, m monitor) (made *relay.Spans, end func()) {
	if c.Traces.Endpoint == nil {
		return nil, func() {}
	}
	t := traces.Open(traces.Config{
		Endpoint: c.Traces.Endpoint, Headers: c.Traces.Headers, SampleRatio: c.Traces.SampleRatio, IDs: relay.SpanIDs{},
		ServiceName: c.Traces.ServiceName, Version: version, Instance: c.Relay.Name, Log: c.Log, Counted: m.countSpans(),
	})
	return relay.NewSpans(t.Provider(), version), func() {
		ctx, cancel := context.WithTimeout(context.Background(), tracesGrace)
		defer cancel()
		t.Close(ctx)
	}
}
