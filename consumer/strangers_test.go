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
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
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
	e := newEnv(t, flavours[0], consumer.Config{}, effect)
	handler := e.wrap(t, e.dsn, consumer.Config{Receiver: "test", Secrets: []string{secretText}})(http.NotFoundHandler())
	for name, change := range map[string]func(http.Header){
		"unsigned":      func(h http.Header) { h.Del(webhook.Signature) },
		"of yesterday":  func(h http.Header) { h.Set(webhook.Timestamp, fmt.Sprint(time.Now().Add(-24*time.Hour).Unix())) },
		"without a key": func(h http.Header) { h.Del(webhook.IdempotencyKey) },
	} {
		r := e.newRequest("k", "{}")
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

// stall opens a connection, sends the head of a request that looks signed and size bytes of its body, and no more.
func stall(e *env, size int) net.Conn {
	r := e.newRequest("stalled", strings.Repeat("x", 1<<20))
	conn, err := net.Dial("tcp", r.URL.Host)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = conn.Close() })
	var head strings.Builder
	fmt.Fprintf(&head, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", 1<<20)
	_ = r.Header.Write(&head)
	if _, err := conn.Write([]byte(head.String() + "\r\n" + strings.Repeat("x", size))); err != nil {
		e.t.Fatal(err)
	}
	return conn
}

// Strangers who send all but the end of a body hold a bounded part of the memory, for a bounded time, and keep no small event
// from being taken.
func TestSecurityStalledBodiesAreBounded(t *testing.T) {
	testsize.Long(t)
	const budget = 4 << 20
	e := newEnv(t, flavours[0], consumer.Config{BodyTimeout: 2 * time.Second, MaxUnverifiedBytes: budget}, effect)
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
		wantFirst(t, e.post(fmt.Sprint("small ", i), "{}"), 201, fmt.Sprintf(`{"done":"small %d"}`, i))
	}
	runtime.GC()
	runtime.ReadMemStats(&during)
	// Bodies, what grows of one to the other, and 100 connections with their buffers.
	if held := int64(during.HeapAlloc) - int64(before.HeapAlloc); held > 2*budget+100*64<<10 {
		t.Errorf("%d bytes are held, of a budget of %d", held, budget)
	}
	for _, conn := range conns { // each is answered and closed, whatever it waits for
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		answer := make([]byte, 64)
		n, err := conn.Read(answer)
		if text := string(answer[:n]); err != nil && n == 0 && errors.Is(err, context.DeadlineExceeded) || n > 0 && !strings.Contains(text, " 408 ") && !strings.Contains(text, " 503 ") {
			t.Errorf("a stalled request got %q, %v", text, err)
		}
	}
	wantFirst(t, e.post("large", strings.Repeat(" ", 1<<20-2)+"{}"), 201, `{"done":"large"}`)
}

// A request that is refused before its body is read ends, too, when the rest of the body never comes.
func TestSecurityRefusedRequestsEnd(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{BodyTimeout: 300 * time.Millisecond, MaxBodyBytes: 1 << 16}, effect)
	for name, head := range map[string]string{"unsigned": "", "too large": ""} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if name == "too large" {
			var signed strings.Builder
			_ = e.newRequest("k", "{}").Header.Write(&signed)
			head = signed.String()
		}
		if _, err := fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n%s\r\n", head); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		if answer, err := io.ReadAll(conn); err != nil {
			t.Errorf("%s: %v after %q", name, err, answer)
		}
	}
}

// What is left of a refused body is not read: the connection is closed instead, once the client can have read the answer.
func TestSecurityRefusedBodiesAreNotDrained(t *testing.T) {
	t.Parallel()
	e := newEnv(t, flavours[0], consumer.Config{MaxBodyBytes: 1 << 16}, effect)
	unsigned := e.newRequest("k", strings.Repeat("x", 200_000))
	unsigned.Header.Del(webhook.Signature)
	for status, r := range map[int]*http.Request{401: unsigned, 413: e.newRequest("k", strings.Repeat("x", 200_000))} {
		answer, err := e.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if answer.StatusCode != status || err != nil || !strings.Contains(string(text), "urn:outbox-relay:problem:") || !answer.Close {
			t.Errorf("answered %d %s, %v; connection closed: %t", answer.StatusCode, text, err, answer.Close)
		}
	}
}

