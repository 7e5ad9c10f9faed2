package consumer_test

import (
	"context"
	"database/sql"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Duplicates must be answered while the first request still holds the key: only then did they not
// wait.
func TestDuplicatesOfARequestInFlight(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		running, finished := make(chan struct{}), make(chan struct{})
		finish := sync.OnceFunc(func() { close(finished) })
		defer finish()
		handler := func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				close(running) // a second run would panic here
				<-finished
				receivertest.Effect(e)(w, r)
			}
		}
		e := receivertest.NewEnv(t, f, consumer.Config{}, handler)
		two := receivertest.NewEnvAt(t, f, e.DSN, consumer.Config{}, handler) // another process
		first := make(chan receivertest.Response, 1)
		request := e.NewRequest("k", "{}")
		go func() {
			answer, err := e.Try(request)
			if err != nil {
				t.Error(err)
			}
			first <- answer
		}()
		<-running

		receivertest.WantProblem(t, e.Post("k", "{}"), 409, "in-flight")
		e.WantResult(consumer.ResultInFlight)
		if tally := atOnce(t, 50, e, two); tally["409"] != 50 {
			t.Errorf("answers %v, want 50 times 409", tally)
		}
		select {
		case <-first:
			t.Error("the first request had ended: nothing was in flight")
		default:
		}

		finish()
		receivertest.WantFirst(t, <-first, 201, `{"done":"k"}`)
		if tally := atOnce(t, 50, e, two); tally["201true"] != 50 {
			t.Errorf("answers %v, want 50 times the stored status", tally)
		}
		e.WantRows("k", 1, 1)
	})
}

func TestKnownKeysAreAnsweredWhileTheLockIsHeld(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Post("k", `{"amount":1}`)
		release := e.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended(E'test\noutbox\nk', 122550254464888 # 'processed_events'::regclass::oid::bigint))`)
			return err
		})
		receivertest.WantProblem(t, e.Post("k", `{"amount":2}`), 422, "key-reused")
		receivertest.WantReplayed(t, e.Post("k", `{"amount":1}`), 201, "")
		release()
	})
}

// The key may be committed by another transaction between the statement's snapshot and its INSERT.
// A trigger holds the statement exactly there.
func TestKeyCommittedAfterTheSnapshot(t *testing.T) {
	cases := map[string]struct {
		level sql.IsolationLevel
		check func(t *testing.T, got receivertest.Response)
	}{
		"read committed sees it": {sql.LevelReadCommitted, func(t *testing.T, got receivertest.Response) { receivertest.WantReplayed(t, got, 200, "") }},
		"repeatable read must not": {sql.LevelRepeatableRead, func(t *testing.T, got receivertest.Response) {
			receivertest.WantProblem(t, got, 503, "serialization-failure")
		}},
	}
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := receivertest.NewEnv(t, f, consumer.Config{Isolation: c.level}, receivertest.Effect)
				e.MustExec(`
					CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0
						AS 'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END';
					CREATE TRIGGER waits BEFORE INSERT ON processed_events FOR EACH ROW
						WHEN (NEW.payload_hash IS NOT NULL) EXECUTE FUNCTION wait()`)
				release := e.Hold(func(tx pgx.Tx) error {
					_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(42)")
					return err
				})
				request, answer := e.NewRequest("k", "{}"), make(chan receivertest.Response, 1)
				go func() {
					got, err := e.Try(request)
					if err != nil {
						t.Error(err)
					}
					answer <- got
				}()
				e.Await("SELECT EXISTS (" + receivertest.AdvisoryLocks + " AND objid = 42 AND NOT granted)")
				e.MustExec("INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 'outbox', 'k', 'succeeded')")
				release()
				c.check(t, <-answer)
				e.WantRows("k", 0, 1)
			})
		}
	})
}

