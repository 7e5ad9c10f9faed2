package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
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
  "destinations_total": 0,
  "destinations_left": 0,
  "next": "",
  "untaken": {
    "events": 0,
    "oldest_seconds": 0
  },
  "parked": 0,
  "relays": [],
  "alerts": [],
  "alerts_left": 0,
  "advice": [
    {
      "rule": "no_relay",
      "subject": "",
      "level": "critical",
      "text": "No relay is running, so nothing is sent.",
      "remedy": "",
      "commands": [
        "outbox-relay run"
      ]
    }
  ],
  "advice_left": 0
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
	want := ops.DestinationStatus{Destination: "logistics", State: "unserved", Pending: 2, Due: 1, Retrying: 1, Failed: 1, Routed: true, Breaker: "closed", RetryEventID: 2, WaitingBehind: []ops.WaitingHead{}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	r = command(env, "status")
	if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "\n  failed logistics: since ") || !strings.Contains(r.stdout, `1 delivery to "logistics" failed; last: `) {
		t.Errorf("%+v", r)
	}
}

// The JSON of many destinations is as bounded as the text: those in trouble first, and
// flags lead to the others.
func TestStatusOfManyDestinations(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) SELECT 't' || i, 'd' || to_char(i, 'FM0000') FROM generate_series(0, 999) i")
	execute(t, db, "INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('d0321', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t321', '{}', 'k')")
	execute(t, db, "INSERT INTO outbox_alert (rule, subject) SELECT 'lag', 'd' || to_char(i, 'FM0000') FROM generate_series(0, 999) i")
	execute(t, db, "INSERT INTO outbox_relay (name, version) VALUES ('a', 'v1')")
	execute(t, db, "INSERT INTO outbox_relay_destination (relay_id, destination) SELECT r.id, d.destination FROM outbox_relay r, outbox_route d")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	status := func(flags ...string) (s ops.Status, size int) {
		t.Helper()
		r := command(env, append([]string{"status", "--json"}, flags...)...)
		if err := json.Unmarshal([]byte(r.stdout), &s); err != nil || r.code != 0 {
			t.Fatalf("%v: %v: %+v", flags, err, r)
		}
		return s, len(r.stdout)
	}
	s, size := status()
	if len(s.Destinations) != 100 || s.Destinations[0].Destination != "d0321" || s.DestinationsTotal != 1000 || s.DestinationsLeft != 900 || s.Next != s.Destinations[99].Destination {
		t.Errorf("%d destinations, %d left of %d, next %q", len(s.Destinations), s.DestinationsLeft, s.DestinationsTotal, s.Next)
	}
	if len(s.Alerts) != 100 || s.AlertsLeft != 900 || len(s.Relays[0].Destinations) != 100 || s.Relays[0].DestinationsLeft != 900 {
		t.Errorf("%d alerts, %d left; a relay has %d destinations, %d left", len(s.Alerts), s.AlertsLeft, len(s.Relays[0].Destinations), s.Relays[0].DestinationsLeft)
	}
	if size > 256<<10 {
		t.Errorf("%d bytes", size)
	}
	seen := map[string]bool{}
	for after := ""; ; {
		s, _ := status("--limit=400", "--after="+after)
		for _, d := range s.Destinations {
			seen[d.Destination] = true
		}
		if after = s.Next; after == "" {
			break
		}
	}
	testkit.Equal(t, "destinations on all pages", len(seen), 1000)
	if s, _ := status("--prefix=d032", "--after=d0321", "--limit=2"); len(s.Destinations) != 2 || s.Destinations[0].Destination != "d0320" || s.DestinationsTotal != 1000 || s.DestinationsLeft != 7 {
		t.Errorf("%+v", s)
	}
	command(env, "status", "--json", "--limit=0").expect(t, cli.ExitUsage, "", "outbox-relay: --limit: 0 is out of range; write 1 to 10000\n")
	command(env, "status", "--json", "--after=x").expect(t, cli.ExitUsage, "", `outbox-relay: --after: no destination "x" is in this list; leave it out to begin with the first`+"\n")
}

// A file that cannot be read keeps no one from looking, as long as the environment names the
// database. It does keep from changing.
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
	command(env, "alerts", "acknowledge", "lag", "default", "--as=ada").holds(t, 0, "lag of default is acknowledged: it is not sent again until it returns.\n", `"action":"alerts acknowledge"`)
	command(env, "alerts", "silence", "--subject=default", "--for=2h", "--as=ada").holds(t, 0, "Silent for 2h0m.\n", `"action":"alerts silence"`)
	if r := command(env, "status"); !strings.Contains(r.stdout, ", acknowledged by ada, silent until ") {
		t.Errorf("%+v", r)
	}
	command(env, "alerts", "silence", "--rule=nothing", "--for=2h").holds(t, cli.ExitUsage, "", "there is no such rule")
	command(env, "alerts", "silence", "--subject=defualt", "--for=2h").holds(t, cli.ExitUsage, "", `did you mean "default"?`)
	command(env, "alerts", "acknowledge", "lag", "nowhere").holds(t, cli.ExitFailed, "", "no such alert is open")
}

