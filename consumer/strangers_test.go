package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// unread fails the test when it is read.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("the body was read")
	return 0, errors.New("unread")
}

// What no body can make valid is refused before the body is read.
func TestSecurityUnsignedBodiesAreNotRead(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, receivertest.Effect)
	handler := e.Wrap(t, e.DSN, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}})(http.NotFoundHandler())
	for name, change := range map[string]func(http.Header){
		"unsigned":      func(h http.Header) { h.Del(webhook.Signature) },
		"of yesterday":  func(h http.Header) { h.Set(webhook.Timestamp, fmt.Sprint(time.Now().Add(-24*time.Hour).Unix())) },
		"without a key": func(h http.Header) { h.Del(webhook.IdempotencyKey) },
	} {
		r := e.NewRequest("k", "{}")
		change(r.Header)
		r.Body = http.NoBody
		signed := httptest.NewRequest(http.MethodPost, "/", unread{t})
		signed.Header = r.Header
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, signed)
		if answer.Code != 400 && answer.Code != 401 {
			t.Errorf("%s: %d %s", name, answer.Code, answer.Body)
		}
	}
}

// stall opens a connection, sends the head of a request that looks signed and size bytes of its
// body, and no more.
func stall(e *receivertest.Env, size int) net.Conn {
	r := e.NewRequest("stalled", strings.Repeat("x", 1<<20))
	conn, err := net.Dial("tcp", r.URL.Host)
	pgtest.Must(e.T, err)
	e.T.Cleanup(func() { _ = conn.Close() })
	var head strings.Builder
	fmt.Fprintf(&head, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", 1<<20)
	_ = r.Header.Write(&head)
	if _, err := conn.Write([]byte(head.String() + "\r\n" + strings.Repeat("x", size))); err != nil {
		e.T.Fatal(err)
	}
	return conn
}

// Strangers who send all but the end of a body hold a bounded part of the memory, for a bounded
// time, and keep no small event from being taken.
func TestSecurityStalledBodiesAreBounded(t *testing.T) {
	testsize.Long(t)
	const budget = 4 << 20
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Limits: consumer.Limits{BodyTimeout: 2 * time.Second, MaxUnverifiedBytes: budget}}, receivertest.Effect)
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	conns := make([]net.Conn, 100)
	var dialling sync.WaitGroup
	for i := range conns {
		dialling.Go(func() { conns[i] = stall(e, 1<<20-1) })
	}
	dialling.Wait()
	for i := range 20 {
		receivertest.WantFirst(t, e.Post(fmt.Sprint("small ", i), "{}"), 201, fmt.Sprintf(`{"done":"small %d"}`, i))
	}
	runtime.GC()
	runtime.ReadMemStats(&during)
	// Bodies, what grows of one to the other, and 100 connections with their buffers.
	if held := int64(during.HeapAlloc) - int64(before.HeapAlloc); held > 2*budget+100*64<<10 {
		t.Errorf("%d bytes are held, of a budget of %d", held, budget)
	}
	for _, conn := range conns { // each is answered and closed, whatever it waits for
		_ = conn.SetReadDeadline(time.Now().Add(receivertest.Patience))
		answer := make([]byte, 64)
		n, err := conn.Read(answer)
		if text := string(answer[:n]); err != nil && n == 0 && errors.Is(err, context.DeadlineExceeded) || n > 0 && !strings.Contains(text, " 408 ") && !strings.Contains(text, " 503 ") {
			t.Errorf("a stalled request got %q, %v", text, err)
		}
	}
	receivertest.WantFirst(t, e.Post("large", strings.Repeat(" ", 1<<20-2)+"{}"), 201, `{"done":"large"}`)
}

