package consumer_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A handler has many ways to answer. None of them may reach the client before the commit is known to have worked.
var handlerStyles = map[string]func(w http.ResponseWriter, r *http.Request){
	"writes nothing":     func(http.ResponseWriter, *http.Request) {},
	"status only":        func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
	"small body":         func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") },
	"outgrows a buffer":  func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, strings.Repeat("x", 1<<20)) },
	"many small writes":  func(w http.ResponseWriter, _ *http.Request) { writeOften(w) },
	"encodes":            func(w http.ResponseWriter, _ *http.Request) { json.NewEncoder(w).Encode(map[string]int{"n": 1}) },
	"copies":             func(w http.ResponseWriter, r *http.Request) { io.Copy(w, bytes.NewReader(make([]byte, 1<<18))) },
	"asserts a ReadFrom": func(w http.ResponseWriter, _ *http.Request) { readFrom(w) },
	"asserts a Flusher":  func(w http.ResponseWriter, _ *http.Request) { flush(w) },
	"controller flushes": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		http.NewResponseController(w).Flush()
	},
	"5 MB": func(w http.ResponseWriter, _ *http.Request) { w.Write(make([]byte, 5<<20)) },
	"error after a write": func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "ok")
		http.Error(w, "too late to be anything but 200", http.StatusInternalServerError)
	},
	"serves a file": func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "a.txt", time.Unix(0, 0), strings.NewReader("ok"))
	},
	"in a TimeoutHandler": func(w http.ResponseWriter, r *http.Request) {
		inner := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") })
		http.TimeoutHandler(inner, time.Hour, "").ServeHTTP(w, r)
	},
	"another goroutine answers": func(w http.ResponseWriter, _ *http.Request) {
		var wg sync.WaitGroup
		wg.Go(func() { io.WriteString(w, "ok") })
		wg.Wait()
	},
	"wants to commit": func(w http.ResponseWriter, r *http.Request) {
		defer func() { _ = recover() }() // behind sqlconsumer.Middleware, where Tx panics
		io.WriteString(w, "ok")
		_ = consumer.Tx(r.Context()).Commit(r.Context())
	},
	"hijacks": func(w http.ResponseWriter, _ *http.Request) { hijack(w) },
	"early hints": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusAccepted)
	},
}

func writeOften(w http.ResponseWriter) {
	for range 10_000 {
		io.WriteString(w, "x")
	}
}

func readFrom(w http.ResponseWriter) {
	if rf, ok := w.(io.ReaderFrom); ok {
		rf.ReadFrom(strings.NewReader("ok"))
	}
}

func flush(w http.ResponseWriter) {
	w.WriteHeader(http.StatusOK)
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
}

func hijack(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	out := bufio.NewWriter(conn)
	out.WriteString("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	out.Flush()
}

// failures make the COMMIT fail of a transaction whose statements have all gone well.
var failures = map[string]struct {
	cfg     consumer.Config
	prepare func(e *env)
	spoil   func(e *env, r *http.Request) // in the transaction that is to fail
	mend    func(e *env)                  // so that it works the next time
	status  int
	problem string
	log     string
}{
	"deferred foreign key": {
		spoil:  func(e *env, r *http.Request) { mustNot(e, e.exec(r.Context(), "INSERT INTO child VALUES (1)")) },
		status: 500, problem: "commit-failed", log: "23503",
	},
	"serialization": {
		cfg:    consumer.Config{Isolation: sql.LevelSerializable},
		spoil:  skewWrites,
		status: 503, problem: "serialization-failure", log: "40001",
	},
	"killed backend": {
		spoil: func(e *env, r *http.Request) {
			mustNot(e, e.exec(r.Context(), "SET LOCAL application_name = 'doomed'"))
			e.mustExec("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'doomed' AND datname = current_database()")
		},
		status: 500, problem: "commit-failed", log: "commit",
	},
	"full disk": {
		prepare: fillDisk,
		spoil:   func(*env, *http.Request) {},
		mend:    func(e *env) { e.mustExec("TRUNCATE ledger") }, // into a new file, on the disk
		status:  500, problem: "commit-failed", log: "53100",
	},
}

// fillDisk lets every COMMIT after an effect write to a table whose file is on a device that is always full.
func fillDisk(e *env) {
	e.mustExec(`
		CREATE TABLE ledger (key text);
		CREATE FUNCTION enter() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO ledger VALUES (NEW.key); RETURN NULL; END';
		CREATE CONSTRAINT TRIGGER enters AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION enter()`)
	var dir, file string
	err := e.pool.QueryRow(e.t.Context(), "SELECT current_setting('data_directory'), pg_relation_filepath('ledger')").Scan(&dir, &file)
	if err == nil {
		err = os.Remove(filepath.Join(dir, file))
	}
	if err == nil {
		err = os.Symlink("/dev/full", filepath.Join(dir, file))
	}
	if err != nil {
		e.t.Fatal(err)
	}
}

func TestFailedCommitIsNeverAnsweredAsSuccess(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		for name, failure := range failures {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				var runs atomic.Int64
				e := newEnv(t, f, failure.cfg, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						runs.Add(1)
						effect(e)(discardWriter{}, r)
						if r.Header.Get("Test-Spoil") != "" {
							failure.spoil(e, r)
						}
						handlerStyles[r.Header.Get("Test-Style")](w, r)
					}
				})
				if failure.prepare != nil {
					failure.prepare(e)
				}
				styles := slices.Sorted(maps.Keys(handlerStyles))
				for _, style := range styles {
					got := e.do(e.newRequest(style, "{}", with("Test-Style", style), with("Test-Spoil", "yes")))
					wantProblem(t, got, failure.status, failure.problem)
					e.wantResult(consumer.ResultCommitFailed)
					e.wantRows(style, 0, 0)
				}
				if n := int(runs.Load()); n != len(styles) {
					t.Errorf("%d requests ran the handler %d times", len(styles), n)
				}
				if log := e.logged.String(); strings.Count(log, failure.log) < len(styles) {
					t.Errorf("logged %s", log)
				}
				if failure.mend != nil {
					failure.mend(e)
				}
				for _, style := range styles {
					retry := func() response { return e.do(e.newRequest(style, "{}", with("Test-Style", style))) }
					first := retry()
					wantFirst(t, first, first.status, first.body)
					if first.status/100 != 2 {
						t.Errorf("%s: the retry got %d %s", style, first.status, first.body)
					}
					if again := retry(); again.status != first.status || again.header.Get(webhook.Replayed) != "true" {
						t.Errorf("%s: the duplicate got %d %v", style, again.status, again.header)
					}
					e.wantRows(style, 1, 1)
				}
			})
		}
	})
}

