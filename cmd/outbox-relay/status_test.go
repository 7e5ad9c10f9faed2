package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

func TestStatusOfAnEmptyOutbox(t *testing.T) {
	t.Parallel()
	env := []string{"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox)}
	command(env, "status").expect(t, 0, `No destination is known yet: a relay writes them here when it starts.

Not yet routed: 0
Parked: 0
Relays: 0
Open alerts: 0

No relay is running, so nothing is sent.
  outbox-relay run
`, "")
	command(env, "status", "--json").expect(t, 0, `{
  "destinations": [],
  "untaken": {
    "events": 0,
    "oldest_seconds": 0
  },
  "parked": 0,
  "relays": [],
  "alerts": [],
  "advice": [
    {
      "why": "no_relay",
      "subject": "",
      "level": "critical",
      "text": "No relay is running, so nothing is sent.",
      "remedy": "",
      "commands": [
        "outbox-relay run"
      ]
    }
  ]
}
`, "")
	command(env, "status", "--healthcheck", "--name=a").expect(t, cli.ExitFailed, "", `outbox-relay: no relay named "a" is registered in the database`+"\n")
}

func TestStatus(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('a', 'logistics')")
	for i, kind := range []string{"a", "a", "a", "b"} {
		execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ($1, '{}', $2)", kind, fmt.Sprint(i))
	}
	execute(t, db, "UPDATE outbox_delivery SET status = 'failed', attempts = 8 WHERE event_id = 1")
	execute(t, db, "UPDATE outbox_delivery SET attempts = 1, next_attempt_at = now() + interval '1 hour' WHERE event_id = 2")
	execute(t, db, "INSERT INTO outbox_relay (name, version) VALUES ('a', 'v1')")
	execute(t, db, "INSERT INTO outbox_alert (rule, subject, first_event_id, first_error) VALUES ('failed', 'logistics', 1, '400')")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}

	var s ops.Status
	r := command(env, "status", "--json")
	if err := json.Unmarshal([]byte(r.stdout), &s); err != nil || r.code != 0 || r.stderr != "" {
		t.Fatalf("%+v: %v", r, err)
	}
	if len(s.Destinations) != 1 || len(s.Relays) != 1 || len(s.Alerts) != 1 || s.Parked != 1 {
		t.Fatalf("%+v", s)
	}
	got := s.Destinations[0]
	if got.LagSeconds <= 0 {
		t.Errorf("lag is %g", got.LagSeconds)
	}
	got.LagSeconds = 0
	want := ops.DestinationStatus{Destination: "logistics", Pending: 2, Due: 1, Retrying: 1, Failed: 1, Routed: true, Breaker: "closed", RetryEventID: 2, WaitingBehind: []ops.WaitingHead{}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	r = command(env, "status")
	if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "\n  failed logistics: 1 since ") || !strings.Contains(r.stdout, `1 delivery to "logistics" failed; last: `) {
		t.Errorf("%+v", r)
	}
}

// A file that cannot be read keeps no one from looking, as long as the environment names the database. It does keep from changing.
func TestLookingNeedsNoFile(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	execute(t, open(t, dsn), "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('a', '{}', 'k')")
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "database: [\n")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	for _, words := range [][]string{{"status"}, {"explain", "1"}} {
		r := command(env, append(words, "--config", file)...)
		if r.code != 0 || r.stdout == "" || !strings.Contains(r.stderr, "is not YAML") {
			t.Errorf("%s: %+v", words[0], r)
		}
	}
	if r := command(nil, "status", "--config", file); r.code != cli.ExitConfig {
		t.Errorf("without a database: %+v", r)
	}
	if r := command(env, "pause", "default", "--config", file); r.code != cli.ExitConfig {
		t.Errorf("a change: %+v", r)
	}
	// Alerts are acknowledged and silenced by commands.
	execute(t, open(t, dsn), "INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')")
	command(env, "alert", "acknowledge", "lag", "default", "--as=ada").expect(t, 0, "lag of default is acknowledged: it is not sent again until it returns.\n", "")
	command(env, "alert", "silence", "--subject=default", "--for=2h", "--as=ada").expect(t, 0, "Silent for 2h0m.\n", "")
	if r := command(env, "status"); !strings.Contains(r.stdout, ", acknowledged by ada, silent until ") {
		t.Errorf("%+v", r)
	}
	if r := command(env, "alert", "silence", "--rule=nothing", "--for=2h"); r.code != cli.ExitUsage || !strings.Contains(r.stderr, "there is no such rule") {
		t.Errorf("%+v", r)
	}
	if r := command(env, "alert", "acknowledge", "lag", "nowhere"); r.code != cli.ExitFailed || !strings.Contains(r.stderr, "no such alert is open") {
		t.Errorf("%+v", r)
	}
}

func TestHealthcheck(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, dsn), `INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES
		('lives', '', now() + interval '1 hour'), ('dead', '', now() - interval '1 hour'), ('both', '', now() - interval '1 hour'), ('both', '', now() + interval '1 hour')`)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	// The heartbeat stands in the future so that it is young however slow this test is; clocks may also disagree.
	command(append(env, "OUTBOX_NAME=lives"), "status", "--healthcheck").expect(t, 0, "ok: relay \"lives\" was heard of 0s ago\n", "")
	command(env, "status", "--healthcheck", "--name=both").expect(t, 0, "ok: relay \"both\" was heard of 0s ago\n", "")
	r := command(env, "status", "--healthcheck", "--name=dead")
	if want := `outbox-relay: relay "dead" has not been heard of for 1h`; r.code != cli.ExitFailed || r.stdout != "" || !strings.HasPrefix(r.stderr, want) {
		t.Errorf("%+v", r)
	}
	hostname, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	command(env, "status", "--healthcheck").expect(t, cli.ExitFailed, "", fmt.Sprintf("outbox-relay: no relay named %q is registered in the database\n", hostname))
}

// A signal ends a command that waits for a database which does not answer.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for _, args := range []string{"status", "status --healthcheck", "migrate up"} {
		signals := make(chan os.Signal)
		accepted := make(chan net.Conn, 1)
		go func() {
			conn, err := listener.Accept()
			if err != nil {
				t.Error(err)
			}
			accepted <- conn
			signals <- syscall.SIGINT
		}()
		var stdout, stderr buffer
		m := Main{Env: []string{"OUTBOX_DATABASE_URL=postgres://u@" + listener.Addr().String() + "/db?sslmode=disable"}, Stdout: &stdout, Stderr: &stderr, Signals: signals}
		code := m.Run(strings.Fields(args))
		result{code, stdout.String(), stderr.String()}.expect(t, cli.ExitInterrupted, "", "outbox-relay: interrupted\n")
		_ = (<-accepted).Close()
	}
}