// besiege keeps n connections of strangers busy, each with a request that looks signed, of length
// bytes: it sends part of them, and then what more sends, which returns when the connection is
// closed. Then the stranger comes again.
func besiege(e *receivertest.Env, n, length, part int, more func(net.Conn)) {
	r := e.NewRequest("forged", "another body")
	var head strings.Builder
	fmt.Fprintf(&head, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", length)
	_ = r.Header.Write(&head)
	request := []byte(head.String() + "\r\n" + strings.Repeat("x", part))
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for ctx.Err() == nil {
				conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.URL.Host)
				if err != nil {
					continue
				}
				stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
				if _, err := conn.Write(request); err == nil {
					more(conn)
				}
				stop()
				_ = conn.Close()
			}
		})
	}
	e.T.Cleanup(func() { cancel(); all.Wait() })
}

func silence(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }

// drip sends one byte after the other, slowly.
func drip(conn net.Conn) {
	pause := time.NewTicker(20 * time.Millisecond)
	defer pause.Stop()
	for range pause.C {
		if _, err := conn.Write([]byte("x")); err != nil {
			return
		}
	}
}

// Strangers hold the whole budget with bodies that do not end, and come again whenever one of them
// loses its room. Signed events are answered all the same, although nobody's time runs out.
func TestSecurityEndlessBodiesKeepNoEvent(t *testing.T) {
	t.Parallel()
	const strangers, length = 150, 256 << 10
	for name, more := range map[string]func(net.Conn){"silent": silence, "slow": drip} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var came atomic.Int64
			beset := make(chan struct{})
			dsn := pgtest.New(t, migrations.Inbox)
			cfg := consumer.Config{Limits: consumer.Limits{BodyTimeout: time.Hour, MaxBodyBytes: length, MaxUnverifiedBytes: 2 * length}}
			e := receivertest.StartEnv(t, receivertest.PGX(), dsn, cfg, func(e *receivertest.Env, cfg consumer.Config) http.Handler {
				receive := e.Wrap(t, dsn, cfg)(receivertest.Effect(e))
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.ContentLength == length && came.Add(1) == strangers {
						close(beset)
					}
					receive.ServeHTTP(w, r)
				})
			})
			e.MustExec(receivertest.Schema)
			besiege(e, strangers, length, 100<<10, more)
			<-beset
			for i := range 12 {
				key := fmt.Sprint("signed ", i)
				receivertest.WantFirst(t, e.Post(key, strings.Repeat(" ", 20<<10)+"{}"), 201, `{"done":"`+key+`"}`)
			}
		})
	}
}

// Bodies that together are many times the budget are all read: none waits for another that waits.
// One that lost its room to them, on a slow machine, comes again.
func TestManyLargeBodiesAreAllRead(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, receivertest.Effect)
	large := strings.Repeat(" ", 1<<20-2) + "{}"
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			for {
				r := e.NewRequest(fmt.Sprint("large ", i), large)
				if i%2 == 0 {
					r.ContentLength = -1 // its length is not announced
				}
				got, err := e.Try(r)
				if err == nil && got.Status == 503 && t.Context().Err() == nil {
					continue
				}
				if err != nil || got.Status != 201 {
					t.Errorf("answered %d %s, %v", got.Status, got.Body, err)
				}
				return
			}
		})
	}
	all.Wait()
}

// A request that is refused before its body is read ends, too, when the rest of the body never
// comes.
func TestSecurityRefusedRequestsEnd(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Limits: consumer.Limits{BodyTimeout: 300 * time.Millisecond, MaxBodyBytes: 1 << 16}}, receivertest.Effect)
	for name, head := range map[string]string{"unsigned": "", "too large": ""} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(e.URL, "http://"))
		pgtest.Must(t, err)
		defer conn.Close()
		if name == "too large" {
			var signed strings.Builder
			_ = e.NewRequest("k", "{}").Header.Write(&signed)
			head = signed.String()
		}
		if _, err := fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n%s\r\n", head); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(receivertest.Patience))
		if answer, err := io.ReadAll(conn); err != nil {
			t.Errorf("%s: %v after %q", name, err, answer)
		}
	}
}

