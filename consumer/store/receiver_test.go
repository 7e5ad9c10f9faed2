package store_test

import (
	"context"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// newEnv starts one more receiver of the events in kept.
func newEnv(t testing.TB, kept store.Store, cfg store.Config, handler http.HandlerFunc) *receivertest.Env {
	t.Helper()
	f := receivertest.Flavour{Wrap: func(_ testing.TB, _ string, own consumer.Config) func(http.Handler) http.Handler {
		cfg := cfg
		cfg.Config = own
		return receivertest.Must(store.Middleware(kept, cfg))
	}}
	const none = "postgres://stranger@127.0.0.1:1/none"
	return receivertest.NewEnvAt(t, f, none, cfg.Config, func(*receivertest.Env) http.HandlerFunc { return handler })
}

const (
	// short is a lease whose end a test waits for. It demands nothing of what happens before.
	short = 300 * time.Millisecond
	hour  = time.Hour
)

// lasting is a configuration whose leases no test sees the end of: what becomes free was released.
func lasting() store.Config {
	return store.Config{Lease: hour, Config: consumer.Config{Limits: consumer.Limits{CommitTimeout: receivertest.Patience}}}
}

func created(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }

func TestFirstThenDuplicates(t *testing.T) {
	t.Parallel()
	kept, runs := newMapStore(), 0
	handler := func(w http.ResponseWriter, r *http.Request) {
		runs++
		w.Header().Set("X-Handler", "ran")
		status, _ := strconv.Atoi(r.Header.Get("Test-Status"))
		w.WriteHeader(status)
	}
	receivers := []*receivertest.Env{newEnv(t, kept, store.Config{}, handler), newEnv(t, kept, store.Config{}, handler)}
	for i, status := range []int{201, 204, 299} {
		key := strconv.Itoa(status)
		send := func(e *receivertest.Env, body string, result consumer.Result) receivertest.Response {
			t.Helper()
			got := e.Do(e.NewRequest(key, body, receivertest.With("Test-Status", key)))
			if report := e.WantResult(result); report.Event.IdempotencyKey != key || report.Err != nil {
				t.Errorf("report %+v", report)
			}
			return got
		}
		receivertest.WantFirst(t, send(receivers[0], "{}", consumer.ResultProcessed), status, "")
		for _, e := range receivers {
			again := send(e, "{}", consumer.ResultDuplicate)
			receivertest.WantReplayed(t, again, status, "")
			testkit.Equal(t, "header of the first answer", again.Header.Get("X-Handler"), "")
			receivertest.WantProblem(t, send(e, "{} ", consumer.ResultKeyReused), 422, "key-reused")
		}
		if runs != i+1 {
			t.Errorf("the handler ran %d times, want %d", runs, i+1)
		}
	}
}

// A failure is not remembered, and the event is free at once. What the handler did before it failed
// stays.
func TestFailureReleasesTheEvent(t *testing.T) {
	t.Parallel()
	var runs atomic.Int64
	ends := map[string]func(){
		"panics": func() { panic("boom") }, "aborts": func() { panic(http.ErrAbortHandler) }, "exits its goroutine": runtime.Goexit,
	}
	e := newEnv(t, newMapStore(), lasting(), func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		if status, err := strconv.Atoi(r.Header.Get("Test-End")); err == nil {
			w.WriteHeader(status)
		} else if end := ends[r.Header.Get("Test-End")]; end != nil {
			end()
		}
	})
	for end, want := range map[string]int{"300": 300, "404": 404, "503": 503, "599": 599, "panics": 500, "aborts": 0, "exits its goroutine": 0} {
		runs.Store(0)
		for range 2 {
			got, err := e.Try(e.NewRequest(end, "{}", receivertest.With("Test-End", end)))
			if got.Status != want || (err == nil) == (want == 0) {
				t.Errorf("%s: %d, %v", end, got.Status, err)
			}
			e.WantResult(consumer.ResultFailed)
		}
		receivertest.WantFirst(t, e.Do(e.NewRequest(end, "{}", receivertest.With("Test-End", "202"))), 202, "")
		e.WantResult(consumer.ResultProcessed)
		receivertest.WantReplayed(t, e.Post(end, "{}"), 202, "")
		e.WantResult(consumer.ResultDuplicate)
		if n := runs.Load(); n != 3 {
			t.Errorf("%s: the handler ran %d times, want 3", end, n)
		}
	}
}

