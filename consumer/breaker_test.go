package consumer_test

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// wantHeld asserts that an open breaker refused, and told to come back within the given seconds.
func wantHeld(t testing.TB, got receivertest.Response, least, most int) {
	t.Helper()
	if got.Status != http.StatusServiceUnavailable || !strings.Contains(got.Body, `"urn:outbox-relay:problem:dependency-unavailable"`) {
		t.Errorf("got %d %s, want 503 dependency-unavailable", got.Status, got.Body)
	}
	if after, err := strconv.Atoi(got.Header.Get("Retry-After")); err != nil || after < least || after > most {
		t.Errorf("Retry-After %q, want %d to %d", got.Header.Get("Retry-After"), least, most)
	}
}

// answering is a handler that takes effect and answers with the status of the day.
func answering(status *atomic.Int64) func(e *receivertest.Env) http.HandlerFunc {
	return func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
			w.WriteHeader(int(status.Load()))
		}
	}
}

func TestOpenBreakerAnswersAtOnce(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		var status atomic.Int64
		status.Store(http.StatusBadGateway)
		b := receivertest.Must(breaker.New(breaker.Config{Failures: 3, OpenFor: time.Hour}))
		e := receivertest.NewEnv(t, f, consumer.Config{Breaker: b}, answering(&status))
		for i := range 3 {
			if got := e.Post(fmt.Sprint("k", i), "{}"); got.Status != http.StatusBadGateway {
				t.Errorf("request %d got %d", i, got.Status)
			}
			e.WantResult(consumer.ResultFailed)
		}
		if got := b.State(); got != breaker.Open {
			t.Fatalf("the breaker is %s", got)
		}
		status.Store(http.StatusNoContent) // if the handler ran, it would succeed
		wantHeld(t, e.Post("k", "{}"), 3599, 4501)
		if report := e.WantResult(consumer.ResultBreakerOpen); report.Event.Key != "k" || report.HandlerDuration != 0 {
			t.Errorf("report %+v", report)
		}
		e.WantRows("k", 0, 0)

		// A sender without a signature learns nothing of it.
		forged := e.NewRequest("k", "{}")
		forged.Header.Set(webhook.Signature, "v1,AAAA")
		receivertest.WantProblem(t, e.Do(forged), 401, "signature-invalid")

		// Another middleware that depends on the same thing holds too, without touching its database: it has none.
		other := unreachable(t, f, consumer.Config{Breaker: b})
		wantHeld(t, other.Post("k", "{}"), 3599, 4501)
		other.WantResult(consumer.ResultBreakerOpen)
	})
}

func TestBreakerClosesAgain(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		var status atomic.Int64
		status.Store(http.StatusServiceUnavailable)
		b := receivertest.Must(breaker.New(breaker.Config{Failures: 2, OpenFor: 1, OpenMax: 1, Successes: 2})) // the wait is over at once
		e := receivertest.NewEnv(t, f, consumer.Config{Breaker: b}, answering(&status))
		want := func(key string, code int, state breaker.State) {
			t.Helper()
			if got := e.Post(key, "{}"); got.Status != code || b.State() != state {
				t.Errorf("%s got %d, the breaker is %s; want %d and %s", key, got.Status, b.State(), code, state)
			}
		}
		want("a", 503, breaker.Closed)
		want("a", 503, breaker.Open)
		want("a", 503, breaker.Open) // a probe
		status.Store(http.StatusInternalServerError)
		want("a", 500, breaker.HalfOpen) // proves nothing
		status.Store(http.StatusNoContent)
		want("a", 204, breaker.HalfOpen)
		want("a", 204, breaker.HalfOpen) // a duplicate proves nothing either
		want("b", 204, breaker.Closed)
		e.WantRows("a", 1, 1)
		e.WantRows("b", 1, 1)
	})
}