// A handler that hangs loses its transaction, so that the event can be tried again.
func TestHungHandlerLosesItsTransaction(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		hung := make(chan struct{})
		var once sync.Once
		release := func() { once.Do(func() { close(hung) }) }
		defer release()
		ended := make(chan error, 1)
		e := newEnv(t, f, consumer.Config{HandlerTimeout: 200 * time.Millisecond, CommitTimeout: 300 * time.Millisecond}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Test-Hang") != "" {
					mustNot(e, e.exec(r.Context(), "INSERT INTO effect VALUES ('hung')"))
					<-r.Context().Done()
					ended <- context.Cause(r.Context())
					<-hung
				}
				effect(e)(w, r)
			}
		})
		first := make(chan response, 1)
		go func() {
			answer, _ := e.try(e.newRequest("k", "{}", with("Test-Hang", "yes")))
			first <- answer
		}()
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "HandlerTimeout") {
			t.Errorf("the handler's context ended with %v", err)
		}
		e.await(`SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')`)
		wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
		release()
		if answer := <-first; answer.status != 500 {
			t.Errorf("the hung handler's request got %d %s", answer.status, answer.body)
		}
		e.wantRows("k", 1, 1)
		e.wantRows("hung", 0, 0)
	})
}

// A duplicate that says that the event may come later than was said before is remembered for so long.
func TestLaterNotAfterIsRemembered(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		notAfter := func(at time.Time) func(http.Header) { return with(webhook.NotAfter, at.UTC().Format(time.RFC3339)) }
		soon := time.Now().Add(time.Hour).Truncate(time.Second)
		for _, step := range []struct{ said, kept time.Duration }{{0, 0}, {24 * time.Hour, 24 * time.Hour}, {time.Minute, 24 * time.Hour}} {
			if got := e.do(e.newRequest("k", "{}", notAfter(soon.Add(step.said)))); got.status != 201 {
				t.Errorf("answered %d %s", got.status, got.body)
			}
			var kept time.Time
			if err := e.pool.QueryRow(t.Context(), `SELECT not_after FROM processed_events`).Scan(&kept); err != nil || !kept.Equal(soon.Add(step.kept)) {
				t.Errorf("after %v: %v, %v, want %v", step.said, kept, err, soon.Add(step.kept))
			}
		}
		e.wantRows("k", 1, 1)
	})
}

// What a handler's error says is for relays and the log, not for third parties; and what of a relay's headers a foreign
// signature does not cover does not reach the handler.
func TestSecurityForeignSendersLearnNothing(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		const internals = `relation "shipments_internal" does not exist`
		verify := func(header http.Header, _ []byte, _ time.Time) (consumer.Event, error) {
			return consumer.Event{Key: header.Get("Their-Id")}, nil
		}
		seen := newEnv(t, f, consumer.Config{Verify: verify}, func(*env) http.HandlerFunc {
			return func(_ http.ResponseWriter, r *http.Request) {
				for _, name := range []string{webhook.IdempotencyKey, webhook.EventType, webhook.OrderingKey} {
					if got := r.Header.Get(name); got != "" {
						t.Errorf("%s reaches the handler: %q", name, got)
					}
				}
			}
		})
		wantFirst(t, seen.do(seen.newRequest("forged", "{}", with("Their-Id", "k"), with(webhook.OrderingKey, "forged"))), 200, "")
		e := newHandlerEnv(t, f, consumer.Config{Verify: verify}, func(*env) handlerFunc {
			return func(_ context.Context, event consumer.Event) error {
				switch event.Key {
				case "permanent":
					return consumer.Permanent(errors.New(internals))
				case "later":
					return consumer.DependencyDown(errors.New(internals))
				}
				return errors.New(internals)
			}
		})
		for key, status := range map[string]int{"permanent": 422, "later": 503, "failed": 500} {
			r := e.newRequest("forged", "{}", with("Their-Id", key), with(webhook.OrderingKey, "forged"))
			if got := e.do(r); got.status != status || strings.Contains(got.body, "shipments_internal") {
				t.Errorf("%s: %d %s", key, got.status, got.body)
			}
		}
		if !strings.Contains(e.logged.String(), "shipments_internal") {
			t.Errorf("the log says %s", e.logged)
		}
	})
}

// The same for those who need not sign.
func TestSecurityUnsignedSendersLearnNothing(t *testing.T) {
	t.Parallel()
	e := newHandlerEnv(t, flavours[0], consumer.Config{AllowUnsigned: true}, func(*env) handlerFunc {
		return func(context.Context, consumer.Event) error {
			return errors.New(`relation "shipments_internal" does not exist`)
		}
	})
	if got := e.do(e.newRequest("k", "{}")); got.status != http.StatusInternalServerError || strings.Contains(got.body, "shipments_internal") {
		t.Errorf("%d %s", got.status, got.body)
	}
	if !strings.Contains(e.logged.String(), "shipments_internal") {
		t.Errorf("the log says %s", e.logged)
	}
}