// When the client has gone, the work is done all the same. Until then others are refused.
func TestClientGoes(t *testing.T) {
	t.Parallel()
	kept := newMapStore()
	running, finish := make(chan struct{}), make(chan struct{})
	e := newEnv(t, kept, lasting(), func(w http.ResponseWriter, r *http.Request) {
		close(running) // a second run would panic here
		<-r.Context().Done()
		<-finish
		w.WriteHeader(http.StatusCreated)
	})
	other := newEnv(t, kept, lasting(), created)
	ctx, cancel := context.WithCancel(t.Context())
	request := e.NewRequest("k", "{}").WithContext(ctx)
	var sending sync.WaitGroup
	sending.Go(func() {
		if _, err := e.Try(request); err == nil {
			t.Error("the request did not end with its client")
		}
	})
	<-running
	cancel()
	sending.Wait()
	receivertest.WantProblem(t, other.Post("k", "{}"), 409, "in-flight")
	other.WantResult(consumer.ResultInFlight)
	close(finish)
	e.WantResult(consumer.ResultProcessed)
	receivertest.WantReplayed(t, other.Post("k", "{}"), 201, "")
}

// The handler's context ends before its lease does.
func TestHandlersTime(t *testing.T) {
	t.Parallel()
	for _, lease := range []time.Duration{10 * time.Second, time.Minute} {
		asked := time.Now()
		e := newEnv(t, newMapStore(), store.Config{Lease: lease}, func(_ http.ResponseWriter, r *http.Request) {
			until, limited := r.Context().Deadline()
			if !limited || !until.After(asked) || !until.Before(time.Now().Add(lease)) {
				t.Errorf("asked at %v for %v, and the handler's time ends at %v (%v)", asked, lease, until, limited)
			}
		})
		receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
	}
}

// slow is a receiver whose handler holds on to the event k, beyond its lease, until it gets what
// to answer.
type slow struct {
	*receivertest.Env
	running chan struct{} // closed when the handler runs
	answer  chan int
}

func newSlow(t *testing.T, kept store.Store, cfg store.Config) *slow {
	s := &slow{running: make(chan struct{}), answer: make(chan int, 1)}
	s.Env = newEnv(t, kept, cfg, func(w http.ResponseWriter, _ *http.Request) {
		close(s.running) // a second run would panic here
		select {
		case status := <-s.answer:
			w.WriteHeader(status)
		case <-t.Context().Done(): // the test has failed
		}
	})
	return s
}

// hold sends the event until it is not in flight, and returns when the handler holds it.
func (s *slow) hold() <-chan receivertest.Response {
	s.T.Helper()
	answers := make(chan receivertest.Response, 1)
	go func() { answers <- takeOver(s.Env) }()
	select {
	case <-s.running:
	case got := <-answers:
		s.T.Fatalf("the handler did not run: %d %s", got.Status, got.Body)
	}
	return answers
}

// takeOver sends the event k until it is not in flight any more. A claim that comes back after its
// short lease is refused, too.
func takeOver(e *receivertest.Env) receivertest.Response {
	for {
		got, err := e.Try(e.NewRequest("k", "{}"))
		if err != nil || got.Status != http.StatusConflict && got.Status != http.StatusServiceUnavailable {
			return got
		}
		<-e.Reports // of many: only this reads them
	}
}

// When leases end, other requests take the event over, and the last one holds it. Neither of the
// late handlers may answer for it, whatever they do.
func TestHandlersOutliveTheirLeases(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusOK, http.StatusInternalServerError} {
		kept := newMapStore()
		one, two := newSlow(t, kept, store.Config{Lease: short}), newSlow(t, kept, store.Config{Lease: short})
		three, other := newSlow(t, kept, lasting()), newEnv(t, kept, lasting(), created)
		first := one.hold()
		second := two.hold()
		third := three.hold()
		for late, answer := range map[*slow]<-chan receivertest.Response{one: first, two: second} {
			late.answer <- status
			if got := <-answer; status == http.StatusOK {
				receivertest.WantProblem(t, got, 500, "lease-lost")
				if report := late.WantResult(consumer.ResultCommitFailed); report.Err == nil {
					t.Error("the report has no error")
				}
			} else {
				receivertest.WantFirst(t, got, status, "")
			}
			receivertest.WantProblem(t, other.Post("k", "{}"), 409, "in-flight")
		}
		three.answer <- http.StatusAccepted
		receivertest.WantFirst(t, <-third, http.StatusAccepted, "")
		receivertest.WantReplayed(t, other.Post("k", "{}"), http.StatusAccepted, "")
	}
}

