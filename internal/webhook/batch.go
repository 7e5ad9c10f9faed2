package webhook

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// A batch is one request with many events; docs/wire.md, "Batches", has its contract. It has no
// X-Idempotency-Key: a receiver that does not know batches refuses it before it reads the body.
const (
	// Batch is on a batch: the number of its events. x1 covers it, so no batch passes for an event,
	// and no event for a batch.
	Batch = OutboxPrefix + "Batch"
	// BatchType is the Content-Type of a batch: one JSON object a line. A receiver that takes
	// batches names it in the header AcceptPost of its answers of 2xx.
	BatchType = "application/vnd.outbox-relay.batch+ndjson"
	// BatchResultType is the Content-Type of the answer to a batch: one JSON object a line.
	BatchResultType = "application/vnd.outbox-relay.batch-result+ndjson"
	// AcceptPost is the header by which a receiver names what it takes.
	AcceptPost = "Accept-Post"

	// MaxBatchEvents and MaxBatchBytes bound a batch, the latter its body.
	MaxBatchEvents = 1000
	MaxBatchBytes  = 256 << 10
)

// An Envelope is one event of a batch: a line of its body. Header is what its own request would
// have, without what the batch has.
type Envelope struct {
	Header map[string]string `json:"headers"`
	Body   []byte            `json:"body"` // base64: byte for byte, whatever it is
}

// A BatchResult is the answer to one event of a batch: a line of the answer.
type BatchResult struct {
	Key         string `json:"key"`
	Status      int    `json:"status"`
	RetryAfter  string `json:"retry_after,omitempty"`
	Replayed    bool   `json:"replayed,omitempty"` // as the header Idempotency-Replayed
	ContentType string `json:"content_type,omitempty"`
	Body        string `json:"body,omitempty"` // of a refusal, as far as it is short
}

// errBatch is what a body is refused for that is no batch.
var errBatch = errors.New("the body is not the batch that its header announces")

// SignBatch returns the headers by which a batch of events is signed, as [Signer.Sign] does for an
// event; covered holds Batch. Its id is no event's.
func (s *Signer) SignBatch(covered, body []byte, now time.Time) Signed {
	return s.sign("bat_"+rand.Text(), covered, body, now)
}

// IsBatch reports whether the headers are those of a batch. A request that is one by one header and
// none by another is refused later.
func IsBatch(header http.Header) bool {
	_, counted := header[Batch]
	return counted && header.Get(IdempotencyKey) == ""
}

// VerifyBatch is [Verify] for a batch, of which only x1 is accepted.
func VerifyBatch(header http.Header, body []byte, now time.Time, tolerance time.Duration, secrets ...Secret) error {
	switch _, err := Verify(header, body, now, tolerance, secrets...); {
	case errors.Is(err, ErrKeyUnbound): // x1 matches, and there is no key to be bound
		return nil
	case err != nil:
		return err
	}
	return ErrSignature // v1 alone does not cover the headers
}

// HasType reports whether the headers have a content type, whatever its parameters are.
func HasType(header http.Header, want string) bool {
	media, _, _ := mime.ParseMediaType(header.Get("Content-Type"))
	return media == want
}

// BatchSize returns how many events the headers of a batch announce, or an error for what is no
// batch that a receiver takes.
func BatchSize(header http.Header) (int, error) {
	count, ok := single(header, Batch)
	events, err := strconv.Atoi(count)
	if !ok || err != nil || events < 1 || events > MaxBatchEvents || !HasType(header, BatchType) {
		return 0, fmt.Errorf("the request is no batch of 1 to %d events with the content type %s", MaxBatchEvents, BatchType)
	}
	return events, nil
}

// ParseBatch returns the events of a batch. Header names are returned as net/http writes them.
func ParseBatch(body []byte, events int) ([]Envelope, error) {
	if events < 1 || events > MaxBatchEvents {
		return nil, errBatch
	}
	all := make([]Envelope, 0, min(events, len(body)/len(`{"headers":{}}`)+1))
	for line := range lines(body) {
		var e Envelope
		if len(all) == events || json.Unmarshal(line, &e) != nil {
			return nil, errBatch
		}
		canonical := make(map[string]string, len(e.Header))
		for name, value := range e.Header {
			name = http.CanonicalHeaderKey(name)
			if _, twice := canonical[name]; twice || strings.ContainsAny(value, "\r\n\x00") {
				return nil, errBatch
			}
			canonical[name] = value
		}
		e.Header = canonical
		all = append(all, e)
	}
	if len(all) != events {
		return nil, errBatch
	}
	return all, nil
}

// ParseBatchResults returns the answers in the answer to a batch, by their keys. What is no answer
// is left out, and so is a key that was answered twice: its event counts as not answered.
func ParseBatchResults(body []byte) map[string]BatchResult {
	all := map[string]BatchResult{}
	twice := map[string]bool{}
	for line := range lines(body) {
		var r BatchResult
		if json.Unmarshal(line, &r) != nil {
			continue
		}
		_, known := all[r.Key]
		twice[r.Key] = known
		all[r.Key] = r
	}
	for key, repeated := range twice {
		if repeated || all[key].Status < 200 || all[key].Status > 599 {
			delete(all, key)
		}
	}
	return all
}

// lines returns the lines of a text that are not empty.
func lines(text []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for line := range bytes.SplitSeq(text, []byte{'\n'}) {
			if len(line) > 0 && !yield(line) {
				return
			}
		}
	}
}

// AppendLine appends v as a line of a batch or of its answer.
func AppendLine(body []byte, v any) []byte {
	line, err := json.Marshal(v)
	if err != nil {
		panic(err) // an Envelope or a BatchResult always encodes
	}
	return append(append(body, line...), '\n')
}
