package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// allowSuperuser lets a relay work as the server's superuser: other tests have made logins there.
const allowSuperuser = "OUTBOX_DATABASE_ALLOW_SUPERUSER=true"

// started is an outbox-relay run that continues beside the test.
type started struct {
	signals chan os.Signal
	hangups chan os.Signal
	stderr  *awaited
	code    chan int
}

func start(t testing.TB, env []string, args ...string) started {
	t.Helper()
	for _, setting := range []string{"OUTBOX_METRICS_LISTEN=", "OUTBOX_ADMIN_LISTEN="} {
		if !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, setting) }) {
			env = append(slices.Clone(env), setting+"none") // tests run side by side
		}
	}
	if !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, "OUTBOX_DATABASE_ALLOW_SUPERUSER=") }) {
		env = append(slices.Clone(env), allowSuperuser)
	}
	s := started{signals: make(chan os.Signal, 2), hangups: make(chan os.Signal, 1), stderr: &awaited{written: make(chan struct{}, 1)}, code: make(chan int, 1)}
	go func() {
		m := Main{Env: env, Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: s.stderr, Signals: s.signals, Hangups: s.hangups}
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

// wait returns once text was written; it fails the test if the program ends without.
func (a *awaited) wait(t testing.TB, text string, code <-chan int) {
	t.Helper()
	a.waitBehind(t, 0, text, code)
}

// waitBehind returns once text was written behind a position.
func (a *awaited) waitBehind(t testing.TB, position int, text string, code <-chan int) {
	t.Helper()
	late := time.After(5 * time.Minute) // long before the tests' own timeout, which would not say what was written instead
	for !strings.Contains(a.String()[position:], text) {
		select {
		case <-a.written:
		case got := <-code:
			t.Fatalf("exit code %d without %q:\n%s", got, text, a)
		case <-late:
			t.Fatalf("%q is not written, but:\n%s", text, a.String()[position:])
		}
	}
}

// receive returns what comes from a channel; it fails the test if the relay ends before.
func receive[T any](t *testing.T, from <-chan T, s started) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case code := <-s.code:
		t.Fatalf("exit code %d, stderr:\n%s", code, s.stderr)
		panic("not reached")
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
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL + "/in?token=hunter2", "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_RELAY_NAME=r1", "OUTBOX_RELAY_LEESE=1m",
	}
	s := start(t, env, "--poll-interval=1s")
	if r := receive(t, posted, s); r.Header.Get("Webhook-Signature") == "" {
		t.Error("the request is not signed")
	}
	if r := command(env[:4], "status", "--healthcheck"); r.code != 0 || !strings.HasPrefix(r.stdout, `ok: relay "r1" was last seen `) {
		t.Errorf("%+v", r)
	}
	s.end(t, 0)
	if status := query[string](t, db, "SELECT status FROM outbox_delivery"); status != "delivered" {
		t.Errorf("the delivery is %s", status)
	}

	var start map[string]any
	warning, rest, _ := strings.Cut(s.stderr.String(), "\n")
	first, _, _ := strings.Cut(rest, "\n")
	testkit.Contains(t, "the warning", warning, `"level":"warn"`, `OUTBOX_RELAY_LEESE: is not a setting of this version; did you mean OUTBOX_RELAY_LEASE?"`)
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
	s.stderr.wait(t, "connection refused", s.code)
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
	receive(t, inFlight, s)
	s.signals <- syscall.SIGTERM
	s.stderr.wait(t, `"stopping"`, s.code)
	s.signals <- syscall.SIGTERM
	code := <-s.code
	if want := "outbox-relay: a second signal ended the drain; requests that were in flight will be sent again\n"; code != cli.ExitInterrupted || !strings.HasSuffix(s.stderr.String(), want) {
		t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
	}
}

// The log's reader is gone, which kills most programs at their next line: deliveries continue, and
// a signal still ends the process well. The relay is its own process here, because only its own
// stdout and stderr raise SIGPIPE.
func TestRunWithBrokenLog(t *testing.T) {
	t.Parallel()
	posted := make(chan struct{}, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { posted <- struct{}{} }))
	defer receiver.Close()
	dsn := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, dsn), "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{}', 'first')")
	reader, writer, err := os.Pipe()
	pgtest.Must(t, err)
	pgtest.Must(t, reader.Close())
	program := exec.CommandContext(t.Context(), os.Args[0], "run", "--log-level=debug")
	program.Env = []string{asProgram + "=1", "OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL}
	program.Stdout, program.Stderr = writer, writer
	pgtest.Must(t, program.Start())
	pgtest.Must(t, writer.Close())
	ended := make(chan error, 1)
	go func() { ended <- program.Wait() }()
	select {
	case <-posted:
	case err := <-ended:
		t.Fatalf("the relay ended before it delivered: %v", err)
	}
	pgtest.Must(t, program.Process.Signal(syscall.SIGTERM))
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A relayProcess is a process that runs outbox-relay.
type relayProcess struct {
	started
	program *exec.Cmd
}

// launchAs starts a relay in a folder, with nothing but these arguments and variables, and waits
// until it works.
func launchAs(t testing.TB, dir string, args []string, env ...string) *relayProcess {
	t.Helper()
	p := launch(t, dir, args, env...)
	p.stderr.wait(t, `"registered"`, p.code)
	return p
}

// launch is launchAs without the wait.
func launch(t testing.TB, dir string, args []string, env ...string) *relayProcess {
	t.Helper()
	p := &relayProcess{
		started: started{stderr: &awaited{written: make(chan struct{}, 1)}, code: make(chan int, 1)},
		program: exec.CommandContext(t.Context(), os.Args[0], args...),
	}
	p.program.Dir, p.program.Env, p.program.Stderr = dir, append([]string{asProgram + "=1", allowSuperuser}, env...), p.stderr
	pgtest.Must(t, p.program.Start())
	go func() {
		_ = p.program.Wait()
		p.code <- p.program.ProcessState.ExitCode()
	}()
	return p
}

func (p *relayProcess) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	pgtest.Must(t, p.program.Process.Signal(s))
}

// stop ends the relay as an orchestrator does.
func (p *relayProcess) stop(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGTERM)
	if code := <-p.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, p.stderr)
	}
}

func (p *relayProcess) kill(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGKILL)
	<-p.code
}
