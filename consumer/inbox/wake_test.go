package inbox_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// listening waits until n inboxes listen for notifications.
func (p *inboxProcess) listening(n int) {
	p.T.Helper()
	p.Await("SELECT count(*) = $1 FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN inbox_wake' AND state = 'idle'", n)
}

// A process that only records wakes one that only works; there is no polling here.
func TestInboxWakesOtherProcesses(t *testing.T) {
	t.Parallel()
	recorder := newInbox(t, inbox.Config{})
	worker := recorder.again(inbox.Config{PollInterval: never})
	worker.run()
	worker.listening(1)
	for i := range 5 {
		recorder.record(fmt.Sprint(i))
		worker.wantWorked(fmt.Sprint(i), consumer.ResultProcessed)
	}
	// An event of another source wakes no worker, and is not touched.
	stranger := recorder.again(inbox.Config{Config: consumer.Config{Receiver: "test", Source: "stranger"}})
	stranger.record("s")
	recorder.record("last")
	worker.wantWorked("last", consumer.ResultProcessed)
	stranger.wantState("s", inbox.StatePending, 0)
}

// A process whose workers are all busy wakes another one.
func TestInboxPassesOnWhatItCannotWork(t *testing.T) {
	t.Parallel()
	g := newGate()
	busy := newInbox(t, inbox.Config{Handle: g.handle, Workers: 1, PollInterval: never})
	busy.run()
	busy.record("first")
	g.wantEntered(t, "first")
	free := busy.again(inbox.Config{PollInterval: never})
	free.run()
	free.listening(2)
	busy.record("second")
	free.wantWorked("second", consumer.ResultProcessed)
	g.through <- nil
}

// Whatever its connection, the inbox hears again.
func TestInboxListensAgain(t *testing.T) {
	t.Parallel()
	recorder := newInbox(t, inbox.Config{})
	worker := recorder.again(inbox.Config{PollInterval: never})
	worker.run()
	for i := range 3 {
		worker.listening(1)
		recorder.MustExec("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN inbox_wake'")
		recorder.record(fmt.Sprint(i)) // no process listens now: it is found when one listens again
		worker.wantWorked(fmt.Sprint(i), consumer.ResultProcessed)
	}
	if n := strings.Count(worker.Logged.String(), "cannot listen"); n != 3 {
		t.Errorf("logged %d outages, want 3", n)
	}
}

// All connections of a process are lost at once, and again; the log tells of each outage once.
func TestInboxOutlivesItsDatabase(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{PollInterval: 10 * time.Millisecond})
	p.run()
	for i := range 3 {
		p.MustExec("ALTER TABLE inbox_events RENAME TO gone")
		p.MustExec("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
		p.awaitLog("cannot reach its database", i+1)
		p.own.Reset() // each idle connection that is dead by now would be its own outage
		p.MustExec("ALTER TABLE gone RENAME TO inbox_events")
		p.awaitLog("has its database back", i+1)
		p.record(fmt.Sprint(i))
		p.wantWorked(fmt.Sprint(i), consumer.ResultProcessed)
	}
	if n := strings.Count(p.Logged.String(), "cannot reach its database"); n != 3 {
		t.Errorf("logged %d outages, want 3:\n%s", n, p.Logged)
	}
}

// awaitLog waits until the log says something for the nth time.
func (p *inboxProcess) awaitLog(text string, n int) {
	p.T.Helper()
	for strings.Count(p.Logged.String(), text) < n {
		p.Await("SELECT true") // yields, and ends with the test
	}
}

