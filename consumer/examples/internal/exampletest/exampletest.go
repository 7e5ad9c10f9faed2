// Package exampletest runs an example as what it is, a program in its own process, and sends it
// what a relay would.
package exampletest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Secret is what the examples are given as FINANCE_SECRET.
const Secret = receivertest.SecretText

// asProgram, in the environment, makes the test binary be the example.
const asProgram = "EXAMPLE_RUNS"

// patience ends a test that would hang. No assertion depends on it.
const patience = 2 * time.Minute

// Main is the body of an example's TestMain. program is the example's main.
func Main(m *testing.M, program func()) {
	if os.Getenv(asProgram) != "" {
		program()
		return
	}
	pgtest.RunTests(m)
}

// Example is one that runs.
type Example struct {
	Pool *pgxpool.Pool // for assertions

	t       testing.TB
	env     []string
	url     string
	client  *http.Client
	log     testkit.Buffer
	process *testkit.Child // nil when it has been stopped
}

// listening finds what an example logs when it is ready: its address, or the log that it reads.
var listening = regexp.MustCompile(`\b(?:listening address|reading (?:stream|topics))=(\S+)`)

// Start runs the example at its own database, with the receiver's tables and those that schema
// makes, and env beside DATABASE_URL and FINANCE_SECRET. When t ends, the example gets SIGTERM and
// has to exit with 0.
func Start(t testing.TB, schema string, env ...string) *Example {
	t.Helper()
	dsn := pgtest.New(t, migrations.Inbox)
	e := &Example{
		Pool:   pgtest.Pool(t, dsn),
		t:      t,
		env:    append(env, asProgram+"=1", "LISTEN=127.0.0.1:0", "DATABASE_URL="+dsn, "FINANCE_SECRET="+Secret),
		client: &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}},
	}
	if _, err := e.Pool.Exec(t.Context(), schema); err != nil {
		t.Fatal(err)
	}
	e.Again()
	t.Cleanup(e.Stop)
	return e
}

// Again starts the example once more, after [Example.Stop].
func (e *Example) Again() {
	e.t.Helper()
	program, err := os.Executable()
	pgtest.Must(e.t, err)
	cmd := exec.Command(program) //nolint:gosec // this very test binary
	cmd.Env = append(os.Environ(), e.env...)
	cmd.Stdout = os.Stdout
	address := make(chan string, 1)
	e.process, err = testkit.StartChild(cmd, cmd.StderrPipe, func(line string) {
		_, _ = io.WriteString(&e.log, line+"\n")
		if found := listening.FindStringSubmatch(line); found != nil {
			address <- found[1]
		}
	})
	pgtest.Must(e.t, err)
	select {
	case found := <-address:
		e.url = "http://" + found
		return
	case <-e.process.Ended:
		e.t.Errorf("the example ended at once: %v", e.process.Err)
	case <-time.After(patience):
		e.t.Error("the example does not listen")
	}
	e.Stop()
	e.t.FailNow()
}

// Stop asks the example to end, and sees that it does so in good order. An example that has been
// stopped stays so.
func (e *Example) Stop() {
	e.t.Helper()
	if e.process == nil {
		return
	}
	_ = e.process.Cmd.Process.Signal(syscall.SIGTERM) // unless it has ended by itself, which Err reports
	select {
	case <-e.process.Ended:
		if err := e.process.Err; err != nil {
			e.t.Errorf("the example ended with %v", err)
		}
	case <-time.After(patience):
		e.t.Error("the example does not stop")
		_ = e.process.Cmd.Process.Kill()
		<-e.process.Ended
	}
	e.process = nil
	if e.t.Failed() {
		e.t.Logf("the example said:\n%s", &e.log)
	}
}

// Answer is one that has been read to its end.
type Answer = receivertest.Response

