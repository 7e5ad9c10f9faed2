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
		breaker := consumer.NewBreaker(consumer.BreakerConfig{Failures: 3, OpenFor: time.Hour})
		e := newEnv(t, f, consumer.Config{Breaker: breaker}, answering(&status))
		for i := range 3 {
			if got := e.post(fmt.Sprint("k", i), "{}"); got.status != http.StatusBadGateway {
				t.Errorf("request %d got %d", i, got.status)
			}
			e.wantResult(consumer.ResultFailed)
		}
		if got := breaker.State(); got != consumer.BreakerOpen {
			t.Fatalf("the breaker is %s", got)
		}
		status.Store(http.StatusNoContent) // if the handler ran, it would succeed
		wantHeld(t, e.post("k", "{}"), 3599, 4501)
		if report := e.wantResult(consumer.ResultBreakerOpen); report.Event.Key != "k" || report.HandlerDuration != 0 {
			t.Errorf("report %+v", report)
		}
		e.wantRows("k", 0, 0)

		// Whoever cannot prove himself learns nothing of it.
		forged := e.newRequest("k", "{}")
		forged.Header.Set(webhook.Signature, "v1,AAAA")
		wantProblem(t, e.do(forged), 401, "signature-invalid")

		// Another middleware that depends on the same thing holds too, without touching its database: it has none.
		other := unreachable(t, f, consumer.Config{Breaker: breaker})
		wantHeld(t, other.post("k", "{}"), 3599, 4501)
		other.wantResult(consumer.ResultBreakerOpen)
	})
}

func TestDatabaseAwayOpensTheBreaker(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		breaker := consumer.NewBreaker(consumer.BreakerConfig{OpenFor: time.Hour})
		e := unreachable(t, f, consumer.Config{Breaker: breaker})
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
		breaker := consumer.NewBreaker(consumer.BreakerConfig{Failures: 2, OpenFor: 1, OpenMax: 1, Successes: 2}) // the wait is over at once
		e := newEnv(t, f, consumer.Config{Breaker: breaker}, answering(&status))
		want := func(key string, code int, state consumer.BreakerState) {
			t.Helper()
			if got := e.post(key, "{}"); got.status != code || breaker.State() != state {
				t.Errorf("%s got %d, the breaker is %s; want %d and %s", key, got.status, breaker.State(), code, state)
			}
		}
		want("a", 503, consumer.BreakerClosed)
		want("a", 503, consumer.BreakerOpen)
		want("a", 503, consumer.BreakerOpen) // a probe
		status.Store(http.StatusInternalServerError)
		want("a", 500, consumer.BreakerHalfOpen) // proves nothing
		status.Store(http.StatusNoContent)
		want("a", 204, consumer.BreakerHalfOpen)
		want("a", 204, consumer.BreakerHalfOpen) // a duplicate proves nothing either
		want("b", 204, consumer.BreakerClosed)
		e.wantRows("a", 1, 1)
		e.wantRows("b", 1, 1)
	})
}

func TestInvalidBreakerPanics(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]consumer.BreakerConfig{
		"BreakerConfig.Failures":                         {Failures: -1},
		"BreakerConfig.OpenFor":                          {OpenFor: -1},
		"BreakerConfig.OpenMax is negative":              {OpenMax: -1},
		"BreakerConfig.OpenMax is 1s, less than OpenFor": {OpenFor: time.Minute, OpenMax: time.Second},
		"BreakerConfig.Successes":                        {Successes: -1},
	} {
		func() {
			defer func() {
				if message, _ := recover().(string); !strings.Contains(message, want) {
					t.Errorf("panic %q, want one with %q", message, want)
				}
			}()
			consumer.NewBreaker(cfg)
		}()
	}
}
