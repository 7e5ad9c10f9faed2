package message_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
)

// Logs keep names as they were written, and some programs write them in lower case. Two spellings of a name are a header that is
// repeated: receivers must see both, since a signature covers one.
func TestHeadersHaveTheNamesOfHTTP(t *testing.T) {
	t.Parallel()
	var got http.Header
	out := message.Deliver(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header
		w.WriteHeader(http.StatusNoContent)
	}), message.Message{Header: http.Header{"x-idempotency-key": {"a"}, "X-Idempotency-Key": {"b"}, "ce-id": {"c"}}})
	if out.Verdict != message.Done || len(got.Values("X-Idempotency-Key")) != 2 || got.Get("Ce-Id") != "c" {
		t.Errorf("verdict %v, headers %v", out.Verdict, got)
	}
}

// A process that was frozen for a minute must not cost its partition another one, when it goes on or dies.
func TestDelay(t *testing.T) {
	t.Parallel()
	backoff := []time.Duration{time.Second, 5 * time.Second, time.Minute}
	for _, c := range []struct {
		out     message.Outcome
		failure int
		want    time.Duration
	}{
		{message.Outcome{Status: 500}, 1, time.Second},
		{message.Outcome{Status: 500}, 2, 5 * time.Second},
		{message.Outcome{Status: 500}, 9, time.Minute},
		{message.Outcome{Status: 503, Wait: time.Hour}, 1, time.Hour},
		{message.Outcome{Status: 409, Problem: "in-flight", Wait: time.Second}, 9, time.Second},
		{message.Outcome{Status: 409, Problem: "of-the-handler"}, 9, time.Minute},
	} {
		if got := c.out.Delay(c.failure, backoff); got != c.want {
			t.Errorf("%+v after failure %d: %v, want %v", c.out, c.failure, got, c.want)
		}
	}
}