func TestHealthcheck(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	execute(t, open(t, dsn), `INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES
		('lives', '', now() + interval '1 hour'), ('dead', '', now() - interval '1 hour'), ('both', '', now() - interval '1 hour'), ('both', '', now() + interval '1 hour')`)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	// The heartbeat stands in the future so that it is young however slow this test is; clocks may
	// also disagree.
	command(append(env, "OUTBOX_RELAY_NAME=lives"), "status", "--healthcheck").expect(t, 0, "ok: relay \"lives\" was last seen 0s ago\n", "")
	command(env, "status", "--healthcheck", "--name=both").expect(t, 0, "ok: relay \"both\" was last seen 0s ago\n", "")
	r := command(env, "status", "--healthcheck", "--name=dead")
	if want := `outbox-relay: relay "dead" was last seen 1h`; r.code != cli.ExitFailed || r.stdout != "" || !strings.HasPrefix(r.stderr, want) {
		t.Errorf("%+v", r)
	}
	execute(t, open(t, dsn), `UPDATE outbox_relay SET session_pid = pg_backend_pid() WHERE name = 'lives'`) // of another name
	command(env, "status", "--healthcheck", "--name=lives").expect(t, cli.ExitFailed, "", "outbox-relay: relay \"lives\" was last seen 0s ago, and its session has ended\n")
	hostname, err := os.Hostname()
	pgtest.Must(t, err)
	command(env, "status", "--healthcheck").expect(t, cli.ExitFailed, "", fmt.Sprintf("outbox-relay: no relay named %q is registered in the database\n", hostname))
}

// A signal ends a command that waits for a database which does not answer.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	pgtest.Must(t, err)
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

// A database may write times, intervals and numbers in its own way. A relay delivers all the same,
// and every command reads them.
func TestForeignSettingsOfDatabase(t *testing.T) {
	t.Parallel()
	for _, pooler := range []string{"auto", "transaction"} {
		t.Run(pooler, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t, migrations.Outbox)
			db := open(t, dsn)
			for setting, value := range map[string]string{
				"datestyle": "German, DMY", "timezone": "Asia/Kathmandu", "intervalstyle": "sql_standard", "bytea_output": "escape",
				"extra_float_digits": "-15", "standard_conforming_strings": "off", "default_transaction_isolation": "serializable",
			} {
				execute(t, db, "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET "+setting+" = ''"+value+"''', current_database()); END $$")
			}
			env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + answering(t, 422), "OUTBOX_DATABASE_POOLER=" + pooler}
			if r := command(env, "send", "paid", "--key=k1"); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			s := start(t, env, "--poll-interval=1s")
			relaytest.Eventually(t, "an attempt", func() bool {
				return query[int](t, db, "SELECT count(*) FROM outbox_delivery WHERE status = 'failed'") == 1
			})
			for _, args := range []string{
				"status", "status --json", "explain 1", "explain 1 --json", "events show 1 --json", "events list --since 1h", "events list --json", "relays", "routes list", "identity show",
				"audit --json", "retry 1 --yes", "replay 1 --yes", "discard 1 --yes", "pause default", "resume default", "archive run", "doctor",
			} {
				if r := command(env, strings.Fields(args)...); r.code != 0 && args != "doctor" || strings.Contains(r.stderr, "invalid") || strings.Contains(r.stdout, "+05:45") {
					t.Errorf("%s: %+v", args, r)
				}
			}
			s.signals <- syscall.SIGTERM
			if code := <-s.code; code != 0 || strings.Contains(s.stderr.String(), "invalid PostgreSQL") {
				t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
			}
		})
	}
}

// JSON has times in UTC, whatever the zone of the host.
func TestZoneOfTheHost(t *testing.T) {
	t.Parallel()
	if time.Local != time.UTC {
		t.Error("times that come from the database are printed in the zone of the host")
	}
}

// overTLS returns the URL of a receiver whose certificate is known to no one.
func overTLS(t *testing.T) string {
	t.Helper()
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL
}

// asRole returns the DSN for another role, which needs no password.
func asRole(t *testing.T, dsn, role string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	pgtest.Must(t, err)
	u.User = url.User(role)
	query := u.Query()
	query.Del("user")
	u.RawQuery = query.Encode()
	return u.String()
}