// What is left of a refused body is not read: the connection is closed instead, once the client can
// have read the answer.
func TestSecurityRefusedBodiesAreNotDrained(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Limits: consumer.Limits{MaxBodyBytes: 1 << 16}}, receivertest.Effect)
	unsigned := e.NewRequest("k", strings.Repeat("x", 200_000))
	unsigned.Header.Del(webhook.Signature)
	for status, r := range map[int]*http.Request{401: unsigned, 413: e.NewRequest("k", strings.Repeat("x", 200_000))} {
		answer, err := e.Client.Do(r)
		pgtest.Must(t, err)
		text, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if answer.StatusCode != status || err != nil || !strings.Contains(string(text), "urn:outbox-relay:problem:") || !answer.Close {
			t.Errorf("answered %d %s, %v; connection closed: %t", answer.StatusCode, text, err, answer.Close)
		}
	}
}

// A handler that hangs loses its transaction, so that the event can be tried again.
func TestHungHandlerLosesItsTransaction(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		hung := make(chan struct{})
		var once sync.Once
		release := func() { once.Do(func() { close(hung) }) }
		defer release()
		ended := make(chan error, 1)
		e := receivertest.NewEnv(t, f, consumer.Config{Limits: consumer.Limits{HandlerTimeout: 2 * time.Second, CommitTimeout: 2 * time.Second}}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Test-Hang") != "" {
					mustNot(e, e.Exec(r.Context(), "INSERT INTO effect VALUES ('hung')"))
					<-r.Context().Done()
					ended <- context.Cause(r.Context())
					<-hung
				}
				receivertest.Effect(e)(w, r)
			}
		})
		first := make(chan receivertest.Response, 1)
		go func() {
			answer, _ := e.Try(e.NewRequest("k", "{}", receivertest.With("Test-Hang", "yes")))
			first <- answer
		}()
		testkit.ErrorContains(t, "the handler's context ended with", <-ended, "HandlerTimeout")
		e.Await(`SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')`)
		receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
		release()
		if answer := <-first; answer.Status != 500 {
			t.Errorf("the hung handler's request got %d %s", answer.Status, answer.Body)
		}
		e.WantRows("k", 1, 1)
		e.WantRows("hung", 0, 0)
	})
}

// A duplicate that says that the event may come later than was said before is remembered for so
// long.
func TestLaterNotAfterIsRemembered(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		notAfter := func(at time.Time) func(http.Header) {
			return receivertest.With(webhook.NotAfter, at.UTC().Format(time.RFC3339))
		}
		soon := time.Now().Add(time.Hour).Truncate(time.Second)
		for _, step := range []struct{ said, kept time.Duration }{{0, 0}, {24 * time.Hour, 24 * time.Hour}, {time.Minute, 24 * time.Hour}} {
			if got := e.Do(e.NewRequest("k", "{}", notAfter(soon.Add(step.said)))); got.Status != 201 {
				t.Errorf("answered %d %s", got.Status, got.Body)
			}
			var kept time.Time
			if err := e.Pool.QueryRow(t.Context(), `SELECT not_after FROM processed_events`).Scan(&kept); err != nil || !kept.Equal(soon.Add(step.kept)) {
				t.Errorf("after %v: %v, %v, want %v", step.said, kept, err, soon.Add(step.kept))
			}
		}
		e.WantRows("k", 1, 1)
	})
}

