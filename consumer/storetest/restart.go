package storetest

import (
	"context"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// whenBack sends an event until the memory answers: connections that broke take a request each to find out.
func (rc *receiver) whenBack(key string) response {
	rc.Helper()
	ctx, cancel := context.WithTimeout(rc.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		if got := rc.post(key, "{}"); got.status != http.StatusServiceUnavailable {
			return got
		}
		for len(rc.reports) > 0 {
			<-rc.reports
		}
	}
	rc.Fatal("the memory does not come back")
	return response{}
}

// While it is unknown whether an event is known, its handler must not run. What needs no memory is refused as always.
func memoryAway(w *world) {
	w.memory = w.subject.NewServer(w)
	rc := w.receiver(store.Config{}, w.works)
	w.wantFirst(rc.post("before", "{}"), 201, done("before"))
	rc.wantResult(consumer.ResultProcessed)
	w.memory.Stop()

	w.wantProblem(rc.post("during", "{}"), http.StatusServiceUnavailable, "database-unavailable")
	if report := rc.wantResult(consumer.ResultUnavailable); report.Err == nil {
		w.Error("the report has no error")
	}
	unsigned := rc.request("during", "{}")
	unsigned.Header.Del(webhook.Signature)
	w.wantProblem(rc.do(unsigned), http.StatusUnauthorized, "signature-invalid")
	rc.wantResult(consumer.ResultRejected)
	nameless := rc.request("during", "{}")
	nameless.Header.Del(webhook.IdempotencyKey)
	w.wantProblem(rc.do(nameless), http.StatusBadRequest, "key-missing")

	w.memory.Start()
	w.wantFirst(rc.whenBack("during"), 201, done("during"))
	w.wantEffects("during", 1, 1)
}

func memoryRestarts(w *world) {
	w.memory = w.subject.NewServer(w)
	rc := w.receiver(store.Config{}, w.works)
	w.wantFirst(rc.post("k", "{}"), 201, done("k"))
	w.memory.Stop()
	w.memory.Start()
	got := rc.whenBack("k")
	if !w.subject.Promises.SurvivesRestart {
		w.wantFirst(got, 201, done("k"))
		w.wantEffects("k", 2, 2)
		return
	}
	w.wantReplayed(got, 201)
	w.wantEffects("k", 1, 1)
}

// The handler has had its effect when the memory goes. Where both are one transaction nothing has happened; otherwise
// the effect is there, the sender is told that it may not be remembered, and after the lease it happens again.
func memoryGoesMeanwhile(w *world) {
	w.memory = w.subject.NewServer(w)
	s := w.slow(store.Config{Config: consumer.Config{CommitTimeout: time.Second}, Lease: short})
	answer := s.hold()
	w.memory.Stop()
	s.answer <- http.StatusOK
	if w.atomic() {
		w.wantProblem(<-answer, http.StatusInternalServerError, "commit-failed")
	} else {
		w.wantProblem(<-answer, http.StatusInternalServerError, "not-remembered")
	}
	if report := s.wantResult(consumer.ResultCommitFailed); report.Err == nil {
		w.Error("the report has no error")
	}
	w.memory.Start()
	other := w.receiver(store.Config{}, w.works)
	other.whenBack("another") // may still be refused while k is in flight, hence by another key
	w.wantFirst(other.takeOver(), 201, done("k"))
	w.wantEffects("k", 1, 2)
}

// A store that is back before the middleware gives up has lost nothing: the response is offered to it again.
func memoryRestartsMeanwhile(w *world) {
	w.memory = w.subject.NewServer(w)
	s := w.slow(store.Config{Lease: hour, TTL: 24 * hour})
	answer := s.hold()
	w.memory.Stop()
	w.memory.Start()
	s.answer <- http.StatusOK
	other := w.receiver(store.Config{}, w.works)
	if w.atomic() {
		w.wantProblem(<-answer, http.StatusInternalServerError, "commit-failed")
		w.wantFirst(other.whenBack("k"), 201, done("k"))
	} else {
		w.wantFirst(<-answer, http.StatusOK, "slow")
		w.wantReplayed(other.whenBack("k"), http.StatusOK)
	}
	w.wantEffects("k", 1, 1)
}