// A pool that the application has emptied delays the inbox, and does not lose or fail anything.
func TestInboxSharesAPoolThatIsEmpty(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for i := range 10 {
		p.record(fmt.Sprint(i))
	}
	small := p.again(inbox.Config{})
	small.own = receivertest.PoolOf(t, p.DSN, 3)
	small.openOn(small.own, inbox.Config{})
	var held []interface{ Release() }
	for range 3 {
		conn, err := small.own.Acquire(t.Context())
		pgtest.Must(t, err)
		held = append(held, conn)
	}
	small.run()
	held[0].Release() // one is enough
	small.Await("SELECT count(*) = 10 FROM inbox_events WHERE processing_state = 'succeeded' AND attempts = 1 AND interruptions = 0")
	held[1].Release()
	held[2].Release()
}

func TestInboxLimitsTypes(t *testing.T) {
	t.Parallel()
	var running, most atomic.Int32
	g := newGate()
	handle := func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.Type != "report.requested" {
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		}
		n := running.Add(1)
		defer running.Add(-1)
		for {
			if m := most.Load(); n <= m || most.CompareAndSwap(m, n) {
				break
			}
		}
		return g.handle(ctx, tx, event)
	}
	p := newInbox(t, inbox.Config{Handle: handle, Workers: 6, TypeWorkers: map[string]int{"report.requested": 2}, PollInterval: never})
	report := receivertest.With(webhook.EventType, "report.requested")
	for i := range 8 {
		p.record(fmt.Sprint("report ", i), report)
	}
	for i := range 8 {
		p.record(fmt.Sprint("other ", i)) // younger, and of a type that comes first: neither may matter
		p.record(fmt.Sprint("last ", i), receivertest.With(webhook.EventType, "zzz"))
	}
	p.run()
	<-g.entered
	<-g.entered
	p.Await("SELECT count(*) = 16 FROM inbox_events WHERE processing_state = 'succeeded'") // while reports are at their limit
	p.record("while they wait")
	p.awaitState("while they wait", inbox.StateSucceeded)
	for range 6 {
		g.through <- nil
		<-g.entered
	}
	g.through <- nil
	g.through <- nil
	p.Await("SELECT count(*) = 25 FROM inbox_events WHERE processing_state = 'succeeded'")
	testkit.Equal(t, "reports at once", most.Load(), 2)
}

// A type with a great backlog does not keep others waiting behind it.
func TestInboxTypesTakeTurns(t *testing.T) {
	t.Parallel()
	order := make(chan string, 100)
	p := newInbox(t, inbox.Config{Workers: 1, Handle: func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
		order <- event.Type
		return nil
	}})
	for i := range 9 {
		p.record(fmt.Sprint("a", i), receivertest.With(webhook.EventType, "a"))
	}
	p.record("b", receivertest.With(webhook.EventType, "b"))
	p.record("c", receivertest.With(webhook.EventType, "c"))
	p.run()
	got := <-order + <-order + <-order
	testkit.Equal(t, "worked in the order", got, "abc")
	p.Await("SELECT count(*) = 11 FROM inbox_events WHERE processing_state = 'succeeded'")
}

// Two calls of Run in one process share its work.
func TestInboxRunsTwiceInOneProcess(t *testing.T) {
	t.Parallel()
	g := newGate()
	p := newInbox(t, inbox.Config{Handle: g.handle, Workers: 1, PollInterval: never})
	p.run()
	stop := p.stop
	p.run()
	p.record("1")
	p.record("2")
	if got := <-g.entered + <-g.entered; got != "12" && got != "21" {
		t.Errorf("worked %s", got)
	}
	g.through <- nil
	g.through <- nil
	if err := stop(); err != nil {
		t.Error(err)
	}
	p.record("3")
	g.wantEntered(t, "3")
	g.through <- nil
}