// Of fifty requests for a key one runs the handler. Each failure frees the event for one of the
// others, never for two.
func TestFiftyAtOnceRunOnce(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		const clients = 50
		for _, fail := range []int64{0, 3} {
			var runs, running atomic.Int64
			handler := func(e *receivertest.Env) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) {
					if n := running.Add(1); n > 1 {
						t.Errorf("%d handlers of one event run at once", n)
					}
					defer running.Add(-1)
					if runs.Add(1) <= fail {
						receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
						w.WriteHeader(http.StatusInternalServerError)
						return
					}
					receivertest.Effect(e)(w, r)
				}
			}
			one := receivertest.NewEnv(t, f, consumer.Config{}, handler)
			two := receivertest.NewEnvAt(t, f, one.DSN, consumer.Config{}, handler) // a second replica on the same database
			tally := atOnce(t, clients, one, two)
			// How many of the fifty came after the failures is chance. That they ran one by one is
			// not.
			ran := int(runs.Load())
			succeeded := max(0, ran-int(fail))
			if succeeded > 1 || fail == 0 && succeeded == 0 || tally["201"] != succeeded || tally["201"]+tally["201true"]+tally["409"]+tally["500"] != clients {
				t.Errorf("the handler ran %d times, answers %v", ran, tally)
			}
			one.WantRows("k", succeeded, succeeded)
			if succeeded == 1 {
				receivertest.WantReplayed(t, two.Post("k", "{}"), 201, "")
			}
		}
	})
}

// atOnce sends the event k so many times at once, to both receivers, and counts the answers.
func atOnce(t *testing.T, clients int, receivers ...*receivertest.Env) map[string]int {
	start, answers := make(chan struct{}), make(chan string, clients)
	for i := range clients {
		e := receivers[i%len(receivers)]
		request := e.NewRequest("k", "{}")
		go func() {
			<-start
			got, err := e.Try(request)
			if err != nil {
				t.Error(err)
			}
			answers <- strconv.Itoa(got.Status) + got.Header.Get(webhook.Replayed)
		}()
	}
	close(start)
	tally := map[string]int{}
	for range clients {
		tally[<-answers]++
	}
	return tally
}

// Of fifty requests for a key that plain SQL holds, one meets it at the index, and the others meet
// that one.
func TestFiftyBehindPlainSQL(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		one := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		two := receivertest.NewEnvAt(t, f, one.DSN, consumer.Config{}, receivertest.Effect)
		release := one.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 'outbox', 'k', 'succeeded')")
			return err
		})
		if tally := atOnce(t, 50, one, two); tally["409"] != 50 {
			t.Errorf("answers %v, want 50 times 409", tally)
		}
		got := one.Post("k", "{}")
		receivertest.WantProblem(t, got, 409, "in-flight")
		testkit.Contains(t, "the problem", got.Body, "a lock that its row needs")
		release() // the key was held until here: no request has waited for it
		receivertest.WantReplayed(t, one.Post("k", "{}"), 200, "")
		one.WantRows("k", 0, 1)
	})
}

// lock_timeout is shortened for one INSERT, and the handler's statements must not inherit that.
func TestHandlerKeepsItsLockTimeout(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		check := func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				mustNot(e, e.Exec(r.Context(), "INSERT INTO effect SELECT current_setting('lock_timeout')"))
			}
		}
		plain := receivertest.NewEnv(t, f, consumer.Config{}, check)
		set := receivertest.NewEnvAt(t, f, receivertest.WithSetting(plain.DSN, "lock_timeout", "7777ms"), consumer.Config{}, check)
		plain.Post("k1", "{}")
		set.Post("k2", "{}")
		plain.WantRows("k1", 0, 1)
		testkit.Equal(t, "the handler saw another lock_timeout", plain.Count("SELECT count(*) FROM effect WHERE key IN ('0', '7777ms')"), 2)
	})
}

func TestOnce(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		once := func(key string) (bool, error) { return e.Once(context.Background(), e, "queue", key, func() {}) }
		for want := range 2 {
			if first, err := once("k"); err != nil || first != (want == 0) {
				t.Errorf("call %d: %v, %v", want+1, first, err)
			}
		}
		for _, key := range []string{"", "line\nbreak", strings.Repeat("k", 256)} {
			if _, err := once(key); err == nil {
				t.Errorf("key %.10q was taken", key)
			}
		}
		e.WantRows("k", 0, 1)
	})
}
