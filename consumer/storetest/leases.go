package storetest

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
)

const (
	// short is a lease whose end a test waits for. It demands nothing of what happens before.
	short = 300 * time.Millisecond
	// hour is a lease that no test sees the end of: what becomes free under it was released.
	hour = time.Hour
)

func handlersTime(w *world) {
	const lease = time.Minute
	asked := time.Now()
	rc := w.receiver(store.Config{Lease: lease}, func(out http.ResponseWriter, r *http.Request) {
		out.WriteHeader(http.StatusNoContent)
		until, limited := r.Context().Deadline()
		switch { // by HandlerTimeout, or the lease if that is shorter
		case !limited || !until.After(asked):
			w.Errorf("asked at %v for %v, and the handler's time ends at %v (%v)", asked, lease, until, limited)
		case !until.Before(time.Now().Add(lease)):
			w.Errorf("the handler may run until %v, past its lease of %v", until, lease)
		}
	})
	w.wantFirst(rc.post("k", "{}"), 204, "")
}

// slow is a receiver whose handler holds on to the event k, beyond its lease, until it is told what to answer.
type slow struct {
	*receiver
	running chan struct{} // closed when the handler runs
	answer  chan int
}

func (w *world) slow(cfg store.Config) *slow {
	s := &slow{running: make(chan struct{}), answer: make(chan int, 1)}
	s.receiver = w.receiver(cfg, func(out http.ResponseWriter, r *http.Request) {
		w.effect(r)
		close(s.running) // a second run would panic here
		select {
		case status := <-s.answer:
			out.WriteHeader(status)
			write(out, "slow")
		case <-w.Context().Done(): // the test has failed
		}
	})
	return s
}

// hold sends the event until it is not in flight, and returns when the handler holds it.
func (s *slow) hold() (answer <-chan response) {
	s.Helper()
	answers := make(chan response, 1)
	var sending sync.WaitGroup
	sending.Go(func() { answers <- s.takeOver() })
	s.Cleanup(sending.Wait)
	select {
	case <-s.running:
	case got := <-answers:
		s.Fatalf("the handler did not run: %d %s", got.status, got.body)
	}
	return answers
}

// takeOver sends the event k until it is not in flight any more. A claim that comes back after its short lease is refused, too.
func (rc *receiver) takeOver() response {
	ctx, cancel := context.WithTimeout(rc.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		got, err := rc.try(rc.request("k", "{}"))
		refused := consumer.ResultInFlight
		if got.status == http.StatusServiceUnavailable {
			refused = consumer.ResultUnavailable
		}
		if err != nil || got.status != http.StatusConflict && refused != consumer.ResultUnavailable {
			return got
		}
		rc.wantResult(refused) // of many: only this reads them
	}
	return response{body: "the event stays in flight"}
}

// Where a lease ends, another request takes the event over, and the handler that outlived it has worked in vain: its
// effect stays, and it is the other's response that counts. Without leases no request takes over.
func handlerOutlivesLease(w *world) {
	first := w.slow(store.Config{Lease: short})
	other := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, w.works)
	answer := first.hold()
	if w.atomic() {
		for range 10 { // however often it is asked
			w.wantProblem(other.post("k", "{}"), http.StatusConflict, "in-flight")
		}
		first.answer <- http.StatusOK
		w.wantFirst(<-answer, http.StatusOK, "slow")
		w.wantReplayed(other.post("k", "{}"), http.StatusOK)
		w.wantEffects("k", 1, 0)
		return
	}
	w.wantFirst(other.takeOver(), http.StatusCreated, done("k"))
	first.answer <- http.StatusOK
	w.wantProblem(<-answer, http.StatusInternalServerError, "lease-lost")
	if report := first.wantResult(consumer.ResultCommitFailed); report.Err == nil {
		w.Error("the report has no error")
	}
	w.wantReplayed(other.post("k", "{}"), http.StatusCreated)
	w.wantEffects("k", 0, 2) // the price of a handler that does not obey its context
}

// Two handlers have outlived their leases, one after the other, and a third holds the event. Neither of the late ones may
// answer for it, whatever they do.
func lateFinishers(w *world, status int) {
	one, two := w.slow(store.Config{Lease: short}), w.slow(store.Config{Lease: short})
	three := w.slow(store.Config{Lease: hour, TTL: 24 * hour})
	other := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, w.works)
	first := one.hold()
	if w.atomic() {
		w.wantProblem(other.post("k", "{}"), http.StatusConflict, "in-flight")
		one.answer <- status
		w.wantFirst(<-first, status, "slow")
		got := other.post("k", "{}")
		if status == http.StatusOK {
			w.wantReplayed(got, status)
		} else {
			w.wantFirst(got, http.StatusCreated, done("k"))
		}
		w.wantEffects("k", 1, 0)
		return
	}
	second := two.hold()
	third := three.hold()
	for late, answer := range map[*slow]<-chan response{one: first, two: second} {
		late.answer <- status
		if got := <-answer; status == http.StatusOK {
			w.wantProblem(got, http.StatusInternalServerError, "lease-lost")
		} else {
			w.wantFirst(got, status, "slow")
		}
		w.wantProblem(other.post("k", "{}"), http.StatusConflict, "in-flight")
	}
	three.answer <- http.StatusAccepted
	w.wantFirst(<-third, http.StatusAccepted, "slow")
	w.wantReplayed(other.post("k", "{}"), http.StatusAccepted)
	w.wantEffects("k", 0, 3)
}

func lateSuccess(w *world) { lateFinishers(w, http.StatusOK) }

func lateFailure(w *world) { lateFinishers(w, http.StatusInternalServerError) }

// A lease that ended and was not taken over is as good as one that lasts: the effect has happened, and to forget
// it would be to repeat it.
func lateAlone(w *world) {
	first := w.slow(store.Config{Lease: short})
	answer := first.hold()
	if !w.atomic() {
		// That the lease has ended shows when another claim gets the event. It is given back.
		fails := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, func(out http.ResponseWriter, _ *http.Request) {
			out.WriteHeader(http.StatusBadGateway)
		})
		w.wantFirst(fails.takeOver(), http.StatusBadGateway, "")
	}
	first.answer <- http.StatusOK
	w.wantFirst(<-answer, http.StatusOK, "slow")
	w.wantReplayed(w.receiver(store.Config{}, w.works).post("k", "{}"), http.StatusOK)
	w.wantEffects("k", 1, 1)
}