// Secrets stay in a form that cannot be printed.
func TestSecuritySecretsAreNotPrinted(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	in := consumer.Must(inbox.New(p.pool, inbox.Config{
		Config: consumer.Config{Receiver: "test", Secrets: []string{secretText}},
		Handle: func(context.Context, pgx.Tx, consumer.Event) error { return nil },
	}))
	middleware := consumer.Must(consumer.Middleware(p.pool, consumer.Config{Receiver: "test", Secrets: []string{secretText}}))(http.NotFoundHandler())
	for _, verb := range []string{"%v", "%+v", "%#v"} {
		for _, value := range []any{in, middleware, in.Handler()} {
			if text := fmt.Sprintf(verb, value); strings.Contains(text, strings.TrimPrefix(secretText, "whsec_")) || strings.Contains(text, "b3V0Ym94") {
				t.Errorf("%s of %T prints a secret", verb, value)
			}
		}
	}
}

// Who forgot the migrations is told so.
func TestMissingTablesAreExplained(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		e.mustExec(`DROP TABLE processed_events CASCADE`)
		wantProblem(t, e.post("k", "{}"), 503, "database-unavailable")
		if !strings.Contains(e.logged.String(), "outbox-relay migrate up --set inbox") {
			t.Errorf("logged %s", e.logged)
		}
	})
}

// Any login may take the advisory lock of a key that it knows. No event waits for it.
func TestSecurityStrangersLockKeepsNoEvent(t *testing.T) {
	lock := func(e *env) {
		login := "stranger_" + row[string](e, `SELECT current_database()`)
		e.mustExec(`CREATE ROLE ` + login + ` LOGIN`)
		stranger, err := pgx.Connect(e.t.Context(), withSetting(e.dsn, "user", login))
		if err != nil {
			e.t.Fatal(err)
		}
		e.t.Cleanup(func() {
			_ = stranger.Close(context.Background())
			_, _ = e.pool.Exec(context.Background(), `DROP ROLE `+login)
		})
		oid := row[int64](e, `SELECT 'processed_events'::regclass::oid::bigint`)
		if _, err := stranger.Exec(e.t.Context(), `SELECT pg_advisory_lock(hashtextextended(E'test\noutbox\nk', 122550254464888 # $1::bigint))`, oid); err != nil {
			e.t.Fatal(err)
		}
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		lock(e)
		wantFirst(t, e.post("k", "{}"), 201, `{"done":"k"}`)
		wantReplayed(t, e.post("k", "{}"), 201, "")
		e.wantRows("k", 1, 1)
	})
	p := newInbox(t, inbox.Config{})
	lock(p.env)
	if got := p.post("k", "{}"); got.status != http.StatusAccepted {
		t.Errorf("the inbox answered %d %s", got.status, got.body)
	}
}

// row returns the only value of a query.
func row[T any](e *env, query string) (value T) {
	e.t.Helper()
	if err := e.pool.QueryRow(e.t.Context(), query).Scan(&value); err != nil {
		e.t.Fatalf("%s: %v", query, err)
	}
	return value
}

// Receivers in two schemas of one database know nothing of each other, also while both work on events of one key.
func TestReceiversInTwoSchemas(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		dsn := pgtest.New(t, migrations.Inbox)
		one := newEnvAt(t, f, dsn, consumer.Config{}, effect)
		one.mustExec(schema)
		one.mustExec(`CREATE SCHEMA two; CREATE TABLE two.processed_events (LIKE processed_events INCLUDING ALL); CREATE TABLE two.effect (key text);
			CREATE TABLE two.inbox_forgotten (LIKE inbox_forgotten INCLUDING ALL)`)
		entered, leave := make(chan struct{}), make(chan struct{})
		two := newEnvAt(t, f, withSetting(dsn, "search_path", "two"), consumer.Config{}, func(e *env) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				close(entered)
				<-leave
				effect(e)(w, r)
			}
		})
		slow := make(chan response, 1)
		go func() {
			got, _ := two.try(two.newRequest("k", "{}"))
			slow <- got
		}()
		<-entered
		wantFirst(t, one.post("k", "{}"), 201, `{"done":"k"}`)
		close(leave)
		wantFirst(t, <-slow, 201, `{"done":"k"}`)
		one.wantRows("k", 1, 1)
		two.wantRows("k", 1, 1)
	})
}
