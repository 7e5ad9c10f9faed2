package spans

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// IDs gives spans their ids: those of [Spans] what follows from their delivery, all others random
// ones. It implements the SDK's IDGenerator, and is safe for concurrent use.
type IDs struct{}

// identifiers are those that a span must have. A zero one is random.
type identifiers struct {
	traceID trace.TraceID
	spanID  trace.SpanID
}

type identifiersKey struct{}

// NewIDs returns the ids of a span without a parent.
func (IDs) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	ids, _ := ctx.Value(identifiersKey{}).(identifiers)
	for !ids.traceID.IsValid() {
		binary.LittleEndian.PutUint64(ids.traceID[:8], rand.Uint64())
		binary.LittleEndian.PutUint64(ids.traceID[8:], rand.Uint64())
	}
	return ids.traceID, ids.random()
}

// NewSpanID returns the id of a span whose parent belongs to the given trace.
func (IDs) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	ids, _ := ctx.Value(identifiersKey{}).(identifiers)
	return ids.random()
}

// random returns the span's id, a random one if it may be any.
func (i identifiers) random() trace.SpanID {
	for !i.spanID.IsValid() {
		binary.LittleEndian.PutUint64(i.spanID[:], rand.Uint64())
	}
	return i.spanID
}

// link returns the link of a retry. Both attempts are sampled, or none: the decision follows from
// the producer's, or from the id of the trace.
func (i identifiers) link() trace.Link {
	return trace.Link{
		SpanContext: trace.NewSpanContext(trace.SpanContextConfig{TraceID: i.traceID, SpanID: i.spanID, TraceFlags: trace.FlagsSampled, Remote: true}),
		Attributes:  []attribute.KeyValue{linkKey.String("first_attempt")},
	}
}

// traceIDOf returns the trace of an event whose producer has begun none: the same for all its
// attempts and destinations. The key tells apart events of several databases with the same id.
func traceIDOf(m *post.Message) (id trace.TraceID) {
	var key string
	if m.Key != nil {
		key = *m.Key
	}
	copy(id[:], hash("trace", m.EventID, m.CreatedAt.Time.UnixMicro(), []byte(key)))
	return id
}

// firstAttempt returns the id of the span of the first attempt under the promise of a delivery.
func firstAttempt(in trace.TraceID, m *post.Message) (id trace.SpanID) {
	copy(id[:], hash("first attempt", m.EventID, m.NotAfter.UnixMicro(), append(in[:], m.Destination...)))
	return id
}

func hash(what string, event, at int64, rest []byte) []byte {
	text := append([]byte(what), 0)
	text = binary.BigEndian.AppendUint64(text, uint64(event))
	text = binary.BigEndian.AppendUint64(text, uint64(at))
	sum := sha256.Sum256(append(text, rest...))
	return sum[:]
}
