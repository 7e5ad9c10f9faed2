package promobserver_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/promobserver"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

func TestBreakerState(t *testing.T) {
	t.Parallel()
	quiet := slog.New(slog.DiscardHandler)
	b := must(breaker.New(breaker.Config{Failures: 1, OpenFor: time.Millisecond, Logger: quiet}))
	registry := prometheus.NewRegistry()
	registry.MustRegister(promobserver.Breaker("warehouse", b))
	if registry.Register(promobserver.Breaker("warehouse", b)) == nil {
		t.Error("two breakers have one name")
	}
	want := func(closed, open, halfOpen int) {
		t.Helper()
		err := testutil.GatherAndCompare(registry, strings.NewReader(`
			# HELP inbox_breaker_state What a receiver's breaker does with requests: 1 for the state it is in.
			# TYPE inbox_breaker_state gauge
			inbox_breaker_state{breaker="warehouse",state="closed"} `+strconv.Itoa(closed)+`
			inbox_breaker_state{breaker="warehouse",state="half_open"} `+strconv.Itoa(halfOpen)+`
			inbox_breaker_state{breaker="warehouse",state="open"} `+strconv.Itoa(open)+`
		`))
		if err != nil {
			t.Error(err)
		}
	}

	down := true
	receive := must(consumer.Middleware(pgtest.Pool(t, newDatabase(t)), consumer.Config{Receiver: "logistics", Secrets: []string{secretText}, Breaker: b, Logger: quiet}))
	server := httptest.NewServer(receive(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if down {
			down = false
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		want(0, 0, 1)
		w.WriteHeader(http.StatusNoContent)
	})))
	t.Cleanup(server.Close)

	want(1, 0, 0)
	if status := post(t, server.URL, "k", "invoice.paid", secretText); status != http.StatusServiceUnavailable {
		t.Fatalf("answered %d", status)
	}
	want(0, 1, 0)
	for deadline := time.Now().Add(30 * time.Second); ; {
		status := post(t, server.URL, "k", "invoice.paid", secretText)
		if status == http.StatusNoContent {
			break
		}
		if status != http.StatusServiceUnavailable || time.Now().After(deadline) {
			t.Fatalf("answered %d", status)
		}
	}
	want(1, 0, 0)
}

func TestBreakerMistakes(t *testing.T) {
	t.Parallel()
	for what, call := range map[string]func(){
		"no name":    func() { promobserver.Breaker("", must(breaker.New(breaker.Config{}))) },
		"no breaker": func() { promobserver.Breaker("warehouse", nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: accepted", what)
				}
			}()
			call()
		}()
	}
}
