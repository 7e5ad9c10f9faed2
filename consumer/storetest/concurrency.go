package storetest

import (
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The duplicate must be answered while the first request still holds the event: only then did it not wait.
func inFlight(w *world) {
	running, finished := make(chan struct{}), make(chan struct{})
	finish := sync.OnceFunc(func() { close(finished) })
	w.Cleanup(finish)
	handler := func(out http.ResponseWriter, r *http.Request) {
		close(running) // a second run would panic here
		<-finished
		w.works(out, r)
	}
	one := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, handler)
	two := w.receiver(store.Config{Lease: hour, TTL: 24 * hour}, handler)
	first := one.begin(one.request("k", "{}"))
	<-running
	for _, rc := range []*receiver{one, two} {
		w.wantProblem(rc.post("k", "{}"), http.StatusConflict, "in-flight")
		rc.wantResult(consumer.ResultInFlight)
	}
	select {
	case <-first:
		w.Error("the first request had ended: nothing was in flight")
	default:
	}
	finish()
	w.wantFirst(<-first, 201, done("k"))
	w.wantReplayed(two.post("k", "{}"), 201)
	w.wantEffects("k", 1, 1)
}

// storm sends one event fifty times at once to two receivers, and returns what was answered how often.
func (w *world) storm(handler http.HandlerFunc) (tally map[string]int) {
	const clients = 50
	cfg := store.Config{Lease: hour, TTL: 24 * hour}
	receivers := []*receiver{w.receiver(cfg, handler), w.receiver(cfg, handler)}
	start, answers := make(chan struct{}), make(chan response, clients)
	var sending sync.WaitGroup
	for i := range clients {
		rc := receivers[i%len(receivers)]
		request := rc.request("k", "{}")
		sending.Go(func() {
			<-start
			got, err := rc.try(request)
			if err != nil {
				w.Error(err)
			}
			answers <- got
		})
	}
	close(start)
	sending.Wait()
	close(answers)
	tally = map[string]int{}
	for got := range answers {
		tally[strconv.Itoa(got.status)+got.header.Get(webhook.Replayed)]++
	}
	if total := tally["201"] + tally["201true"] + tally["409"] + tally["500"]; total != clients {
		w.Errorf("answers %v", tally)
	}
	return tally
}

func fiftyAtOnce(w *world) {
	var runs atomic.Int64
	tally := w.storm(func(out http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		w.works(out, r)
	})
	if tally["201"] != 1 || tally["500"] != 0 || runs.Load() != 1 {
		w.Errorf("the handler ran %d times, answers %v", runs.Load(), tally)
	}
	w.wantEffects("k", 1, 1)
}

// Each failure frees the event for one of the others, never for two.
func fiftyAtOnceFailing(w *world) {
	var runs, running atomic.Int64
	tally := w.storm(func(out http.ResponseWriter, r *http.Request) {
		if n := running.Add(1); n > 1 {
			w.Errorf("%d handlers of one event run at once", n)
		}
		defer running.Add(-1)
		if runs.Add(1) <= 3 {
			out.WriteHeader(http.StatusInternalServerError)
			return
		}
		w.works(out, r)
	})
	// How many of the fifty came after the failures is chance; that they ran one by one is not.
	ran := int(runs.Load())
	succeeded := max(0, ran-3)
	if succeeded > 1 || tally["201"] != succeeded || tally["500"] != min(ran, 3) {
		w.Errorf("the handler ran %d times, answers %v", ran, tally)
	}
	w.wantEffects("k", succeeded, succeeded)
}
