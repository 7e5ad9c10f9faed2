package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// dieNumber tells a process of the role "work-die" from the others of its test.
const dieNumber = "OUTBOX_TEST_NUMBER"

// doomedInbox is the inbox of the process that dies with number n, and of the one that comes after it. It has a
// sender of its own, so that no other worker works its event.
func doomedInbox(pool *pgxpool.Pool, n string, finished func()) *inbox.Inbox {
	return consumer.Must(inbox.New(pool, inbox.Config{
		Config: consumer.Config{
			Receiver: "test",
			Secrets:  []string{secretText},
			Source:   "doomed-" + n,
			Logger:   slog.New(slog.DiscardHandler),
			Observe: func(_ context.Context, r consumer.Report) {
				if r.Inbox {
					finished()
				}
			},
		},
		Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			_, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO effect VALUES ($1)", event.Key)
			return err
		},
		Workers: 1,
	}))
}

// workAndDie is a process that records and works events, and kills itself at one of its operations.
func workAndDie(p *player) {
	f := newFate()
	pool, err := pgxpool.NewWithConfig(context.Background(), p.doomedConfig(f))
	if err == nil {
		err = pool.Ping(context.Background())
	}
	if err != nil {
		panic(err)
	}
	done := make(chan struct{})
	in := doomedInbox(pool, os.Getenv(dieNumber), sync.OnceFunc(func() { close(done) }))
	go func() {
		<-f.begun // a claim that was on its way before would not count, and might find the event
		panic(in.Run(context.Background()))
	}()
	go func() {
		<-done
		f.answerAlive(p)
	}()
	listener, url := p.listen()
	fmt.Println(url)
	panic(http.Serve(&doomedListener{Listener: listener, fate: f}, in.Handler()))
}

// inboxMoments are those at which an inbox must have met its fate, for a test of all its operations to be one.
func inboxMoments() []string {
	return []string{
		"before writing the admission", "after writing the admission", "after the reply to the admission",
		"before writing the answer", "half-way through the answer", "after writing the answer",
		"before writing the claim", "after writing the claim", "after the reply to the claim",
		"before writing the beginning of the work", "after the reply to the beginning of the work",
		"before writing the effect", "after the reply to the effect",
		"before writing COMMIT", "after writing COMMIT", "after the reply to COMMIT",
	}
}

// hangmen are how many processes meet their fate at once: most of the time they wait to be rescued.
const hangmen = 12