// A handler may write an answer and then end as no handler should.
func TestAnswerOfAHandlerThatEndsBadly(t *testing.T) {
	ends := map[string]struct {
		end    func(w http.ResponseWriter, r *http.Request)
		status int // 0: none
	}{
		"panics":             {func(http.ResponseWriter, *http.Request) { panic("boom") }, 500},
		"aborts":             {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0},
		"ends its goroutine": {func(http.ResponseWriter, *http.Request) { runtime.Goexit() }, 0},
	}
	answers := map[string]func(w http.ResponseWriter, r *http.Request){"redirects": func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/elsewhere", http.StatusSeeOther)
	}}
	maps.Copy(answers, handlerStyles)
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, c := range ends {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						effect(e)(discardWriter{}, r)
						answers[r.Header.Get("Test-Style")](w, r)
						c.end(w, r)
					}
				})
				for style := range answers {
					got, err := e.try(e.newRequest(style, "{}", with("Test-Style", style)))
					switch {
					case c.status == 0 && err == nil:
						t.Errorf("%s: the client got %d", style, got.status)
					case c.status != 0 && err != nil:
						t.Errorf("%s: %v", style, err)
					case c.status != 0:
						wantProblem(t, got, c.status, "handler-panicked")
					}
					e.wantResult(consumer.ResultFailed)
					e.wantRows(style, 0, 0)
				}
			})
		}
	})
}

// http.TimeoutHandler answers for a handler that goes on: what that one does afterwards must have no effect.
func TestHandlerWorksPastItsTime(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		answered, late := make(chan struct{}), make(chan error, 1)
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Test-Dawdle") == "" {
					effect(e)(w, r)
					return
				}
				effect(e)(discardWriter{}, r)
				dawdle := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					<-answered
					late <- e.exec(context.WithoutCancel(r.Context()), "INSERT INTO effect VALUES ('k')")
					io.WriteString(w, "ok")
				})
				http.TimeoutHandler(dawdle, time.Millisecond, "").ServeHTTP(w, r)
			}
		})
		if got := e.do(e.newRequest("k", "{}", with("Test-Dawdle", "yes"))); got.status != http.StatusServiceUnavailable {
			t.Errorf("got %d %s", got.status, got.body)
		}
		e.wantResult(consumer.ResultFailed)
		close(answered)
		if err := <-late; !errors.Is(err, pgx.ErrTxClosed) && !errors.Is(err, sql.ErrTxDone) {
			t.Errorf("the late statement: %v", err)
		}
		e.wantRows("k", 0, 0)
		wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
		e.wantRows("k", 1, 1)
	})
}

func TestClientGoneBeforeAFailedCommit(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		working := make(chan struct{})
		e := newEnv(t, f, consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				effect(e)(w, r)
				if r.Header.Get("Test-Hang-Up") != "" {
					mustNot(e, e.exec(r.Context(), "INSERT INTO child VALUES (1)"))
					close(working)
					<-r.Context().Done() // the server has noticed
				}
			}
		})
		ctx, hangUp := context.WithCancel(t.Context())
		request := e.newRequest("k", "{}", with("Test-Hang-Up", "yes")).WithContext(ctx)
		sent := make(chan error, 1)
		go func() {
			_, err := e.try(request)
			sent <- err
		}()
		<-working
		hangUp()
		if err := <-sent; !errors.Is(err, context.Canceled) {
			t.Errorf("the client got %v", err)
		}
		e.wantResult(consumer.ResultCommitFailed)
		e.wantRows("k", 0, 0)
		wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
		e.wantRows("k", 1, 1)
	})
}