// What a handler's error says is for relays and the log, not for third parties, nor for those who
// need not sign. And what of a relay's headers a foreign signature does not cover does not reach
// the handler.
func TestSecurityForeignSendersLearnNothing(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		const internals = `relation "shipments_internal" does not exist`
		verify := func(header http.Header, _ []byte, _ time.Time) (consumer.Event, error) {
			return consumer.Event{IdempotencyKey: header.Get("Their-Id")}, nil
		}
		seen := receivertest.NewEnv(t, f, consumer.Config{Verify: consumer.Verify{Custom: verify}}, func(*receivertest.Env) http.HandlerFunc {
			return func(_ http.ResponseWriter, r *http.Request) {
				for _, name := range []string{webhook.IdempotencyKey, webhook.EventType, webhook.OrderingKey} {
					if got := r.Header.Get(name); got != "" {
						t.Errorf("%s reaches the handler: %q", name, got)
					}
				}
				if r.Header.Get("ce-type") == "" {
					t.Error("what Verify.Custom may have proven does not reach the handler")
				}
			}
		})
		receivertest.WantFirst(t, seen.Do(seen.NewRequest("forged", "{}", receivertest.With("Their-Id", "k"), receivertest.With("ce-type", "t"), receivertest.With(webhook.OrderingKey, "forged"))), 200, "")
		failing := func(*receivertest.Env) receivertest.HandlerFunc {
			return func(_ context.Context, event consumer.Event) error {
				switch event.IdempotencyKey {
				case "permanent":
					return consumer.Permanent(errors.New(internals))
				case "later":
					return consumer.DependencyDown(errors.New(internals))
				}
				return errors.New(internals)
			}
		}
		e := receivertest.NewHandlerEnv(t, f, consumer.Config{Verify: consumer.Verify{Custom: verify}}, failing)
		unsigned := receivertest.NewHandlerEnvAt(t, f, e.DSN, consumer.Config{Verify: consumer.Verify{AllowUnsigned: true}}, failing)
		for key, status := range map[string]int{"permanent": 422, "later": 503, "failed": 500} {
			r := e.NewRequest("forged", "{}", receivertest.With("Their-Id", key), receivertest.With(webhook.OrderingKey, "forged"))
			if got := e.Do(r); got.Status != status || strings.Contains(got.Body, "shipments_internal") {
				t.Errorf("%s: %d %s", key, got.Status, got.Body)
			}
			if got := unsigned.Post(key, "{}"); got.Status != status || strings.Contains(got.Body, "shipments_internal") {
				t.Errorf("%s, unsigned: %d %s", key, got.Status, got.Body)
			}
		}
		testkit.Contains(t, "the log", e.Logged.String(), "shipments_internal")
	})
}

// Secrets stay in a form that cannot be printed.
func TestSecuritySecretsAreNotPrinted(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, "postgres://stranger@127.0.0.1:1/none")
	middleware := receivertest.Must(consumer.Middleware(pool, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}))
	receivertest.WantNoSecret(t, middleware(http.NotFoundHandler()))
}

// Any login may take the advisory lock of a key that it knows. No event waits for it.
func TestSecurityStrangersLockKeepsNoEvent(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.StrangerLocksKey()
		receivertest.WantFirst(t, e.Post("k", "{}"), 201, `{"done":"k"}`)
		receivertest.WantReplayed(t, e.Post("k", "{}"), 201, "")
		e.WantRows("k", 1, 1)
	})
}

// Receivers in two schemas of one database know nothing of each other, also while both work on
// events of one key.
func TestReceiversInTwoSchemas(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		dsn := pgtest.New(t, migrations.Inbox)
		one := receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, receivertest.Effect)
		one.MustExec(receivertest.Schema)
		one.MustExec(`CREATE SCHEMA two; CREATE TABLE two.processed_events (LIKE processed_events INCLUDING ALL); CREATE TABLE two.effect (key text);
			CREATE TABLE two.inbox_forgotten (LIKE inbox_forgotten INCLUDING ALL);
			CREATE FUNCTION two.inbox_reset() RETURNS boolean LANGUAGE sql AS 'SELECT public.inbox_reset()'`)
		entered, leave := make(chan struct{}), make(chan struct{})
		two := receivertest.NewEnvAt(t, f, receivertest.WithSetting(dsn, "search_path", "two"), consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				close(entered)
				<-leave
				receivertest.Effect(e)(w, r)
			}
		})
		slow := make(chan receivertest.Response, 1)
		go func() {
			got, _ := two.Try(two.NewRequest("k", "{}"))
			slow <- got
		}()
		<-entered
		receivertest.WantFirst(t, one.Post("k", "{}"), 201, `{"done":"k"}`)
		close(leave)
		receivertest.WantFirst(t, <-slow, 201, `{"done":"k"}`)
		one.WantRows("k", 1, 1)
		two.WantRows("k", 1, 1)
	})
}