// eachWorking starts a process for every operation that one sees while it records and works an event; it is to meet its
// fate there. meet returns what it said.
func eachWorking(t *testing.T, e *env, meet func(p *workingProcess, number int) (moment string), settings ...string) fates {
	t.Helper()
	unharmed, err := e.launchWorking(0, "")
	if err != nil {
		t.Fatal(err)
	}
	defer unharmed.kill()
	if answer := e.do(e.newRequestTo(unharmed.url, keyOf(0), "{}")); answer.status != http.StatusAccepted {
		t.Fatalf("status %d: %s", answer.status, answer.body)
	}
	unharmed.order("alive?")
	operations := operationsOf(t, unharmed.wantLine(t))

	var mu sync.Mutex
	seen, next := fates{}, 0
	var all sync.WaitGroup
	for range hangmen {
		all.Go(func() {
			for {
				mu.Lock()
				next++
				n := next
				mu.Unlock()
				if n > len(operations) || t.Failed() {
					return
				}
				p, err := e.launchWorking(n, operations[n-1], settings...)
				if err != nil {
					t.Error(err)
					return
				}
				moment := meet(p, n)
				p.kill()
				mu.Lock()
				seen[moment]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return seen
}

// met returns how many processes met their fate.
func (f fates) met(fate string) (n int) {
	for moment, times := range f {
		if strings.HasPrefix(moment, fate+" ") {
			n += times
		}
	}
	return n
}

// An inbox is killed at every single operation on its connections, while it records and works one event. The sender comes
// again, as a relay does, and the worker that then takes it makes the effect, or finds it made: once, and at no attempt's
// cost.
func TestInboxKilledAtEveryOperation(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, effect) // for its database
	seen := eachWorking(t, e, func(doomed *workingProcess, n int) string {
		_, err := e.try(e.newRequestTo(doomed.url, keyOf(n), "{}"))
		doomed.order("alive?")
		moment, ok := doomed.line()
		if !ok || err != nil && !strings.HasPrefix(moment, "dying ") {
			t.Errorf("the process that is to die said %q, and its client got %v", moment, err)
		}
		doomed.kill()
		survivor := e.surviveWorking(n)
		defer survivor.stop()
		survivor.bring(keyOf(n))
		e.awaitFor(moment+": the event", succeeded, keyOf(n))
		e.wantWorkedOnce(moment, keyOf(n))
		return moment
	})
	seen.want(t, "dying", inboxMoments()...)
	t.Logf("%d processes died, each at another operation", seen.met("dying"))
}

// An inbox is stopped at every single operation, for as long as it takes another process to see that its work is not being
// done, and to do it. When it goes on it must do nothing that has been done; and it works what comes next.
func TestInboxFrozenAtEveryOperation(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{}, effect) // for its database
	var taken atomic.Int64
	seen := eachWorking(t, e, func(frozen *workingProcess, n int) string {
		request, answered := e.newRequestTo(frozen.url, keyOf(n), "{}"), make(chan error, 1)
		go func() {
			_, err := e.try(request)
			frozen.order("alive?")
			answered <- err
		}()
		moment, ok := frozen.line()
		if !ok {
			t.Errorf("the process that is to freeze said %q", moment)
		}
		met := strings.HasPrefix(moment, "frozen ")
		if met {
			survivor := e.surviveWorking(n)
			survivor.bring(keyOf(n))
			e.awaitFor(moment+": the event, or the process that has it,", succeeded+" OR ("+holding+") > 0", keyOf(n))
			survivor.stop()
			if e.count("SELECT count(*) FROM effect WHERE key = $1", keyOf(n)) == 1 {
				taken.Add(1)
			}
		}
		if err := thaw(frozen.process, answered); err != nil {
			t.Errorf("%s: its client got %v", moment, err)
		}
		if !met {
			e.wantWorkedOnce(moment, keyOf(n))
			return moment
		}
		// It has one worker: when that has worked another event, it is done with this one.
		next := keyOf(n) + "-next"
		answer, err := e.try(e.newRequestTo(frozen.url, next, "{}"))
		if err != nil || answer.status != http.StatusAccepted {
			t.Errorf("%s: the next event was answered %d, %v", moment, answer.status, err)
		}
		for _, key := range []string{keyOf(n), next} {
			e.awaitFor(moment+": "+key, succeeded, key)
			e.wantWorkedOnce(moment, key)
		}
		return moment
	}, freezeOnly+"=yes")
	seen.want(t, "frozen", inboxMoments()...)
	t.Logf("%d processes froze, each at another operation; of %d another took the work", seen.met("frozen"), taken.Load())
}

func keyOf(n int) string { return "k" + strconv.Itoa(n) }

// What to ask the database about an event.
const (
	succeeded = "SELECT EXISTS (SELECT FROM inbox_events WHERE idempotency_key = $1 AND processing_state = 'succeeded')"
	// holding counts the transactions in which the process that is named for the event stands still.
	holding = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1 AND state LIKE 'idle in transaction%'"
)

// workingProcess is a process of the role "work-die".
type workingProcess struct {
	*process
	url string
}

func (e *env) launchWorking(n int, operation string, settings ...string) (*workingProcess, error) {
	lines := make(chan string, 10)
	dsn := withSetting(withSetting(e.dsn, "pool_max_conns", "3"), "application_name", keyOf(n))
	p, err := launch(e.t.Context(), "work-die", dsn, func(line string) { lines <- line },
		append(settings, dieAt+"="+operation, dieNumber+"="+strconv.Itoa(n))...)
	if err != nil {
		return nil, err
	}
	p.lines = lines
	url, ok := p.line()
	if !ok {
		return nil, fmt.Errorf("the process for operation %q did not begin", operation)
	}
	return &workingProcess{p, url}, nil
}

// survivor is who comes after: the sender with the same event, and another process that works it.
type survivor struct {
	env  *env
	in   *inbox.Inbox
	stop func()
}

func (e *env) surviveWorking(n int) *survivor {
	pool, err := pgxpool.New(context.Background(), withSetting(e.dsn, "pool_max_conns", "3"))
	if err != nil {
		panic(err) // only a DSN that cannot be read
	}
	ctx, cancel := context.WithCancel(e.t.Context())
	s := &survivor{env: e, in: doomedInbox(pool, strconv.Itoa(n), func() {})}
	var working sync.WaitGroup
	working.Go(func() {
		if err := s.in.Run(ctx); err != nil {
			e.t.Error(err)
		}
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		working.Wait()
		pool.Close()
	})
	return s
}

// bring sends the event until it is answered for good, or a process that stands still is found to hold it.
func (s *survivor) bring(key string) {
	for status := http.StatusConflict; status == http.StatusConflict && s.env.count(holding, key) == 0; {
		w := httptest.NewRecorder()
		s.in.Handler().ServeHTTP(w, s.env.newRequest(key, "{}"))
		if status = w.Code; status != http.StatusOK && status != http.StatusAccepted && status != http.StatusConflict {
			s.env.t.Errorf("the redelivery of %s was answered %d %s", key, status, w.Body)
		}
	}
}

// awaitFor polls the database until query is true of key. Unlike [env.await] it leaves it alone in between, and fails in
// any goroutine.
func (e *env) awaitFor(what, query, key string) {
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for yes := false; !yes; {
		if err := e.pool.QueryRow(ctx, query, key).Scan(&yes); err != nil {
			e.t.Errorf("still waiting for %s: %v", what, err)
			return
		}
		if !yes {
			<-tick.C
		}
	}
}

// wantWorkedOnce asserts one effect, and one attempt.
func (e *env) wantWorkedOnce(moment, key string) {
	e.wantRows(key, 1, 1)
	if attempts := e.count("SELECT attempts FROM inbox_events WHERE idempotency_key = $1", key); attempts != 1 {
		e.t.Errorf("%s: %d attempts are counted for %s", moment, attempts, key)
	}
}
