package storetest

import (
	"context"
	"net/http"
	"runtime"
	"strconv"
	"sync"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// A failure is not remembered, and the event is free at once. What the handler did before it failed is undone only where
// the effect is atomic.
func failingHandler(w *world) {
	rc := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, func(out http.ResponseWriter, r *http.Request) {
		w.effect(r)
		status, err := strconv.Atoi(r.Header.Get("Test-Status"))
		if err != nil {
			w.Error(err)
		}
		out.Header().Set("X-Handler", "ran")
		if status != 0 {
			out.WriteHeader(status)
		}
	})
	for range 2 { // no answer is not success: an error may be behind it
		w.wantProblem(rc.do(rc.request("none", "{}", with("Test-Status", "0"))), http.StatusInternalServerError, "no-answer")
		rc.wantResult(consumer.ResultFailed)
	}
	w.wantEffects("none", 0, 2)
	for _, status := range []int{300, 304, 400, 404, 409, 410, 422, 429, 500, 503, 599} {
		key := "k" + strconv.Itoa(status)
		for range 2 {
			got := rc.do(rc.request(key, "{}", with("Test-Status", strconv.Itoa(status))))
			if got.status != status || got.header.Get("X-Handler") != "ran" {
				w.Errorf("status %d %v, want %d", got.status, got.header, status)
			}
			rc.wantResult(consumer.ResultFailed)
		}
		w.wantEffects(key, 0, 2)
		w.wantFirst(rc.do(rc.request(key, "{}", with("Test-Status", "202"))), 202, "")
		rc.wantResult(consumer.ResultProcessed)
		w.wantReplayed(rc.post(key, "{}"), 202)
		rc.wantResult(consumer.ResultDuplicate)
		w.wantEffects(key, 1, 3)
	}
}

func handlerThatDoesNotReturn(w *world) {
	ends := map[string]func(){
		"panics":              func() { panic("boom") },
		"aborts":              func() { panic(http.ErrAbortHandler) },
		"exits its goroutine": runtime.Goexit,
	}
	rc := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, func(out http.ResponseWriter, r *http.Request) {
		w.effect(r)
		out.WriteHeader(http.StatusNoContent)
		if r.Header.Get("Test-End") != "" {
			ends[r.Header.Get("Test-End")]()
		}
	})
	for name := range ends {
		got, err := rc.try(rc.request(name, "{}", with("Test-End", name)))
		switch {
		case name == "panics" && err != nil:
			w.Error(err)
		case name == "panics":
			w.wantProblem(got, http.StatusInternalServerError, "handler-panicked")
		case err == nil:
			w.Errorf("%s: the client got %d", name, got.status)
		}
		if report := rc.wantResult(consumer.ResultFailed); report.Err == nil {
			w.Errorf("%s: the report has no error", name)
		}
		w.wantEffects(name, 0, 1)
		w.wantFirst(rc.post(name, "{}"), http.StatusNoContent, "")
		rc.wantResult(consumer.ResultProcessed)
		w.wantEffects(name, 1, 2)
	}
}

// When the client has gone, the work is done all the same, and its retry finds the response.
func clientGoes(w *world) {
	running, gone := make(chan struct{}), make(chan struct{})
	rc := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, func(out http.ResponseWriter, r *http.Request) {
		close(running) // a second run would panic here
		<-r.Context().Done()
		<-gone
		w.works(out, r.WithContext(context.WithoutCancel(r.Context())))
	})
	ctx, cancel := context.WithCancel(w.Context())
	request := rc.request("k", "{}").WithContext(ctx)
	var sending sync.WaitGroup
	sending.Go(func() {
		if _, err := rc.try(request); err == nil {
			w.Error("the request did not end with its client")
		}
	})
	<-running
	cancel()
	sending.Wait()
	w.wantProblem(rc.post("k", "{}"), http.StatusConflict, "in-flight")
	rc.wantResult(consumer.ResultInFlight)
	close(gone)
	rc.wantResult(consumer.ResultProcessed)
	w.wantReplayed(rc.post("k", "{}"), http.StatusCreated)
	w.wantEffects("k", 1, 1)
}
