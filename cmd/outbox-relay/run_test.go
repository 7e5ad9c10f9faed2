package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// started is an outbox-relay run that goes on beside the test.
type started struct {
	signals chan os.Signal
	stderr  *awaited
	code    chan int
}

func start(t *testing.T, env []string, args ...string) started {
	t.Helper()
	s := started{signals: make(chan os.Signal, 2), stderr: &awaited{written: make(chan struct{}, 1)}, code: make(chan int, 1)}
	go func() {
		m := Main{Env: env, Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: s.stderr, Signals: s.signals}
		s.code <- m.Run(append([]string{"run"}, args...))
	}()
	return s
}

// awaited is a buffer whose content a test can wait for.
type awaited struct {
	buffer
	written chan struct{}
}

func (a *awaited) Write(p []byte) (int, error) {
	n, err := a.buffer.Write(p)
	select {
	case a.written <- struct{}{}:
	default:
	}
	return n, err
}

func (a *awaited) wait(t *testing.T, text string) {
	t.Helper()
	for !strings.Contains(a.String(), text) {
		select {
		case <-a.written:
		case <-t.Context().Done():
			t.Fatalf("%q never came:\n%s", text, a.String())
		}
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	posted := make(chan *http.Request, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Idempotency-Key") == "first" {
			posted <- r
		}
	}))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{}', 'first')")
	env := []string{
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL + "/in?token=hunter2", "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_NAME=r1", "OUTBOX_LEESE=1m",
	}
	s := start(t, env, "--poll-interval=1s")
	if r := <-posted; r.Header.Get("Webhook-Signature") == "" {
		t.Error("the request is not signed")
	}
	command(env[:4], "status", "--healthcheck")
	s.signals <- syscall.SIGTERM
	if code := <-s.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
	if status := query[string](t, db, "SELECT status FROM outbox_delivery"); status != "delivered" {
		t.Errorf("the delivery is %s", status)
	}

	var start map[string]any
	warning, rest, _ := strings.Cut(s.stderr.String(), "\n")
	first, _, _ := strings.Cut(rest, "\n")
	if !strings.Contains(warning, `"level":"warn"`) || !strings.Contains(warning, `OUTBOX_LEESE: is not a setting of this version; did you mean OUTBOX_LEASE?"`) {
		t.Errorf("the warning is %s", warning)
	}
	if err := json.Unmarshal([]byte(first), &start); err != nil {
		t.Fatalf("%s: %v", first, err)
	}
	at, err := time.Parse("2006-01-02T15:04:05.000Z", start["time"].(string))
	if err != nil || at.IsZero() {
		t.Errorf("time is %v: %v", start["time"], err)
	}
	host := strings.TrimPrefix(receiver.URL, "http://")
	if start["msg"] != "starting" || start["level"] != "info" || start["name"] != "r1" || start["version"] == "" || start["destinations"].([]any)[0] != "default="+host {
		t.Errorf("the first line is %s", first)
	}
	if strings.Contains(s.stderr.String(), "hunter2") {
		t.Errorf("a token leaks:\n%s", s.stderr)
	}
}

// The relay waits for a database, and a signal ends the wait.
func TestRunWithoutDatabase(t *testing.T) {
	t.Parallel()
	s := start(t, []string{"OUTBOX_DATABASE_URL=postgres://u:hunter2@127.0.0.1:1/db", twoSettings[1]}, "--log-format=console")
	s.stderr.wait(t, "connection refused")
	s.signals <- syscall.SIGINT
	if code := <-s.code; code != 0 || strings.Contains(s.stderr.String(), "hunter2") {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
}

// A second signal does not wait for a receiver that never answers.
func TestSecondSignal(t *testing.T) {
	t.Parallel()
	inFlight, release := make(chan struct{}, 1), make(chan struct{})
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		inFlight <- struct{}{}
		<-release
	}))
	defer receiver.Close()
	defer close(release)
	dsn := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, dsn), "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{}', 'first')")
	s := start(t, []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL}, "--drain-timeout=24h", "--timeout=1h", "--lease=2h")
	<-inFlight
	s.signals <- syscall.SIGTERM
	s.stderr.wait(t, `"stopping"`)
	s.signals <- syscall.SIGTERM
	code := <-s.code
	if want := "outbox-relay: a second signal cut off requests in flight; they will be sent again\n"; code != exitInterrupted || !strings.HasSuffix(s.stderr.String(), want) {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
}

// Nobody reads the log any more: deliveries go on.
func TestRunWithBrokenLog(t *testing.T) {
	t.Parallel()
	posted := make(chan struct{}, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { posted <- struct{}{} }))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, dsn), "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{}', 'first')")
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := reader.Close(); err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	signals, code := make(chan os.Signal, 1), make(chan int, 1)
	go func() {
		m := Main{Env: []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL}, Stdout: writer, Stderr: writer, Signals: signals}
		code <- m.Run([]string{"run", "--log-level=debug"})
	}()
	<-posted
	signals <- syscall.SIGTERM
	if code := <-code; code != 0 {
		t.Errorf("exit code %d", code)
	}
}
