package webhook

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// batchOf returns a signed batch with the headers that a receiver gets.
func batchOf(t testing.TB, secret Secret, at time.Time, body []byte, events int) http.Header {
	t.Helper()
	covered := AppendCovered(AppendCovered(nil, "X-Event-Tenant", "a"), Batch, strconv.Itoa(events))
	signed := NewSigner(secret).SignBatch(covered, body, at)
	return http.Header{
		"Content-Type": {BatchType}, "X-Event-Tenant": {"a"}, Batch: {strconv.Itoa(events)}, ID: {signed.ID}, Timestamp: {signed.Timestamp}, Signature: {signed.Signature},
	}
}

func TestVerifyBatch(t *testing.T) {
	t.Parallel()
	now, secret, body := time.Unix(vectorTime, 0), mustParse(t, vectorSecret), []byte(`{"headers":{},"body":""}`)
	for name, c := range map[string]struct {
		change func(http.Header)
		at     time.Time
		want   error
	}{
		"valid":           {at: now},
		"other count":     {at: now, change: func(h http.Header) { h.Set(Batch, "2") }, want: ErrSignature},
		"an added header": {at: now, change: func(h http.Header) { h.Set(EventType, "x") }, want: ErrSignature},
		"other tenant":    {at: now, change: func(h http.Header) { h.Set("X-Event-Tenant", "b") }, want: ErrSignature},
		"v1 alone": {at: now, change: func(h http.Header) {
			h.Set(Signature, strings.Fields(h.Get(Signature))[0])
		}, want: ErrSignature},
		"unsigned": {at: now, change: func(h http.Header) { h.Del(Signature) }, want: ErrUnsigned},
		"old":      {at: now.Add(time.Hour), want: ErrTooOld},
	} {
		h := batchOf(t, secret, now, body, 1)
		if c.change != nil {
			c.change(h)
		}
		if err := VerifyBatch(h, body, c.at, time.Minute, secret); err != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if c.want == nil { // a receiver of single requests must not take it for an event
			if _, err := Verify(h, body, c.at, time.Minute, secret); err != ErrKeyUnbound {
				t.Errorf("%s: as an event: %v, want %v", name, err, ErrKeyUnbound)
			}
		}
	}
	single := http.Header{IdempotencyKey: {"k"}}
	Sign(single, body, now, secret)
	if err := VerifyBatch(single, body, now, time.Minute, secret); err != ErrSignature || IsBatch(single) {
		t.Errorf("an event passes for a batch: %v", err)
	}
}

func TestParseBatchResults(t *testing.T) {
	t.Parallel()
	got := ParseBatchResults([]byte(`{"key":"a","status":204}
garbage
{"key":"b","status":204}
{"key":"b","status":500}
{"key":"c","status":99}
{"key":"d","status":422,"body":"why"}`))
	if len(got) != 2 || got["a"].Status != 204 || got["d"].Status != 422 || got["d"].Body != "why" {
		t.Errorf("got %v", got)
	}
}

// Whatever a body is, the parser returns as many events as were announced, or an error; what it
// returns, it reads again.
func FuzzParseBatch(f *testing.F) {
	f.Add([]byte(`{"headers":{"X-Idempotency-Key":"k"},"body":"e30="}`+"\n"), 1)
	f.Add([]byte(`{"headers":{"a":"1","A":"2"},"body":""}`), 1)
	f.Add([]byte("{}\n{}\n"), 2)
	f.Add([]byte("[]"), 1)
	f.Fuzz(func(t *testing.T, body []byte, events int) {
		all, err := ParseBatch(body, events)
		_ = ParseBatchResults(body)
		if err != nil {
			return
		}
		if len(all) != events {
			t.Fatalf("%d events, announced were %d", len(all), events)
		}
		var again []byte
		for _, e := range all {
			again = AppendLine(again, e)
		}
		reread, err := ParseBatch(again, events)
		testkit.Must(t, err)
		a, _ := json.Marshal(all)
		b, _ := json.Marshal(reread)
		if string(a) != string(b) {
			t.Fatalf("%s became %s", a, b)
		}
	})
}
