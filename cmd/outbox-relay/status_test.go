package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

func TestStatusOfAnEmptyOutbox(t *testing.T) {
	t.Parallel()
	env := []string{"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox)}
	command(env, "status").expect(t, 0, `No destination is known yet: a relay writes them here when it starts.

Parked: 0
Relays: 0
Open alerts: 0

No relay is running, so nothing is sent.
  outbox-relay run
`, "")
	command(env, "status", "--json").expect(t, 0, `{
  "destinations": [],
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
	dsn := pgtest.New(t, migrations.Outbox)
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
	want := ops.DestinationStatus{Destination: "logistics", Pending: 2, Due: 1, Retrying: 1, Failed: 1, Routed: true, Breaker: "closed", RetryEventID: 2, Blocked: []ops.BlockedKey{}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	r = command(env, "status")
	if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "\n  failed logistics: 1 since ") || !strings.Contains(r.stdout, `1 delivery to "logistics" failed; last: `) {
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

func TestPrintStatus(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600))
	var b buffer
	err := output.Show(&b, false, ops.Status{
		Destinations: []ops.DestinationStatus{
			{Destination: "analytics", LagSeconds: -3, Routed: true, Served: true, Breaker: "closed", BlockedKeys: 1, BlockedSeconds: 7200},
			{Destination: "billing", Pending: 5, Breaker: "closed"},
			{Destination: "history", Failed: 1, Breaker: "closed"},
			{
				Destination: "logistics", Pending: 1200, Due: 20, InFlight: 64, Retrying: 3, Replays: 7, Failed: 12, LagSeconds: 252.04, Routed: true, Served: true,
				Paused: true, PausedReason: "410 \x1b[31m", PausedAt: &at, Breaker: "closed",
			},
			{Destination: "mail", Routed: true, Served: true, Breaker: "open", BreakerOpenedAt: &at, BreakerSeconds: 12, BreakerError: "connection refused"},
		},
		Parked: 2,
		Relays: []ops.RelayStatus{
			{Instance: 1, Name: "a", Version: "v1", StartedAt: at, HeartbeatAgeSeconds: 0.44, Idle: true},
			{Instance: 2, Name: "b", Version: "v1", StartedAt: at, HeartbeatAgeSeconds: 10},
			{Instance: 3, Name: "c", Version: "v1", StartedAt: at},
		},
		Alerts: []alert.Alert{{Rule: "failed", Subject: "logistics", Count: 3, OpenedAt: at, FirstEventID: 17, FirstError: "400 Bad\nRequest"}},
		Advice: []ops.Advice{{Text: "\"logistics\"\nis paused.", Commands: []string{"outbox-relay resume logistics"}}},
	}, printStatus)
	if err != nil {
		t.Fatal(err)
	}
	const want = `  DESTINATION  PENDING  DUE  FLYING  RETRY  REPLAY  FAILED    LAG     STATE
    analytics        0    0       0      0       0       0     0s        ok
      billing        5    0       0      0       0       0     0s  unserved
      history        0    0       0      0       0       1     0s  no route
    logistics     1200   20      64      3       7      12  4m12s    paused
         mail        0    0       0      0       0       0     0s      held
  analytics: ordering keys are blocked, the oldest for 2h
  logistics: paused since 2026-01-02T02:04:05Z: 410 �[31m
  mail: held since 2026-01-02T02:04:05Z, next probe in 12s: connection refused

Parked: 2
Relays: 3
  1 a v1, idle, started 2026-01-02T02:04:05Z, heard of 400ms ago
  2 b v1, silent, started 2026-01-02T02:04:05Z, heard of 10s ago
  3 c v1, busy, started 2026-01-02T02:04:05Z, heard of 0s ago
Open alerts: 1
  failed logistics: 3 since 2026-01-02T02:04:05Z, first event 17: 400 Bad Request

`
	const steps = "\"logistics\" is paused.\n  outbox-relay resume logistics\n"
	if got := b.String(); got != want+steps {
		t.Errorf("got\n%s\nwant\n%s", got, want+steps)
	}
	for line := range strings.Lines(b.String()) {
		if isTable := !strings.Contains(line, ": "); isTable && utf8.RuneCountInString(line) > 81 {
			t.Errorf("%d columns: %s", utf8.RuneCountInString(line), line)
		}
	}
}
