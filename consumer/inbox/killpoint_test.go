package inbox_test

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
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// doomedInbox is the inbox of the process that dies with number n, and of the one that comes after
// it. It has its own sender, so that no other worker works its event.
func doomedInbox(pool *pgxpool.Pool, n string, finished func()) *inbox.Inbox {
	return receivertest.Must(inbox.New(pool, inbox.Config{
		Config: consumer.Config{
			Receiver: "test",
			Secrets:  []string{receivertest.SecretText},
			Source:   "doomed-" + n,
			Logger:   slog.New(slog.DiscardHandler),
			Observe: func(_ context.Context, r consumer.Report) {
				if r.Inbox {
					finished()
				}
			},
		},
		Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			_, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
			return err
		},
		Workers: 1,
	}))
}

// workAndDie is a process that records and works events, and kills itself at one of its operations.
func workAndDie(p *receivertest.Player) {
	f := receivertest.NewFate()
	pool, err := pgxpool.NewWithConfig(context.Background(), p.DoomedConfig(f))
	if err == nil {
		err = pool.Ping(context.Background())
	}
	if err != nil {
		panic(err)
	}
	done := make(chan struct{})
	in := doomedInbox(pool, os.Getenv(receivertest.DieNumber), sync.OnceFunc(func() { close(done) }))
	go func() {
		<-f.Begun // a claim that was on its way before would not count, and might find the event
		panic(in.Run(context.Background()))
	}()
	go func() {
		<-done
		f.AnswerAlive(p)
	}()
	listener, url := p.Listen()
	fmt.Println(url)
	panic(http.Serve(&receivertest.DoomedListener{Listener: listener, Fate: f}, in.Handler()))
}

// inboxMoments are those at which an inbox must have met its fate, for a test of all its operations
// to be one.
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

// eachWorking starts a process for every operation that one sees while it records and works an
// event; it is to meet its fate there. meet returns what it said.
func eachWorking(t *testing.T, e *receivertest.Env, meet func(p *workingProcess, number int) (moment string), settings ...string) receivertest.Fates {
	t.Helper()
	unharmed, err := launchWorking(e, 0, "")
	pgtest.Must(t, err)
	defer unharmed.Kill()
	if answer := e.Do(e.NewRequestTo(unharmed.url, keyOf(0), "{}")); answer.Status != http.StatusAccepted {
		t.Fatalf("status %d: %s", answer.Status, answer.Body)
	}
	unharmed.Order("alive?")
	operations := receivertest.OperationsOf(t, unharmed.WantLine(t))

	var mu sync.Mutex
	seen, next := receivertest.Fates{}, 0
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
				p, err := launchWorking(e, n, operations[n-1], settings...)
				if err != nil {
					t.Error(err)
					return
				}
				moment := meet(p, n)
				p.Kill()
				mu.Lock()
				seen[moment]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return seen
}

// An inbox is killed at every single operation on its connections, while it records and works one
// event. The sender comes again, as a relay does, and the worker that then takes it makes the
// effect, or finds it made: once, and at no attempt's cost.
func TestInboxKilledAtEveryOperation(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, receivertest.Effect) // for its database
	seen := eachWorking(t, e, func(doomed *workingProcess, n int) string {
		_, err := e.Try(e.NewRequestTo(doomed.url, keyOf(n), "{}"))
		doomed.Order("alive?")
		moment, ok := doomed.Line()
		if !ok || err != nil && !strings.HasPrefix(moment, "dying ") {
			t.Errorf("the process that is to die said %q, and its client got %v", moment, err)
		}
		doomed.Kill()
		survivor := survive(e, n)
		defer survivor.stop()
		survivor.bring(keyOf(n))
		awaitFor(e, moment+": the event", succeeded, keyOf(n))
		wantWorkedOnce(e, moment, keyOf(n))
		return moment
	})
	seen.Want(t, "dying", inboxMoments()...)
	t.Logf("%d processes died, each at another operation", seen.Met("dying"))
}

