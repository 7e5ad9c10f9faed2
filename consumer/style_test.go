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
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A handler has many ways to answer. None of them may reach the client before the commit is known
// to have worked.
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
	prepare func(e *receivertest.Env)
	spoil   func(e *receivertest.Env, r *http.Request) // in the transaction that is to fail
	mend    func(e *receivertest.Env)                  // so that it works the next time
	status  int
	problem string
	log     string
}{
	"deferred foreign key": {
		spoil: func(e *receivertest.Env, r *http.Request) {
			mustNot(e, e.Exec(r.Context(), "INSERT INTO child VALUES (1)"))
		},
		status: 500, problem: "commit-failed", log: "23503",
	},
	"serialization": {
		cfg:    consumer.Config{Isolation: sql.LevelSerializable},
		spoil:  skewWrites,
		status: 503, problem: "serialization-failure", log: "40001",
	},
	"killed backend": {
		spoil: func(e *receivertest.Env, r *http.Request) {
			mustNot(e, e.Exec(r.Context(), "SET LOCAL application_name = 'doomed'"))
			e.MustExec("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'doomed' AND datname = current_database()")
		},
		status: 500, problem: "commit-failed", log: "commit",
	},
	"swallowed error": {
		spoil: func(e *receivertest.Env, r *http.Request) {
			if e.Exec(r.Context(), "SELECT 1/0") == nil {
				e.T.Error("division by zero went well")
			}
		},
		status: 500, problem: "commit-failed", log: "a statement of the handler failed",
	},
	"rolls back with SQL": {
		spoil:  func(e *receivertest.Env, r *http.Request) { mustNot(e, e.Exec(r.Context(), unseen+"ROLLBACK")) },
		status: 500, problem: "handler-ended-transaction", log: "itself",
	},
	"full disk": {
		prepare: fillDisk,
		spoil:   func(*receivertest.Env, *http.Request) {},
		mend:    func(e *receivertest.Env) { e.MustExec("TRUNCATE ledger") }, // into a new file, on the disk
		status:  500, problem: "commit-failed", log: "53100",
	},
}

// fillDisk lets every COMMIT after an effect write to a table whose file is on a device that is
// always full.
func fillDisk(e *receivertest.Env) {
	e.MustExec(`
		CREATE TABLE ledger (key text);
		CREATE FUNCTION enter() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO ledger VALUES (NEW.key); RETURN NULL; END';
		CREATE CONSTRAINT TRIGGER enters AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION enter()`)
	var dir, file string
	err := e.Pool.QueryRow(e.T.Context(), "SELECT current_setting('data_directory'), pg_relation_filepath('ledger')").Scan(&dir, &file)
	if err == nil {
		err = os.Remove(filepath.Join(dir, file))
	}
	if err == nil {
		err = os.Symlink("/dev/full", filepath.Join(dir, file))
	}
	pgtest.Must(e.T, err)
}

func TestFailedCommitIsNeverAnsweredAsSuccess(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		for name, failure := range failures {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 2)
				t.Parallel()
				var runs atomic.Int64
				e := receivertest.NewEnv(t, f, failure.cfg, func(e *receivertest.Env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						runs.Add(1)
						receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
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
					got := e.Do(e.NewRequest(style, "{}", receivertest.With("Test-Style", style), receivertest.With("Test-Spoil", "yes")))
					receivertest.WantProblem(t, got, failure.status, failure.problem)
					if report := e.WantResult(consumer.ResultCommitFailed); report.Err == nil || report.Status != failure.status {
						t.Errorf("report %+v", report)
					}
					e.WantRows(style, 0, 0)
				}
				if n := int(runs.Load()); n != len(styles) {
					t.Errorf("%d requests ran the handler %d times", len(styles), n)
				}
				if log := e.Logged.String(); strings.Count(log, failure.log) < len(styles) || !strings.Contains(log, "level=ERROR") {
					t.Errorf("logged %s", log)
				}
				if failure.mend != nil {
					failure.mend(e)
				}
				for _, style := range styles {
					retry := func() receivertest.Response {
						return e.Do(e.NewRequest(style, "{}", receivertest.With("Test-Style", style)))
					}
					first := retry()
					receivertest.WantFirst(t, first, first.Status, first.Body)
					if first.Status/100 != 2 {
						t.Errorf("%s: the retry got %d %s", style, first.Status, first.Body)
					}
					if again := retry(); again.Status != first.Status || again.Header.Get(webhook.Replayed) != "true" {
						t.Errorf("%s: the duplicate got %d %v", style, again.Status, again.Header)
					}
					e.WantRows(style, 1, 1)
				}
			})
		}
	})
}