// Send sends r, a request made by [Example.Request] or by the test itself.
func (e *Example) Send(r *http.Request) Answer {
	e.t.Helper()
	answer, err := e.client.Do(r)
	pgtest.Must(e.t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	pgtest.Must(e.t, err)
	return Answer{Status: answer.StatusCode, Header: answer.Header, Body: string(body)}
}

// Request makes an unsigned one.
func (e *Example) Request(path, body string) *http.Request {
	e.t.Helper()
	r, err := http.NewRequestWithContext(e.t.Context(), http.MethodPost, e.url+path, strings.NewReader(body))
	pgtest.Must(e.t, err)
	r.GetBody = nil // the transport must not repeat a request on its own
	r.Header.Set("Content-Type", "application/json")
	return r
}

// Deliver sends what a relay would send for an event. change may add to the event.
func (e *Example) Deliver(path, eventType, key, body string, change ...func(*consumer.Event)) Answer {
	e.t.Helper()
	return e.deliver(Secret, path, eventType, key, body, change...)
}

func (e *Example) deliver(secret, path, eventType, key, body string, change ...func(*consumer.Event)) Answer {
	e.t.Helper()
	event := consumer.Event{IdempotencyKey: key, Type: eventType, Payload: []byte(body)}
	for _, f := range change {
		f(&event)
	}
	r, err := consumertest.NewRequest(e.t.Context(), e.url+path, event, secret)
	pgtest.Must(e.t, err)
	return e.Send(r)
}

// Count returns the number that a query asks for.
func (e *Example) Count(query string, args ...any) (n int) {
	e.t.Helper()
	if err := e.Pool.QueryRow(e.t.Context(), query, args...).Scan(&n); err != nil {
		e.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// Await asks the database until query is true.
func (e *Example) Await(query string, args ...any) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	for reached := false; !reached; {
		if err := e.Pool.QueryRow(ctx, query, args...).Scan(&reached); err != nil {
			e.t.Fatalf("%s: %v", query, err)
		}
	}
}

// PassesDrill tries the example at path with every check of the command drill.
func (e *Example) PassesDrill(path string) {
	e.t.Helper()
	receivertest.Drill(e.t, e.url+path, e.Pool, receivertest.OtherText, Secret)
}

// Invoices is the schema of the examples: what they write, and a rule that a handler can break.
const Invoices = `
CREATE TABLE shipments (invoice text PRIMARY KEY, total numeric NOT NULL CHECK (total > 0));
CREATE TABLE addresses (customer text PRIMARY KEY, address text NOT NULL)`

// Invoice is a payload that the examples understand.
func Invoice(number, total string) string {
	return fmt.Sprintf(`{"invoice":%q,"total":%q}`, number, total)
}

// TakesEffectOnce holds an example that records shipments of invoices at path to what every
// receiver owes.
func (e *Example) TakesEffectOnce(path string) {
	t := e.t
	t.Helper()
	deliver := func(what, secret, key, body string, statuses ...int) Answer {
		t.Helper()
		answer := e.deliver(secret, path, "invoice.created", key, body)
		for _, status := range statuses {
			if answer.Status == status {
				return answer
			}
		}
		t.Errorf("%s: answered %d %q, want one of %d", what, answer.Status, answer.Body, statuses)
		return answer
	}
	shipped := func(what, invoice string, want int) {
		t.Helper()
		if n := e.Count("SELECT count(*) FROM shipments WHERE invoice = $1", invoice); n != want {
			t.Errorf("%s: %d shipments, want %d", what, n, want)
		}
	}

	first := deliver("first time", Secret, "k1", Invoice("INV-1", "19.90"), 200, 201, 204)
	shipped("first time", "INV-1", 1)
	again := deliver("again", Secret, "k1", Invoice("INV-1", "19.90"), first.Status)
	if again.Header.Get("Idempotency-Replayed") != "true" || again.Body != first.Body {
		t.Errorf("again: %+v, first %+v", again, first)
	}
	shipped("again", "INV-1", 1)
	deliver("another body", Secret, "k1", Invoice("INV-2", "19.90"), 422)
	deliver("another secret", receivertest.OtherText, "k2", Invoice("INV-2", "19.90"), 401)
	shipped("refused", "INV-2", 0)

	// What the handler cannot do is rolled back with the memory of it, so that it succeeds once the
	// cause is gone.
	deliver("a broken rule", Secret, "k3", Invoice("INV-3", "-1"), 500, 503)
	shipped("a broken rule", "INV-3", 0)
	if n := e.Count("SELECT count(*) FROM processed_events WHERE idempotency_key = 'k3'"); n != 0 {
		t.Errorf("a broken rule: the event counts as processed")
	}
	if _, err := e.Pool.Exec(t.Context(), "ALTER TABLE shipments DROP CONSTRAINT shipments_total_check"); err != nil {
		t.Fatal(err)
	}
	deliver("a rule fixed", Secret, "k3", Invoice("INV-3", "-1"), 200, 201, 204)
	shipped("a rule fixed", "INV-3", 1)

	for _, malformed := range []string{`{"invoice":`, `[]`} {
		answer := deliver("malformed "+malformed, Secret, "k4 "+malformed, malformed, 400, 422, 500)
		if answer.Status == 500 {
			t.Errorf("%s: answered 500, so the relay repeats what will never be well formed", malformed)
		}
	}
	if n := e.Count("SELECT count(*) FROM shipments"); n != 2 {
		t.Errorf("%d shipments in the end, want 2", n)
	}
}

// ReadsOnce holds an example that records shipments of invoices from a log to what every reader
// owes, and stops it in the middle of its work. publish writes a message with the headers and body
// that a relay writes.
func (e *Example) ReadsOnce(publish func(header http.Header, body []byte)) {
	t := e.t
	t.Helper()
	send := func(number, total string) {
		t.Helper()
		event := consumer.Event{IdempotencyKey: "key-" + number, Type: "invoice.created", Payload: []byte(Invoice(number, total))}
		r, err := consumertest.NewRequest(t.Context(), "http://log.test", event, Secret)
		pgtest.Must(t, err)
		publish(r.Header, event.Payload)
	}
	const shipped = "SELECT EXISTS (SELECT FROM shipments WHERE invoice = $1)"

	send("INV-1", "19.90")
	send("INV-1", "19.90")
	send("INV-2", "-1") // breaks a rule, so it comes again
	e.Await(shipped, "INV-1")
	if _, err := e.Pool.Exec(t.Context(), "ALTER TABLE shipments DROP CONSTRAINT shipments_total_check"); err != nil {
		t.Fatal(err)
	}
	e.Await(shipped, "INV-2")

	// SIGTERM comes while a handler waits for a lock: it ends, and what it has done is
	// acknowledged.
	tx, err := e.Pool.Begin(t.Context())
	pgtest.Must(t, err)
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), "LOCK TABLE shipments"); err != nil {
		t.Fatal(err)
	}
	send("INV-3", "1")
	e.Await("SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'shipments'::regclass AND NOT granted)")
	_ = e.process.Cmd.Process.Signal(syscall.SIGTERM) // Stop sees that it ends
	pgtest.Must(t, tx.Rollback(t.Context()))
	e.Stop()
	if n := e.Count("SELECT count(*) FROM shipments"); n != 3 {
		t.Errorf("%d shipments in the end, want 3", n)
	}
}