// While the breaker is open events are recorded and none is claimed; a probe closes it, and costs
// no more than itself.
func TestInboxHoldsWhileItsBreakerIsOpen(t *testing.T) {
	t.Parallel()
	var down atomic.Bool
	down.Store(true)
	b := receivertest.Must(breaker.New(breaker.Config{Failures: 2, OpenFor: 50 * time.Millisecond}))
	var mu sync.Mutex
	worked := map[string]int{}
	p := newInbox(t, inbox.Config{
		Config: consumer.Config{Breaker: b}, Workers: 1, Schedule: []time.Duration{0}, MaxAttempts: 100, PollInterval: 10 * time.Millisecond,
		Handle: func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
			mu.Lock()
			defer mu.Unlock()
			worked[event.IdempotencyKey]++
			if down.Load() {
				return consumer.DependencyDown(receivertest.ErrHandler)
			}
			return nil
		},
	})
	p.run()
	for i := range 5 {
		p.record(fmt.Sprint(i))
	}
	p.worked()
	p.worked()
	if state := b.State(); state == breaker.Closed {
		t.Fatalf("the breaker is %s", state)
	}
	if got := p.Post("while it is open", "{}"); got.Status != http.StatusAccepted {
		t.Errorf("recording is answered %d", got.Status)
	}
	down.Store(false)
	p.Await("SELECT count(*) = 6 FROM inbox_events WHERE processing_state = 'succeeded'")
	testkit.Equal(t, "the breaker", b.State(), breaker.Closed)
}

// The same key at once through two processes: one is recorded, the others are refused, and none
// waits for a lock.
func TestInboxRecordsAKeyOnce(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	other := p.again(inbox.Config{})
	var posting sync.WaitGroup
	var accepted atomic.Int32
	for i := range 50 {
		at := []*inboxProcess{p, other}[i%2]
		posting.Go(func() {
			got, err := at.Try(at.NewRequest("k", "{}"))
			switch {
			case err != nil:
				t.Error(err)
			case got.Status == http.StatusAccepted:
				accepted.Add(1)
			case got.Status == http.StatusConflict:
				receivertest.WantProblem(t, got, 409, "in-flight")
			default:
				receivertest.WantReplayed(t, got, 200, `{"state":"pending"}`+"\n")
			}
		})
	}
	posting.Wait()
	if accepted.Load() != 1 {
		t.Errorf("recorded %d times", accepted.Load())
	}
	release := p.Hold(func(tx pgx.Tx) error { // by a session without the lock
		_, err := consumer.Once(t.Context(), tx, consumer.Event{Receiver: "test", Source: "outbox", IdempotencyKey: "held"})
		return err
	})
	receivertest.WantProblem(t, p.Post("held", "{}"), 409, "in-flight")
	release()
	receivertest.WantReplayed(t, p.Post("held", "{}"), 200, `{"state":"succeeded"}`+"\n")
}

// notifications lets a test watch and hold up the notifications that a pool sends.
type notifications struct{ begun, goOn chan struct{} }

func (n notifications) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "pg_notify") {
		n.begun <- struct{}{}
		<-n.goOn
	}
	return ctx
}

func (n notifications) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A request ends with the notification that it sends, and does not continue with those of the
// requests after it: under load it would never end, and neither would the claims of a process that
// passes on what it cannot work.
func TestInboxNotifiesOnceForARequest(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	n := notifications{begun: make(chan struct{}, 10), goOn: make(chan struct{}, 10)}
	p.openOn(p.configured(func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = n, 12 }), inbox.Config{})
	ended := make(chan string, 3)
	handler := p.inbox.Handler()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r)
		ended <- r.Header.Get(webhook.IdempotencyKey)
	}))
	t.Cleanup(server.Close)
	p.URL = server.URL
	p.Client.Transport = &http.Transport{DisableKeepAlives: true} // or the second waits for the end of the first
	p.record("1")
	<-n.begun
	p.record("2")
	p.record("3")
	n.goOn <- struct{}{}
	<-n.begun // the second notification, of the request for 2 or for 3, whichever asked first
	defer close(n.goOn)
	for ended1 := false; !ended1; { // beside the one of the other two for which the other notifies
		select {
		case key := <-ended:
			ended1 = key == "1"
		case <-time.After(10 * time.Second):
			t.Fatal("the request for 1 does not end: it sends a notification for others")
		}
	}
}
