package main

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// running is a command that continues beside the test, with its output.
type running struct {
	started
	stdout *awaited
}

// begin starts a command that is interrupted with the test, and must then end well.
func begin(t *testing.T, env []string, args ...string) running {
	t.Helper()
	r := running{
		started{signals: make(chan os.Signal, 2), stderr: &awaited{written: make(chan struct{}, 1)}, code: make(chan int, 1)},
		&awaited{written: make(chan struct{}, 1)},
	}
	go func() {
		m := Main{Env: env, Stdin: strings.NewReader(""), Stdout: r.stdout, Stderr: r.stderr, Signals: r.signals}
		r.code <- m.Run(args)
	}()
	t.Cleanup(func() {
		r.signals <- syscall.SIGINT
		if code := <-r.code; code != 0 {
			t.Errorf("%q: exit code %d, stderr:\n%s", args, code, r.stderr)
		}
	})
	return r
}

var listening = regexp.MustCompile(`http://127\.0\.0\.1:\d+`)

// startListening starts outbox-relay listen, and returns it with its URL.
func startListening(t *testing.T, env []string, args ...string) (running, string) {
	t.Helper()
	r := begin(t, env, append([]string{"listen", "--listen=127.0.0.1:0"}, args...)...)
	r.stderr.wait(t, "listening on http://127.0.0.1:", r.code)
	return r, listening.FindString(r.stderr.String())
}

// One event by send, a relay, a receiver by listen, and tail and status --watch beside them.
func TestSendListenTailAndWatch(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	receiver, url := startListening(t, []string{"OUTBOX_SIGNING_SECRET=" + goodSecret})
	relay := start(t, append(env, "OUTBOX_DESTINATION_URL="+url, "OUTBOX_SIGNING_SECRET="+goodSecret), "--poll-interval=1s")
	t.Cleanup(func() { relay.signals <- syscall.SIGTERM; <-relay.code })
	relay.stderr.wait(t, `"registered"`, relay.code)
	tail := begin(t, env, "events", "tail")
	lines := begin(t, env, "events", "tail", "--json", "--destination=default", "--type=invoice.*", "--key=k1")
	tail.stderr.wait(t, "following", tail.code)
	lines.stderr.wait(t, "following", lines.code)
	watch := begin(t, env, "status", "--watch")
	watch.stdout.wait(t, "All is well.", watch.code)
	until(t, open(t, dsn), "SELECT EXISTS (SELECT FROM outbox_route)")

	r := command(env, "send", "invoice.created", `--payload={"invoice": "4711"}`, "--key=k1", "--ordering-key=o", "--reference=invoice 4711", "--header=tenant=a", "--as=ann")
	if r.code != 0 || r.stdout != "Inserted. What becomes of it: outbox-relay explain k1\n" || !strings.Contains(r.stderr, `"action":"send"`) {
		t.Errorf("%+v", r)
	}
	receiver.stdout.wait(t, `{"invoice": "4711"}`, receiver.code)
	for _, part := range []string{"POST /, signature valid, answered 204\n", "  X-Idempotency-Key: k1\n", "  X-Outbox-Event-Type: invoice.created\n", "  X-Outbox-Ordering-Key: o\n"} {
		if got := receiver.stdout.String(); !strings.Contains(got, part) {
			t.Errorf("listen does not print %q:\n%s", part, got)
		}
	}
	lines.stdout.wait(t, `"what":"delivered"`, lines.code)
	var line ops.TailMoment
	if err := json.Unmarshal([]byte(lines.stdout.String()), &line); err != nil || line.EventID != 1 || line.Key != "k1" || line.Type != "invoice.created" || *line.Seconds <= 0 {
		t.Errorf("%v: %+v", err, line)
	}
	if r := command(env, "audit"); !strings.Contains(r.stdout, "ann") || !strings.Contains(r.stdout, "invoice.created, key k1") {
		t.Errorf("%+v", r)
	}
	tail.stdout.wait(t, "  event 1: inserted, invoice.created, key k1\n", tail.code)
	tail.stdout.wait(t, "  default  event 1: delivered, ", tail.code)

	command(env, "send", "t", "--payload={").holds(t, cli.ExitUsage, "", "--payload: is not JSON")
	command(env, "send", "t", "--payload=@absent").holds(t, cli.ExitFailed, "", "absent")
	command(env, "send", "t", "--key=k1").holds(t, cli.ExitFailed, "", "")
}

