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
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The duplicate must be answered while the first request still holds the key: only then did it not wait.
func TestDuplicateOfARequestInFlight(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		running, finished := make(chan struct{}), make(chan struct{})
		finish := sync.OnceFunc(func() { close(finished) })
		defer finish()
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				close(running) // a second run would panic here
				<-finished
				effect(e)(w, r)
			}
		})
		first := make(chan response, 1)
		request := e.newRequest("k", "{}")
		go func() {
			answer, err := e.try(request)
			if err != nil {
				t.Error(err)
			}
			first <- answer
		}()
		<-running

		wantProblem(t, e.post("k", "{}"), 409, "in-flight")
		e.wantResult(consumer.ResultInFlight)
		select {
		case <-first:
			t.Error("the first request had ended: nothing was in flight")
		default:
		}

		finish()
		wantFirst(t, <-first, 201, `{"done":"k"}`)
		wantReplayed(t, e.post("k", "{}"), 201, "")
		e.wantRows("k", 1, 1)
	})
}

// Plain SQL and Once insert without the advisory lock, which the middleware would wait for at the unique index.
func TestInFlightElsewhereWithoutTheLock(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		holding, finished := make(chan struct{}), make(chan struct{})
		finish := sync.OnceFunc(func() { close(finished) })
		defer finish()
		done := make(chan error, 1)
		go func() {
			first, err := e.once(t.Context(), e, "outbox", "k", func() { close(holding); <-finished })
			if !first {
				t.Error("Once: not the first")
			}
			done <- err
		}()
		<-holding
		wantProblem(t, e.post("k", "{}"), 409, "in-flight")
		e.wantResult(consumer.ResultInFlight)
		select {
		case err := <-done:
			t.Errorf("Once had ended, %v: nothing was in flight", err)
		default:
		}
		finish()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		wantReplayed(t, e.post("k", "{}"), 200, "") // known, but never answered
		e.wantRows("k", 0, 1)
	})
}

func TestKnownKeysAreAnsweredWhileTheLockIsHeld(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		e.post("k", `{"amount":1}`)
		release := e.hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended(E'test\noutbox\nk', 122550254464888 # 'processed_events'::regclass::oid::bigint))`)
			return err
		})
		wantProblem(t, e.post("k", `{"amount":2}`), 422, "key-reused")
		wantReplayed(t, e.post("k", `{"amount":1}`), 201, "")
		release()
	})
}

// The key may be committed by another transaction between the statement's snapshot and its INSERT. A trigger holds the
// statement exactly there.
func TestKeyCommittedAfterTheSnapshot(t *testing.T) {
	cases := map[string]struct {
		level sql.IsolationLevel
		check func(t *testing.T, got response)
	}{
		"read committed sees it":   {sql.LevelReadCommitted, func(t *testing.T, got response) { wantReplayed(t, got, 200, "") }},
		"repeatable read must not": {sql.LevelRepeatableRead, func(t *testing.T, got response) { wantProblem(t, got, 503, "serialization-failure") }},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, f, consumer.Config{Isolation: c.level}, effect)
				e.mustExec(`
					CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0
						AS 'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END';
					CREATE TRIGGER waits BEFORE INSERT ON processed_events FOR EACH ROW
						WHEN (NEW.payload_hash IS NOT NULL) EXECUTE FUNCTION wait()`)
				release := e.hold(func(tx pgx.Tx) error {
					_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(42)")
					return err
				})
				request, answer := e.newRequest("k", "{}"), make(chan response, 1)
				go func() {
					got, err := e.try(request)
					if err != nil {
						t.Error(err)
					}
					answer <- got
				}()
				e.await("SELECT EXISTS (" + advisoryLocks + " AND objid = 42 AND NOT granted)")
				e.mustExec("INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 'outbox', 'k', 'succeeded')")
				release()
				c.check(t, <-answer)
				e.wantRows("k", 0, 1)
			})
		}
	})
}

func TestFiftyAtOnceRunOnce(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		const clients = 50
		var runs atomic.Int64
		handler := func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				runs.Add(1)
				effect(e)(w, r)
			}
		}
		one := newEnv(t, f, consumer.Config{}, handler)
		two := newEnvAt(t, f, one.dsn, consumer.Config{}, handler) // a second replica on the same database
		answers := make(chan response, clients)
		start := make(chan struct{})
		for i := range clients {
			e := []*env{one, two}[i%2]
			request := e.newRequest("k", "{}")
			go func() {
				<-start
				got, err := e.try(request)
				if err != nil {
					t.Error(err)
				}
				answers <- got
			}()
		}
		close(start)
		tally := map[string]int{}
		for range clients {
			got := <-answers
			tally[strconv.Itoa(got.status)+got.header.Get(webhook.Replayed)]++
		}
		if tally["201"] != 1 || tally["201"]+tally["201true"]+tally["409"] != clients {
			t.Errorf("answers %v", tally)
		}
		if n := runs.Load(); n != 1 {
			t.Errorf("the handler ran %d times", n)
		}
		one.wantRows("k", 1, 1)
		wantReplayed(t, two.post("k", "{}"), 201, "")
	})
}

// Of fifty requests for a key that plain SQL holds, one meets it at the index, and the others meet that one.
func TestFiftyBehindPlainSQL(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		one := newEnv(t, f, consumer.Config{}, effect)
		two := newEnvAt(t, f, one.dsn, consumer.Config{}, effect)
		release := one.hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('test', 'outbox', 'k', 'succeeded')")
			return err
		})
		var wg sync.WaitGroup
		for i := range 50 {
			e := []*env{one, two}[i%2]
			request := e.newRequest("k", "{}")
			wg.Go(func() {
				got, err := e.try(request)
				if err != nil || got.status != http.StatusConflict || got.header.Get("Retry-After") != "1" {
					t.Errorf("got %d %v, %v", got.status, got.header, err)
				}
			})
		}
		wg.Wait()
		release() // the key was held until here: no request has waited for it
		wantReplayed(t, one.post("k", "{}"), 200, "")
		one.wantRows("k", 0, 1)
	})
}

// lock_timeout is shortened for one INSERT, and the handler's statements must not inherit that.
func TestHandlerKeepsItsLockTimeout(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		check := func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				mustNot(e, e.exec(r.Context(), "INSERT INTO effect SELECT current_setting('lock_timeout')"))
			}
		}
		plain := newEnv(t, f, consumer.Config{}, check)
		set := newEnvAt(t, f, withSetting(plain.dsn, "lock_timeout", "7777ms"), consumer.Config{}, check)
		plain.post("k1", "{}")
		set.post("k2", "{}")
		plain.wantRows("k1", 0, 1)
		if n := plain.count("SELECT count(*) FROM effect WHERE key IN ('0', '7777ms')"); n != 2 {
			t.Error("the handler saw another lock_timeout")
		}
	})
}

func TestOnce(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		once := func(key string) (bool, error) { return e.once(context.Background(), e, "queue", key, func() {}) }
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
		e.wantRows("k", 0, 1)
	})
}
