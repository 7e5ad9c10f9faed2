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
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// wantHeld asserts that an open breaker refused, and told to come back within the given seconds.
func wantHeld(t testing.TB, got response, least, most int) {
	t.Helper()
	if got.status != http.StatusServiceUnavailable || !strings.Contains(got.body, `"urn:outbox-relay:problem:dependency-unavailable"`) {
		t.Errorf("got %d %s, want 503 dependency-unavailable", got.status, got.body)
	}
	if after, err := strconv.Atoi(got.header.Get("Retry-After")); err != nil || after < least || after > most {
		t.Errorf("Retry-After %q, want %d to %d", got.header.Get("Retry-After"), least, most)
	}
}

// answering is a handler that takes effect and answers with the status of the day.
func answering(status *atomic.Int64) func(e *env) http.HandlerFunc {
	return func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			effect(e)(discardWriter{}, r)
			w.WriteHeader(int(status.Load()))
		}
	}
}

func TestOpenBreakerAnswersAtOnce(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		var status atomic.Int64
		status.Store(http.StatusBadGateway)
		b := breaker.MustNew(breaker.Config{Failures: 3, OpenFor: time.Hour})
		e := newEnv(t, f, consumer.Config{Breaker: b}, answering(&status))
		for i := range 3 {
			if got := e.post(fmt.Sprint("k", i), "{}"); got.status != http.StatusBadGateway {
				t.Errorf("request %d got %d", i, got.status)
			}
			e.wantResult(consumer.ResultFailed)
		}
		if got := b.State(); got != breaker.Open {
			t.Fatalf("the breaker is %s", got)
		}
		status.Store(http.StatusNoContent) // if the handler ran, it would succeed
		wantHeld(t, e.post("k", "{}"), 3599, 4501)
		if report := e.wantResult(consumer.ResultBreakerOpen); report.Event.Key != "k" || report.HandlerDuration != 0 {
			t.Errorf("report %+v", report)
		}
		e.wantRows("k", 0, 0)

		// A sender without a signature learns nothing of it.
		forged := e.newRequest("k", "{}")
		forged.Header.Set(webhook.Signature, "v1,AAAA")
		wantProblem(t, e.do(forged), 401, "signature-invalid")

		// Another middleware that depends on the same thing holds too, without touching its database: it has none.
		other := unreachable(t, f, consumer.Config{Breaker: b})
		wantHeld(t, other.post("k", "{}"), 3599, 4501)
		other.wantResult(consumer.ResultBreakerOpen)
	})
}

func TestDatabaseAwayOpensTheBreaker(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		b := breaker.MustNew(breaker.Config{OpenFor: time.Hour})
		e := unreachable(t, f, consumer.Config{Breaker: b})
		for range 5 {
			wantProblem(t, e.post("k", "{}"), 503, "database-unavailable")
			e.wantResult(consumer.ResultUnavailable)
		}
		wantHeld(t, e.post("k", "{}"), 3599, 4501)
		e.wantResult(consumer.ResultBreakerOpen)
	})
}

func TestBreakerClosesAgain(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		var status atomic.Int64
		status.Store(http.StatusServiceUnavailable)
		b := breaker.MustNew(breaker.Config{Failures: 2, OpenFor: 1, OpenMax: 1, Successes: 2}) // the wait is over at once
		e := newEnv(t, f, consumer.Config{Breaker: b}, answering(&status))
		want := func(key string, code int, state breaker.State) {
			t.Helper()
			if got := e.post(key, "{}"); got.status != code || b.State() != state {
				t.Errorf("%s got %d, the breaker is %s; want %d and %s", key, got.status, b.State(), code, state)
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
		e.wantRows("a", 1, 1)
		e.wantRows("b", 1, 1)
	})
}