// What a stranger sends cannot command the terminal.
func TestListenPrintsNothingThatTerminalsObey(t *testing.T) {
	t.Parallel()
	receiver, url := startListening(t, nil)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/%1b%5B2J%0aforged", strings.NewReader("\x1b[2Jend"))
	pgtest.Must(t, err)
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	response, err := transport.RoundTrip(request)
	pgtest.Must(t, err)
	_ = response.Body.Close()
	receiver.stdout.wait(t, "end", receiver.code)
	if got := receiver.stdout.String(); strings.Contains(got, "\x1b") || !strings.HasPrefix(got, "POST /\ufffd[2J forged, ") {
		t.Errorf("printed %q", got)
	}
}

// A receiver that refuses a wrong signature, and one that fails because of --fail.
func TestListenRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"another secret":  {[]string{"--secret=" + otherSecret}, "401 Unauthorized"},
		"as it was told":  {[]string{"--fail=503"}, "503 Service Unavailable"},
		"not at once":     {[]string{"--fail=500", "--delay=10ms"}, "500 Internal Server Error"},
		"its own failure": {[]string{"--fail=418"}, "418 "},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 2)
			t.Parallel()
			dsn := pgtest.New(t, migrations.Outbox)
			env := []string{"OUTBOX_DATABASE_URL=" + dsn}
			_, url := startListening(t, nil, c.args...)
			relay := start(t, append(env, "OUTBOX_DESTINATION_URL="+url, "OUTBOX_SIGNING_SECRET="+goodSecret), "--poll-interval=1s")
			t.Cleanup(func() { relay.signals <- syscall.SIGTERM; <-relay.code })
			relay.stderr.wait(t, `"registered"`, relay.code)
			command(env, "send", "t", "--key=k")
			relaytest.Eventually(t, c.want, func() bool { return strings.Contains(command(env, "explain", "k").stdout, c.want) })
		})
	}
	command(nil, "listen", "--fail=200").holds(t, cli.ExitUsage, "", "")
	if r := command(nil, "listen", "--secret=hunter2"); r.code != cli.ExitUsage || strings.Contains(r.stderr, "hunter2") {
		t.Errorf("%+v", r)
	}
}

func TestVersionFlag(t *testing.T) {
	t.Parallel()
	command(nil, "--version").expect(t, 0, command(nil, "version").stdout, "")
}

// A command that looks into the wrong schema says so.
func TestHintForMissingTables(t *testing.T) {
	t.Parallel()
	r := command([]string{"OUTBOX_DATABASE_URL=" + pgtest.New(t)}, "send", "t")
	r.holds(t, cli.ExitFailed, "", "run outbox-relay migrate up, or name their schema with --schema")
}

// The script completes commands, flags and values in a real bash.
func TestCompletion(t *testing.T) {
	t.Parallel()
	shell, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	dsn := coveredOutbox(t)
	execute(t, open(t, dsn), "INSERT INTO outbox_route (pattern, destination) VALUES ('paid', 'shop')")
	script := command(nil, "completion", "bash").stdout
	for words, want := range map[string]string{
		"outbox-relay mig": "migrate", "outbox-relay migrate ": "up down roles status", "outbox-relay events show --pay": "--payload", "outbox-relay events li": "list",
		"outbox-relay events list --status re": "retrying", "outbox-relay replay --destination=s": "shop", "outbox-relay pause s": "shop", "outbox-relay events tail --type p": "paid",
	} {
		words := strings.ReplaceAll(strings.Replace(words, "outbox-relay", os.Args[0], 1), "=", " = ") // as bash splits them
		quoted := strings.Split(words, " ")
		args := append([]string{"-c", script + "\n" + `COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _outbox_relay; echo "${COMPREPLY[@]}"`, "bash"}, quoted...)
		bash := exec.CommandContext(t.Context(), shell, args...)
		bash.Env = append(os.Environ(), "OUTBOX_DATABASE_URL="+dsn, asProgram+"=1")
		out, err := bash.Output()
		if err != nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("%q: %q, %v; want %q", words, out, err, want)
		}
	}
	for _, name := range []string{"zsh", "fish"} {
		command(nil, "completion", name).holds(t, 0, "doctor", "")
	}
	page := command(nil, "man").stdout
	for _, part := range []string{".TH OUTBOX-RELAY 1\n", ".SS outbox-relay pause\n", ".B \\-\\-reset\\-breaker\n"} {
		if !strings.Contains(page, part) {
			t.Errorf("the manual page lacks %q", part)
		}
	}
}