// A lease that ended and was not taken over is as good as one that lasts. The effect has happened,
// and to forget it would be to repeat it.
func TestLateAndAlone(t *testing.T) {
	t.Parallel()
	kept := newMapStore()
	first := newSlow(t, kept, store.Config{Lease: short})
	answer := first.hold()
	// That the lease has ended shows when another claim gets the event. It is given back.
	fails := newEnv(t, kept, lasting(), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	receivertest.WantFirst(t, takeOver(fails), http.StatusBadGateway, "")
	first.answer <- http.StatusOK
	receivertest.WantFirst(t, <-answer, http.StatusOK, "")
	receivertest.WantReplayed(t, fails.Post("k", "{}"), http.StatusOK, "")
}

// A store cannot know what it has forgotten, so the middleware goes by the event's age.
func TestOlderThanTheMemory(t *testing.T) {
	t.Parallel()
	const ttl = time.Hour
	e := newEnv(t, newMapStore(), store.Config{TTL: ttl}, created)
	send := func(key string, ago time.Duration) receivertest.Response {
		return e.Do(e.NewRequest(key, "{}", receivertest.Created(time.Now().Add(-ago))))
	}
	receivertest.WantFirst(t, send("known", 0), 201, "")
	receivertest.WantFirst(t, send("young", ttl/2), 201, "")
	e.WantResult(consumer.ResultProcessed)
	e.WantResult(consumer.ResultProcessed)
	receivertest.WantProblem(t, send("old", 2*ttl), 422, "forgotten")
	e.WantResult(consumer.ResultForgotten)
	receivertest.WantFirst(t, send("old", 0), 201, "") // the refusal has left no claim behind
	receivertest.WantReplayed(t, send("known", 2*ttl), 201, "")

	over := receivertest.NotAfter(time.Now().Add(-ttl))
	receivertest.WantProblem(t, e.Do(e.NewRequest("over", "{}", over)), 422, "forgotten")
	receivertest.WantReplayed(t, e.Do(e.NewRequest("known", "{}", over)), 201, "")
}

// While it is unknown whether an event is known, its handler must not run. What needs no memory is
// refused as always.
func TestMemoryIsAway(t *testing.T) {
	t.Parallel()
	kept := newMapStore()
	e := newEnv(t, kept, store.Config{}, created)
	kept.stop(false)
	receivertest.WantProblem(t, e.Post("k", "{}"), 503, "database-unavailable")
	if report := e.WantResult(consumer.ResultUnavailable); report.Err == nil {
		t.Error("the report has no error")
	}
	for name, problem := range map[string]string{webhook.Signature: "signature-invalid", webhook.IdempotencyKey: "key-missing"} {
		r := e.NewRequest("k", "{}")
		r.Header.Del(name)
		receivertest.WantProblem(t, e.Do(r), map[string]int{"signature-invalid": 401, "key-missing": 400}[problem], problem)
		e.WantResult(consumer.ResultRejected)
	}
	kept.start()
	receivertest.WantFirst(t, e.Post("k", "{}"), 201, "")
}

// The handler has had its effect when the memory goes. The sender learns that it may not be
// remembered, and after the lease it happens again.
func TestMemoryGoesWhileAHandlerRuns(t *testing.T) {
	t.Parallel()
	kept := newMapStore()
	cfg := store.Config{Lease: short}
	cfg.Config.Limits.CommitTimeout = 200 * time.Millisecond
	s := newSlow(t, kept, cfg)
	answer := s.hold()
	kept.stop(false)
	s.answer <- http.StatusOK
	receivertest.WantProblem(t, <-answer, 500, "not-remembered")
	if report := s.WantResult(consumer.ResultCommitFailed); report.Err == nil {
		t.Error("the report has no error")
	}
	kept.start()
	receivertest.WantFirst(t, takeOver(newEnv(t, kept, lasting(), created)), 201, "")
}