// doctor reports nothing about an outbox that is well, and what is wrong with the configuration. It
// examines the database with it. The tests of package ops have each finding about the database.
func TestDoctor(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}})
	dsn := server.DSN("")
	pgtest.Migrate(t, dsn, migrations.Outbox)
	receiver := answering(t, http.StatusOK)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver, "OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_ENVIRONMENT=production"}
	r := start(t, env, "--poll-interval=1s")
	t.Cleanup(func() { r.signals <- syscall.SIGTERM; <-r.code })
	r.stderr.wait(t, `"registered"`, r.code)
	until(t, open(t, dsn), "SELECT EXISTS (SELECT FROM outbox_identity WHERE environment = 'production')")
	command(env, "doctor").expect(t, 0, "Nothing is wrong. Checked: configuration, server, session, transactions, locks, schema, rights, indexes, constraints, triggers, functions, vacuum, identity, intake, events, deliveries, destinations.\n", "")

	conn, err := pgx.Connect(t.Context(), dsn)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	pgtest.Exec(t, conn, "BEGIN; SELECT pg_current_xact_id()")
	file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), "destinations: {new: {url: '"+receiver+"'}}\n")
	broken := writeFile(t, filepath.Join(t.TempDir(), "broken.yaml"), "destinations: {new: {\n")
	const away = "OUTBOX_DATABASE_URL=postgres://u@127.0.0.1:1/db?connect_timeout=2"
	noReceiver := "OUTBOX_DESTINATION_URL=" + testkit.NewVacant(t).URL
	for _, c := range []struct {
		env                []string
		check, says, mends string
	}{
		{[]string{env[0], "OUTBOX_CONFIG=" + broken}, "configuration", "broken.yaml", "config check"},
		{[]string{away, noReceiver}, "server", "the database could not be asked", "database.url"},
		{[]string{away, noReceiver}, "destinations", "connection refused", "Start the receiver"},
		{append(env, "OUTBOX_RELAY_LEASE=5s"), "configuration", "OUTBOX_RELAY_LEASE", "config check"},
		{append(env, "OUTBOX_RETENTION_PROCESSED_EVENTS=48h"), "configuration", "not_after", "config check"},
		{append(env, "OUTBOX_ALERTS_VACUUM_BLOCKED_OVER=1ms"), "transactions", "has had a transaction open for", "pg_terminate_backend("},
		{[]string{env[0], "OUTBOX_CONFIG=" + file}, "deliveries", `no running relay has the destination "new"`, "SIGHUP"},
		{[]string{env[0], "OUTBOX_DESTINATION_URL=" + testkit.NewVacant(t).URL}, "destinations", "connection refused", "Start the receiver"},
	} {
		r := command(c.env, "doctor", "--json")
		var found ops.Checkup
		if err := json.Unmarshal([]byte(r.stdout), &found); err != nil {
			t.Fatalf("%v: %+v", err, r)
		}
		matches := 0
		for _, x := range found.Findings {
			if x.Check == c.check && strings.Contains(x.Text, c.says) && strings.Contains(x.Remedy, c.mends) {
				matches++
			}
		}
		if matches != 1 || (r.code != 0) != found.Failed() {
			t.Errorf("exit code %d, found %+v, want %s: %s; %s\n%s", r.code, found.Findings, c.check, c.says, c.mends, r.stderr)
		}
	}
}

// doctor makes the checks that it can, and names the others.
func TestDoctorNamesWhatItCouldNotCheck(t *testing.T) {
	t.Parallel()
	broken := "OUTBOX_CONFIG=" + writeFile(t, filepath.Join(t.TempDir(), "broken.yaml"), "destinations: {new: {\n")
	receiver := "OUTBOX_DESTINATION_URL=" + answering(t, http.StatusOK)
	const away = "OUTBOX_DATABASE_URL=postgres://u@127.0.0.1:1/db?connect_timeout=2"
	for _, c := range []struct {
		env  []string
		want string // a part of what is printed
	}{
		{[]string{broken}, "Checked: configuration.\nCould not be checked because of these: the database, the destinations.\n"},
		{[]string{broken, "OUTBOX_DATABASE_URL=" + coveredOutbox(t)}, "intake, events, deliveries.\nCould not be checked because of these: destinations.\n"},
		{[]string{away, receiver}, "Checked: configuration, server, destinations.\nCould not be checked because of these: session, transactions, locks, schema, "},
	} {
		if r := command(c.env, "doctor"); r.code != cli.ExitFound || !strings.Contains(r.stdout, c.want) {
			t.Errorf("%+v does not say %q", r, c.want)
		}
	}
}

// Commands are printed on lines of their own: the comment behind one must not hide the next.
func TestDoctorPrintsEachCommandOnItsLine(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	for _, statement := range []string{
		"INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')",
		"INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k1')",
		"UPDATE outbox_delivery SET status = 'failed', attempts = 1, last_reason = 'rejected'",
	} {
		if _, err := open(t, dsn).ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	r := command([]string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + answering(t, http.StatusOK)}, "doctor")
	want := "\n         outbox-relay events list --status failed --destination default    # see why" +
		"\n         outbox-relay replay --destination default    # once the cause is fixed\n"
	if !strings.Contains(r.stdout, want) {
		t.Errorf("%+v does not say %q", r, want)
	}
}