// A handler may write an answer and then end as no handler should. Nothing of it lingers: no lock,
// no transaction, no connection lost.
func TestHandlerThatEndsBadly(t *testing.T) {
	ends := map[string]struct {
		end      func(w http.ResponseWriter)
		answered bool
		log      string
	}{
		"panics":              {func(http.ResponseWriter) { panic("boom") }, true, "boom"},
		"panics with nil":     {func(http.ResponseWriter) { panic(any(nil)) }, true, "nil"},
		"panics with error":   {func(http.ResponseWriter) { panic(io.ErrUnexpectedEOF) }, true, "unexpected EOF"},
		"aborts":              {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, false, ""},
		"exits its goroutine": {func(http.ResponseWriter) { runtime.Goexit() }, false, "goroutine"},
		"status 0":            {func(w http.ResponseWriter) { w.WriteHeader(0) }, true, "invalid WriteHeader code 0"},
		"status 1000":         {func(w http.ResponseWriter) { w.WriteHeader(1000) }, true, "invalid WriteHeader code"},
		"switches protocols":  {func(w http.ResponseWriter) { w.WriteHeader(101) }, true, "switch protocols"},
	}
	answers := map[string]func(w http.ResponseWriter, r *http.Request){"redirects": func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/elsewhere", http.StatusSeeOther)
	}}
	maps.Copy(answers, handlerStyles)
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, c := range ends {
			t.Run(name, func(t *testing.T) {
				testsize.OneIn(t, 3)
				t.Parallel()
				e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
						if style := r.Header.Get("Test-Style"); style != "" {
							answers[style](w, r)
							c.end(w)
						}
						w.WriteHeader(http.StatusNoContent)
					}
				})
				for style := range answers {
					got, err := e.Try(e.NewRequest(style, "{}", receivertest.With("Test-Style", style)))
					switch {
					case !c.answered && err == nil:
						t.Errorf("%s: the client got %d", style, got.Status)
					case c.answered && err != nil:
						t.Errorf("%s: %v", style, err)
					case c.answered:
						receivertest.WantProblem(t, got, 500, "handler-panicked")
					}
					if report := e.WantResult(consumer.ResultFailed); report.Err == nil {
						t.Error("the report has no error")
					}
					e.WantRows(style, 0, 0)
				}
				testkit.Contains(t, "logged", e.Logged.String(), c.log)
				receivertest.WantFirst(t, e.Post("writes nothing", "{}"), 204, "")
				e.WantRows("writes nothing", 1, 1)
			})
		}
	})
}

// http.TimeoutHandler answers for a handler that continues: what that one does afterwards must have
// no effect.
func TestHandlerWorksPastItsTime(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		answered, late := make(chan struct{}), make(chan error, 1)
		e := receivertest.NewEnv(t, f, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Test-Dawdle") == "" {
					receivertest.Effect(e)(w, r)
					return
				}
				receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
				dawdle := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					<-answered
					late <- e.Exec(context.WithoutCancel(r.Context()), "INSERT INTO effect VALUES ('k')")
					io.WriteString(w, "ok")
				})
				http.TimeoutHandler(dawdle, time.Millisecond, "").ServeHTTP(w, r)
			}
		})
		if got := e.Do(e.NewRequest("k", "{}", receivertest.With("Test-Dawdle", "yes"))); got.Status != http.StatusServiceUnavailable {
			t.Errorf("got %d %s", got.Status, got.Body)
		}
		e.WantResult(consumer.ResultFailed)
		close(answered)
		if err := <-late; !errors.Is(err, pgx.ErrTxClosed) && !errors.Is(err, sql.ErrTxDone) {
			t.Errorf("the late statement: %v", err)
		}
		e.WantRows("k", 0, 0)
		receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
		e.WantRows("k", 1, 1)
	})
}
