package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localkafka"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// asProgram makes the test binary be the program, for what only its own process can show.
const asProgram = "TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	if localkafka.Serve() {
		return
	}
	setUpLibraries()
	pgtest.RunTests(m)
}

// coveredOutbox returns an outbox where each insert of events makes their pending deliveries too,
// as when a relay has set them aside. Tests of commands for such deliveries need no relay then.
func coveredOutbox(t testing.TB) (dsn string) {
	t.Helper()
	dsn = pgtest.New(t, migrations.Outbox)
	relaytest.At(t, dsn).Cover()
	return dsn
}

// result is what one command left behind.
type result struct {
	code           int
	stdout, stderr string
}

// command runs the program with an environment of NAME=value entries.
func command(env []string, args ...string) result {
	var stdout, stderr buffer
	m := Main{Env: env, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr}
	code := m.Run(args)
	return result{code, stdout.String(), stderr.String()}
}

// buffer is one that a relay's goroutines may write to at the same time.
type buffer = testkit.Buffer

func (r result) expect(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || r.stdout != stdout || r.stderr != stderr {
		t.Errorf("got exit code %d, stdout:\n%s\nstderr:\n%s\nwant %d, stdout:\n%s\nstderr:\n%s", r.code, r.stdout, r.stderr, code, stdout, stderr)
	}
}

// holds checks the exit code, and what stdout and stderr hold among other things.
func (r result) holds(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	testkit.Equal(t, "exit code", r.code, code)
	testkit.Contains(t, "stdout", r.stdout, stdout)
	testkit.Contains(t, "stderr", r.stderr, stderr)
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"stauts"}, `unexpected argument stauts, did you mean "status"? (see: outbox-relay --help)`},
		{[]string{"migrate"}, `expected one of "up", "down", "roles", "status" (see: outbox-relay migrate --help)`},
		{[]string{"migrate", "upp"}, `unexpected argument upp, did you mean "up"? (see: outbox-relay migrate --help)`},
		{[]string{"migrate", "up", "--set", "foo"}, `--set must be one of "outbox","inbox" but got "foo" (see: outbox-relay migrate up --help)`},
		{[]string{"migrate", "down", "--to", "two"}, `--to: expected a valid 64 bit int but got "two" (see: outbox-relay migrate down --help)`},
		{[]string{"migrate", "down", "--to=-1"}, `--to -1: there is no such version; write 0 to revert all`},
		{[]string{"run", "--lese", "3s"}, `unknown flag --lese, did you mean "--lease"? (see: outbox-relay run --help)`},
		{[]string{"run", "--lease"}, `--lease: expected string value but got "EOL" (<EOL>) (see: outbox-relay run --help)`},
		{[]string{"run", "now"}, `unexpected argument now (see: outbox-relay run --help)`},
		{[]string{"status", "--json", "--healthcheck"}, `--json and --healthcheck can't be used together (see: outbox-relay status --help)`},
		{[]string{"config"}, `expected one of "init", "check", "show" (see: outbox-relay config --help)`},
		{[]string{"--database-url", "postgres://u:p@h/d", "run"}, `unknown flag --database-url (see: outbox-relay --help)`},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			t.Parallel()
			command(nil, test.args...).expect(t, cli.ExitUsage, "", "outbox-relay: "+test.want+"\n")
		})
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	command(nil).expect(t, cli.ExitUsage, "", overview+"\noutbox-relay: no command given\n")
	command(nil, "--help").expect(t, 0, overview, "")
	for _, name := range []string{"run", "migrate", "migrate up", "migrate down", "migrate status", "status", "config", "config check", "config show", "version"} {
		r := command(nil, append(strings.Fields(name), "--help")...)
		if r.code != 0 || r.stderr != "" || !strings.HasPrefix(r.stdout, "Usage: outbox-relay "+name) {
			t.Errorf("%s --help: exit code %d, stdout %q, stderr %q", name, r.code, r.stdout, r.stderr)
		}
		if !strings.Contains(overview, "outbox-relay "+strings.Fields(name)[0]) {
			t.Errorf("the overview does not mention %s", name)
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	b := buildInfo()
	if b.Version == "" || b.Go == "" || b.Schemas["outbox"] == 0 || b.Schemas["inbox"] == 0 {
		t.Errorf("build information is incomplete: %+v", b)
	}
	r := command(nil, "version")
	if r.code != 0 || r.stderr != "" || !strings.HasPrefix(r.stdout, "outbox-relay "+b.Version) || strings.Count(r.stdout, "\n") != 1 {
		t.Errorf("version: %+v", r)
	}
	r = command(nil, "version", "--json")
	if want := `"version": "` + b.Version + `"`; r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, want) {
		t.Errorf("version --json: %+v, want it to contain %s", r, want)
	}
}

// A closed pipe must neither panic nor look like success.
func TestBrokenStdout(t *testing.T) {
	t.Parallel()
	var stderr bytes.Buffer
	m := Main{Stdout: brokenWriter{}, Stderr: &stderr}
	if code := m.Run([]string{"version"}); code != cli.ExitFailed || stderr.String() != "outbox-relay: "+io.ErrClosedPipe.Error()+"\n" {
		t.Errorf("exit code %d, stderr %q", code, stderr.String())
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// writeFile makes a file that only its owner reads.
func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	pgtest.Must(t, os.WriteFile(name, []byte(content), 0o600))
	return name
}

// usualFile is the name of a configuration file.
const usualFile = "outbox-relay.yaml"

const (
	goodSecret  = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	otherSecret = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
)

// The environment that needs nothing else.
var twoSettings = []string{"OUTBOX_DATABASE_URL=postgres://u:p@localhost/db", "OUTBOX_DESTINATION_URL=https://logistics.internal/in"}

// mistakes returns what stderr must hold for these lines.
func mistakes(lines ...string) string {
	end := fmt.Sprintf("%d problems. Nothing starts with this configuration.\n", len(lines))
	if len(lines) == 1 {
		end = "1 problem. Nothing starts with this configuration.\n"
	}
	return strings.Join(append(lines, end), "\n")
}