// An inbox is stopped at every single operation, for as long as it takes another process to see
// that its work is not being done, and to do it. When it continues it must do nothing that has been
// done; and it works what comes next.
func TestInboxFrozenAtEveryOperation(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, receivertest.Effect) // for its database
	var taken atomic.Int64
	seen := eachWorking(t, e, func(frozen *workingProcess, n int) string {
		request, answered := e.NewRequestTo(frozen.url, keyOf(n), "{}"), make(chan error, 1)
		go func() {
			_, err := e.Try(request)
			frozen.Order("alive?")
			answered <- err
		}()
		moment, ok := frozen.Line()
		if !ok {
			t.Errorf("the process that is to freeze said %q", moment)
		}
		met := strings.HasPrefix(moment, "frozen ")
		if met {
			survivor := survive(e, n)
			survivor.bring(keyOf(n))
			awaitFor(e, moment+": the event, or the process that has it,", succeeded+" OR ("+holding+") > 0", keyOf(n))
			survivor.stop()
			if e.Count("SELECT count(*) FROM effect WHERE key = $1", keyOf(n)) == 1 {
				taken.Add(1)
			}
		}
		frozen.Thaw()
		if err := <-answered; err != nil {
			t.Errorf("%s: its client got %v", moment, err)
		}
		if !met {
			wantWorkedOnce(e, moment, keyOf(n))
			return moment
		}
		// It has one worker: when that has worked another event, it is done with this one.
		next := keyOf(n) + "-next"
		answer, err := e.Try(e.NewRequestTo(frozen.url, next, "{}"))
		if err != nil || answer.Status != http.StatusAccepted {
			t.Errorf("%s: the next event was answered %d, %v", moment, answer.Status, err)
		}
		for _, key := range []string{keyOf(n), next} {
			awaitFor(e, moment+": "+key, succeeded, key)
			wantWorkedOnce(e, moment, key)
		}
		return moment
	}, receivertest.FreezeOnly+"=yes")
	seen.Want(t, "frozen", inboxMoments()...)
	t.Logf("%d processes froze, each at another operation; of %d another took the work", seen.Met("frozen"), taken.Load())
}

func keyOf(n int) string { return "k" + strconv.Itoa(n) }

// What to ask the database about an event.
const (
	succeeded = "SELECT EXISTS (SELECT FROM inbox_events WHERE idempotency_key = $1 AND processing_state = 'succeeded')"
	// holding counts the transactions in which the process that is named for the event stands
	// still.
	holding = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1 AND state LIKE 'idle in transaction%'"
)

// workingProcess is a process of the role "work-die".
type workingProcess struct {
	*receivertest.Process
	url string
}

func launchWorking(e *receivertest.Env, n int, operation string, settings ...string) (*workingProcess, error) {
	lines := make(chan string, 10)
	dsn := receivertest.WithSetting(receivertest.WithSetting(e.DSN, "pool_max_conns", "3"), "application_name", keyOf(n))
	p, err := receivertest.Launch(e.T.Context(), "work-die", dsn, func(line string) { lines <- line },
		append(settings, receivertest.DieAt+"="+operation, receivertest.DieNumber+"="+strconv.Itoa(n))...)
	if err != nil {
		return nil, err
	}
	p.Lines = lines
	url, ok := p.Line()
	if !ok {
		return nil, fmt.Errorf("the process for operation %q did not begin", operation)
	}
	return &workingProcess{p, url}, nil
}

// survivor is who comes after: the sender with the same event, and another process that works it.
type survivor struct {
	env  *receivertest.Env
	in   *inbox.Inbox
	stop func()
}

func survive(e *receivertest.Env, n int) *survivor {
	pool, err := pgxpool.New(context.Background(), receivertest.WithSetting(e.DSN, "pool_max_conns", "3"))
	if err != nil {
		panic(err) // only a DSN that cannot be read
	}
	ctx, cancel := context.WithCancel(e.T.Context())
	s := &survivor{env: e, in: doomedInbox(pool, strconv.Itoa(n), func() {})}
	var working sync.WaitGroup
	working.Go(func() {
		if err := s.in.Run(ctx); err != nil {
			e.T.Error(err)
		}
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		working.Wait()
		pool.Close()
	})
	return s
}

// bring sends the event until it is answered for good, or a process that stands still is found to
// hold it.
func (s *survivor) bring(key string) {
	for status := http.StatusConflict; status == http.StatusConflict && s.env.Count(holding, key) == 0; {
		w := httptest.NewRecorder()
		s.in.Handler().ServeHTTP(w, s.env.NewRequest(key, "{}"))
		if status = w.Code; status != http.StatusOK && status != http.StatusAccepted && status != http.StatusConflict {
			s.env.T.Errorf("the redelivery of %s was answered %d %s", key, status, w.Body)
		}
	}
}

// awaitFor polls the database until query is true of key. Unlike [env.await] it leaves it alone in
// between, and fails in any goroutine.
func awaitFor(e *receivertest.Env, what, query, key string) {
	ctx, cancel := context.WithTimeout(e.T.Context(), receivertest.Patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for yes := false; !yes; {
		if err := e.Pool.QueryRow(ctx, query, key).Scan(&yes); err != nil {
			e.T.Errorf("still waiting for %s: %v", what, err)
			return
		}
		if !yes {
			<-tick.C
		}
	}
}

// wantWorkedOnce asserts one effect, and one attempt.
func wantWorkedOnce(e *receivertest.Env, moment, key string) {
	e.WantRows(key, 1, 1)
	if attempts := e.Count("SELECT attempts FROM inbox_events WHERE idempotency_key = $1", key); attempts != 1 {
		e.T.Errorf("%s: %d attempts are counted for %s", moment, attempts, key)
	}
}
