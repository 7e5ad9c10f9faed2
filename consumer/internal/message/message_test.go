package message_test

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Logs keep names as they were written, and some programs write them in lower case. Two spellings
// of a name are a header that is repeated: receivers must see both, since a signature covers one.
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

// A receiver's answer is read as a relay reads it, and its problem is kept.
func TestDeliverReadsTheAnswer(t *testing.T) {
	t.Parallel()
	problem := func(status int, retryAfter string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", retryAfter)
			w.WriteHeader(http.StatusEarlyHints) // is no answer yet
			w.WriteHeader(status)
			w.WriteHeader(http.StatusTeapot) // comes too late
			_, _ = io.WriteString(w, `{"type":"urn:outbox-relay:problem:key-reused","detail":"another body"}`)
			w.(http.Flusher).Flush()
		}
	}
	stored := time.Now()
	for name, c := range map[string]struct {
		receive http.HandlerFunc
		want    message.Outcome
	}{
		"a body alone":      {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "done") }, message.Outcome{Verdict: message.Done, Status: 200}},
		"refused":           {problem(422, ""), message.Outcome{Verdict: message.Refused, Status: 422, Problem: "key-reused", Detail: "another body"}},
		"for later":         {problem(503, "60"), message.Outcome{Verdict: message.Again, Wait: time.Minute, Status: 503, Problem: "key-reused", Detail: "another body"}},
		"an answer of text": {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, strings.Repeat("x", 10_000), 500) }, message.Outcome{Verdict: message.Again, Status: 500}},
		"none":              {func(http.ResponseWriter, *http.Request) {}, message.Outcome{Verdict: message.Again}},
		"a panic":           {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, message.Outcome{Verdict: message.Again}},
		"a goroutine ends":  {func(http.ResponseWriter, *http.Request) { runtime.Goexit() }, message.Outcome{Verdict: message.Again}},
		"when it was stored": {func(w http.ResponseWriter, r *http.Request) {
			if at, ok := message.StoredAt(r.Context()); ok && at.Equal(stored) {
				w.WriteHeader(http.StatusNoContent)
			}
		}, message.Outcome{Verdict: message.Done, Status: 204}},
	} {
		testkit.Equal(t, name, message.Deliver(t.Context(), c.receive, message.Message{Stored: stored}), c.want)
	}
	if _, ok := message.StoredAt(t.Context()); ok {
		t.Error("a request that no log carried has a time at which it was stored")
	}
}

// A process that was frozen for a minute must not cost its partition another one, when it continues
// or dies.
func TestDelay(t *testing.T) {
	t.Parallel()
	schedule := []time.Duration{time.Second, 5 * time.Second, time.Minute}
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
		if got := c.out.Delay(c.failure, schedule); got != c.want {
			t.Errorf("%+v after failure %d: %v, want %v", c.out, c.failure, got, c.want)
		}
	}
}

func TestKeep(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		refused func() error
		kept    bool
		log     string
	}{
		"keeps":  {func() error { return nil }, true, ""},
		"fails":  {func() error { return errors.New("full") }, false, "reader: Config.Refused failed; again"},
		"panics": {func() error { panic("secret") }, false, "reader: Config.Refused panicked; again"},
		"exits":  {func() error { runtime.Goexit(); return nil }, false, "reader: Config.Refused failed; again"},
	} {
		var logged strings.Builder
		kept := message.Keep(t.Context(), slog.New(slog.NewTextHandler(&logged, nil)), "reader", "again", c.refused)
		if text := logged.String(); kept != c.kept || !strings.Contains(text, c.log) || strings.Contains(text, "secret") {
			t.Errorf("%s: %v, logged %s", name, kept, text)
		}
	}
}

func TestSchedule(t *testing.T) {
	t.Parallel()
	if all, err := message.Schedule("reader", nil); err != nil || len(all) != 4 {
		t.Errorf("by default: %v, %v", all, err)
	}
	if all, err := message.Schedule("reader", []time.Duration{time.Hour}); err != nil || len(all) != 1 {
		t.Errorf("an hour: %v, %v", all, err)
	}
	if _, err := message.Schedule("reader", []time.Duration{time.Hour, 0}); err == nil {
		t.Error("a delay of nothing was taken")
	}
}
