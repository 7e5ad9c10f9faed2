package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/destinations"
	"github.com/outbox-relay/outbox-relay/internal/cli/events"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// with runs a command with something on its standard input, which is no terminal.
func with(stdin string, env []string, args ...string) result {
	var stdout, stderr buffer
	m := Main{Env: env, Stdin: strings.NewReader(stdin), Stdout: &stdout, Stderr: &stderr}
	code := m.Run(args)
	return result{code, stdout.String(), stderr.String()}
}

// What is wrong whatever stands in the database is said without asking one: here there is none.
func TestMistakesOfBulkCommands(t *testing.T) {
	t.Parallel()
	env := []string{"OUTBOX_DATABASE_URL=postgres://u@127.0.0.1:1/db?connect_timeout=2"}
	const nothing = "nothing says which deliveries are meant; name events, or narrow it with --destination, --status, --type, --reason, --key, --ordering-key, --since or --until"
	for _, test := range []struct{ args, stdin, want string }{
		{"replay", "", nothing},
		{"replay --yes --limit 5", "", nothing},
		{"replay --type= --destination=", "", nothing},
		{"discard --yes", "", nothing},
		{"retry --yes", "", nothing},
		{"replay 0", "", `"0" is not the id of an event; write a number such as 17`},
		{"replay 99999999999999999999", "", `"99999999999999999999" is not the id of an event; write a number such as 17`},
		{"replay -- -5", "", `"-5" is not the id of an event; write a number such as 17`},
		{"replay -5", "", `unknown flag -5, did you mean one of "-h", "-c", "-y"? (see: outbox-relay replay --help)`},
		{"replay - --yes", "1\r\n\r\nx7\r\n", `standard input, line 3: "x7" is not the id of an event; write a number such as 17`},
		{"replay - --yes", "\n \r\n", "standard input names no event"},
		{"replay - --yes", strings.Repeat("1", 100_000), "standard input has a line that is too long for the id of an event"},
		{"replay - 5 --yes", "1", "- reads all ids from standard input; name no others beside it"},
		{"replay -", "1\n", "standard input cannot both name the events and answer the question; name them as arguments, or look first with --dry-run"},
		{"replay --since yesterday", "", `--since: "yesterday" is neither a time such as 2026-01-02T15:04:05Z nor a duration such as 2h`},
		{"replay --since 2026-01-02T15:04:05", "", `--since: "2026-01-02T15:04:05" has no zone; write 2026-01-02T15:04:05Z for UTC, or +02:00 in place of Z`},
		{"replay --until 2026-01-02", "", `--until: "2026-01-02" has no time; write 2026-01-02T00:00:00Z`},
		{"replay --since 3d", "", `--since: "3d" uses a unit longer than hours; write "72h"`},
		{"replay --since 30", "", `--since: "30" has no unit; write "30s"`},
		{"replay --since=-2h", "", `--since: "-2h" is neither a time such as 2026-01-02T15:04:05Z nor a duration such as 2h`},
		{"events list --status held", "", `--status: "held" is the state of a destination, as status prints it; its deliveries: --status pending --destination NAME`},
		{"events list --status blocked --destination shop", "", `--status: "blocked" is the state of a destination, as status prints it; its deliveries: --status failed --destination shop`},
		{"events list --status parked --destination shop", "", `--status parked and --destination can't be used together: what is parked has no destination`},
		{"events list --since tomorrow", "", `--since: "tomorrow" is neither a time such as 2026-01-02T15:04:05Z nor a duration such as 2h`},
		{"replay --status pending", "", `--status must be one of "failed","delivered","discarded" but got "pending" (see: outbox-relay replay --help)`},
		{"discard --status delivered", "", `--status must be one of "pending","failed" but got "delivered" (see: outbox-relay discard --help)`},
		{"replay 1 --limit 0", "", "--limit: 0 is out of range; write 1 or more"},
		{"replay 1 --limit many", "", `--limit: expected a valid 64 bit int but got "many" (see: outbox-relay replay <event-id> --help)`},
		{"discard --parked --destination a", "", "--parked and --destination exclude each other: a parked delivery has no destination"},
		{"discard --head-of-key k", "", "--head-of-key needs --destination: each orders its own deliveries"},
		{"discard 5 --head-of-key k --destination a", "", "--head-of-key names one delivery already; give only --destination beside it"},
		{"pause", "", `expected "<destination>" (see: outbox-relay pause --help)`},
		{"routes test", "", `expected "<event-type>" (see: outbox-relay routes test --help)`},
	} {
		t.Run(test.args, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			with(test.stdin, env, strings.Fields(test.args)...).expect(t, cli.ExitUsage, "", "outbox-relay: "+test.want+"\n")
		})
	}
	with("", env, "routes", "test", "two words").expect(t, cli.ExitUsage, "",
		"outbox-relay: \"two words\" is not an event type; those are 1 to 255 printable ASCII characters without blanks\n")
}

// failedOutbox returns an environment whose database has n failed deliveries of n events.
func failedOutbox(t *testing.T, n int) (env []string, dsn string) {
	t.Helper()
	dsn = coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'paid', '{}', 'k' || i FROM generate_series(1, $1) i", n)
	execute(t, db, "UPDATE outbox_delivery SET status = 'failed', attempts = 8, last_reason = 'timeout'")
	return []string{"OUTBOX_DATABASE_URL=" + dsn}, dsn
}

const pending = "SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND replay"

func TestReplayCommand(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 7)
	db := open(t, dsn)

	r := command(env, "replay", "--destination=logistics", "--dry-run")
	if r.code != 0 || r.stderr != "" || !strings.HasPrefix(r.stdout, "7 deliveries to replay, such as:\n  1  paid  k1  logistics  failed  20") ||
		strings.Count(r.stdout, "\n") != 7 || !strings.HasSuffix(r.stdout, "Nothing was replayed: this was a dry run.\n") {
		t.Errorf("%+v", r)
	}
	if r := command(env, "replay", "k3", "3", "k5", "--dry-run"); r.code != 0 || !strings.HasPrefix(r.stdout, "2 deliveries to replay:\n  3  paid  k3 ") || !strings.Contains(r.stdout, "\n  5  paid  k5 ") {
		t.Errorf("by keys: %+v", r)
	}
	if r := command(env, "retry", "k99", "--yes"); r.code != cli.ExitFailed || !strings.Contains(r.stderr, `no event has the id, the idempotency key or the related reference "k99"`) {
		t.Errorf("an unknown key: %+v", r)
	}
	for rate, want := range map[string]string{
		"1": "7 deliveries to replay, spread over about 7s, 1 delivery a second, such as:\n",
		"0": "7 deliveries to replay, such as:\n",
	} {
		if r := command(env, "replay", "--destination=logistics", "--dry-run", "--rate="+rate); r.code != 0 || !strings.HasPrefix(r.stdout, want) {
			t.Errorf("--rate %s: %+v", rate, r)
		}
	}
	command(env, "replay", "1", "--rate=-1").expect(t, cli.ExitUsage, "", "outbox-relay: --rate: -1 is below 0; write how many deliveries a second, or 0 for no limit\n")
	// There is no terminal to answer. What --dry-run lists is shown before the refusal.
	found := strings.TrimSuffix(r.stdout, "Nothing was replayed: this was a dry run.\n")
	command(env, "replay", "--destination=logistics").expect(t, cli.ExitUsage, "", found+"outbox-relay: replay 7 deliveries; nothing was done: run the command on a terminal, where it asks first\n")
	if n := query[int](t, db, pending); n != 0 {
		t.Fatalf("%d were replayed without a yes", n)
	}
	r = with("\ufeff2\r\n\r\n3\r\n2\r\n99\n", env, "replay", "-", "--yes", "--json")
	var report events.BulkReport
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 {
		t.Fatalf("%+v: %v", r, err)
	}
	if report.Action != "replay" || report.Done != 2 || report.Matched != 2 || report.Unknown != 1 || report.Left != 0 || report.DryRun || report.Interrupted {
		t.Errorf("%+v", report)
	}
	var audit map[string]any
	if err := json.Unmarshal([]byte(r.stderr), &audit); err != nil || strings.Count(r.stderr, "\n") != 1 {
		t.Fatalf("%s: %v", r.stderr, err)
	}
	if audit["msg"] != "audit" || audit["action"] != "replay" || audit["selection"] != "3 events" || audit["done"] != 2.0 ||
		!strings.Contains(fmt.Sprint(audit["os_user"]), "@") || audit["database_user"] == "" {
		t.Errorf("%v", audit)
	}
	testkit.Equal(t, "operations without a rate are audited", query[int](t, db, "SELECT count(*) FROM outbox_audit WHERE selection->>'rate' IS NULL"), 1)
	r = command(env, "replay", "2", "3", "--yes")
	if r.code != 0 || r.stderr != "" || r.stdout != "There is nothing to replay.\nLeft alone: 2 pending already.\n" {
		t.Errorf("%+v", r)
	}
	r = command(env, "replay", "--type=pa*", "--reason=timeout", "--since=1h", "--limit=1", "--yes", "--log-level=error")
	if r.code != cli.ExitUsage { // the log's level is not one of its flags
		t.Errorf("%+v", r)
	}
	r = command(append(env, "OUTBOX_LOG_LEVEL=error"), "replay", "--type=pa*", "--reason=timeout", "--since=1h", "--limit=1", "--yes")
	if r.code != 0 || r.stdout != "Replayed 1 delivery.\n" || !strings.Contains(r.stderr, `"selection":"--type 'pa*' --reason timeout --since 1h --limit 1"`) {
		t.Errorf("%+v", r)
	}
	command(env, "replay", "--destination=logistics", "--type=pa*", "--reason=tls", "--yes").expect(t, 0, "There is nothing to replay.\n", "")
	r = command(env, "replay", "--status=failed,discarded", "--rate=1000", "--yes")
	if r.code != 0 || r.stdout != "Replayed 4 deliveries.\n" || !strings.Contains(r.stderr, `"selection":"--status 'discarded,failed' --rate 1000"`) {
		t.Errorf("%+v", r)
	}
	testkit.Equal(t, "operations with their rate are audited", query[int](t, db, "SELECT count(*) FROM outbox_audit WHERE selection->>'rate' = '1000'"), 1)
	execute(t, db, "UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id = 1")
	command(env, "replay", "1", "--yes").expect(t, 0, "There is nothing to replay.\nLeft alone: 1 delivered; to replay these too: --status delivered.\n", "")
	command(env, "replay", "77", "--yes").expect(t, 0, "There is nothing to replay.\nNot found: 1 event has no delivery here: 77\n", "")
	r = command(env, "replay", "1", "--since=2999-01-01T00:00:00Z")
	if r.code != cli.ExitUsage || !strings.HasPrefix(r.stderr, "outbox-relay: --since: 2999-01-01T00:00:00Z lies in the future; the database's clock says 20") {
		t.Errorf("%+v", r)
	}
	command(env, "replay", "1", "--since=1h", "--until=2h").expect(t, cli.ExitUsage, "", "outbox-relay: --since 1h is not before --until 2h\n")
}

func TestReplayOfOldEvents(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 1)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('paid', '{}', 'old', now() - interval '91 days')")
	execute(t, db, "UPDATE outbox_delivery SET status = 'failed'")
	const refusal = "outbox-relay: 1 delivery is of events older than 2160h, which is how long receivers remember what they processed (retention.processed_events): " +
		"sent again, they may be processed twice. Leave them out with --since 2160h, or add --force\n"
	command(env, "replay", "--status=failed", "--yes").expect(t, cli.ExitFailed, "", refusal)
	testkit.Equal(t, "replayed", query[int](t, db, pending), 0)
	if r := command(env, "replay", "--status=failed", "--since=2160h", "--yes"); r.code != 0 || r.stdout != "Replayed 1 delivery.\n" {
		t.Errorf("%+v", r)
	}
	if r := command(env, "replay", "--status=failed", "--force", "--yes"); r.code != 0 || r.stdout != "Replayed 1 delivery.\n" {
		t.Errorf("%+v", r)
	}
}

// A signal in the middle lets the batch at hand end, and says what is done and what is left.
func TestInterruptedReplay(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 2500)
	db := open(t, dsn)
	// Every batch waits here, so that the test knows when one is under way.
	execute(t, db, `CREATE FUNCTION wait_for_test() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
		CREATE TRIGGER wait_for_test BEFORE UPDATE ON outbox_delivery FOR EACH STATEMENT EXECUTE FUNCTION wait_for_test()`)
	holder, err := db.Conn(t.Context())
	pgtest.Must(t, err)
	defer holder.Close()
	lock := func(name string) {
		if _, err := holder.ExecContext(t.Context(), "SELECT "+name+"(4711)"); err != nil { //nolint:gosec // one of two names
			t.Error(err)
		}
	}
	lock("pg_advisory_lock")
	signals, code := make(chan os.Signal), make(chan int, 1)
	var stdout, stderr buffer
	go func() {
		m := Main{Env: env, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, Signals: signals}
		code <- m.Run([]string{"replay", "--destination=logistics", "--rate=0", "--yes", "--json"})
	}()
	for query[int](t, db, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())") == 0 {
		select {
		case got := <-code:
			t.Fatalf("exit code %d: %s", got, stderr.String())
		default:
		}
	}
	signals <- syscall.SIGINT
	signals <- syscall.SIGINT // is taken once the first has been acted on
	lock("pg_advisory_unlock")
	if got := <-code; got != cli.ExitInterrupted || !strings.HasSuffix(stderr.String(), "outbox-relay: interrupted: 1000 replayed, 1500 left; the same command continues\n") {
		t.Errorf("exit code %d: %s", got, stderr.String())
	}
	var report events.BulkReport
	if err := json.Unmarshal([]byte(stdout.String()), &report); err != nil || !report.Interrupted || report.Done != 1000 || report.Left != 1500 {
		t.Errorf("%s: %v", stdout.String(), err)
	}
	testkit.Contains(t, "the audit", stderr.String(), `"done":1000,"ended_by":"replay: interrupted"`)
	testkit.Equal(t, "replayed", query[int](t, db, pending), 1000)
	if r := command(env, "replay", "--destination=logistics", "--rate=0", "--yes"); r.code != 0 || r.stdout != "Replayed 1500 deliveries.\n" {
		t.Errorf("%+v", r)
	}
}

func TestDiscardCommand(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 3)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'old')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 'sent', '{}', 'o' || i, 'inv 1' FROM generate_series(1, 3) i")
	execute(t, db, "UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE destination = 'old' AND event_id = 4")

	if r := command(env, "discard", "--destination=old", "--yes"); r.code != 0 ||
		r.stdout != "Discarded 2 deliveries.\nLeft alone: 1 in flight, which a relay is sending now; repeat the command later.\n" || !strings.Contains(r.stderr, `"action":"discard"`) {
		t.Errorf("%+v", r)
	}
	execute(t, db, "UPDATE outbox_delivery SET status = 'failed', attempts = 8, last_error = E'422 \x1b[31m.' WHERE destination = 'logistics' AND event_id = 4")
	const shown = "Event 4 (sent, key o1) is the head of \"inv 1\": failed after 8 attempts, last error: 422 \ufffd[31m. Waiting behind it: 2.\n"
	if r := command(env, "discard", "--destination=logistics", "--head-of-key=inv 1"); r.code != cli.ExitUsage || r.stdout != "" ||
		!strings.HasPrefix(r.stderr, shown+"1 delivery to discard:\n  4  sent  o1  logistics  failed  20") ||
		!strings.HasSuffix(r.stderr, "outbox-relay: discard 1 delivery; nothing was done: run the command on a terminal, where it asks first\n") {
		t.Errorf("%+v", r)
	}
	if r := command(env, "discard", "--destination=logistics", "--head-of-key=inv 1", "--yes"); r.code != 0 || r.stdout != "Discarded 1 delivery.\n" || !strings.HasPrefix(r.stderr, shown) {
		t.Errorf("%+v", r)
	}
	command(env, "discard", "--destination=logistics", "--head-of-key=inv 2", "--yes").expect(t, cli.ExitFailed, "",
		"outbox-relay: nothing waits for \"logistics\" with ordering key \"inv 2\"\n")
	got := query[string](t, db, "SELECT string_agg(event_id || destination, ' ' ORDER BY event_id) FROM outbox_delivery WHERE status = 'discarded'")
	testkit.Equal(t, "discarded", got, "4logistics 5old 6old")
	if r := command(env, "replay", "--status=discarded", "--destination=old", "--yes"); r.code != 0 || r.stdout != "Replayed 2 deliveries.\n" {
		t.Errorf("%+v", r)
	}
}

func TestPauseCommands(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 1)
	db := open(t, dsn)
	r := command(env, "pause", "logistics", "--reason=we \x1b[31mmove")
	if r.code != 0 || r.stdout != "logistics is paused: we \ufffd[31mmove. To continue: outbox-relay resume logistics\n" ||
		!strings.Contains(r.stderr, `"action":"pause"`) || !strings.Contains(r.stderr, `"destination":"logistics"`) {
		t.Errorf("%+v", r)
	}
	command(env, "pause", "logistics").expect(t, 0, "logistics was paused already: we \ufffd[31mmove.\n", "")
	r = command(env, "events", "show", "1")
	if r.code != 0 || strings.Contains(r.stdout, "Why it waits") { // it has failed
		t.Errorf("%+v", r)
	}
	execute(t, db, "UPDATE outbox_delivery SET status = 'pending'")
	if r = command(env, "events", "show", "1"); r.code != 0 || !strings.Contains(r.stdout, "\nWhy it waits:\n  logistics: the destination is paused since 20") ||
		!strings.Contains(r.stdout, "\n  logistics: no relay is running; start one: outbox-relay run\n") {
		t.Errorf("%+v", r)
	}
	if r = command(env, "resume", "logistics"); r.code != 0 || r.stdout != "logistics is resumed.\n" || !strings.Contains(r.stderr, `"action":"resume"`) {
		t.Errorf("%+v", r)
	}
	command(env, "resume", "logistics", "--reset-breaker").expect(t, 0, "logistics was not paused. Its breaker was not open, and no relay waits as it has asked.\n", "")
	execute(t, db, "UPDATE outbox_destination SET breaker = 'open', breaker_opened_at = now(), breaker_until = now() + interval '1 hour'")
	command(env, "resume", "logistics").expect(t, 0, "logistics was not paused. It is still held, because it is down, and probed by itself; to send what is due, without a probe: outbox-relay resume logistics --reset-breaker\n", "")
	if r = command(env, "resume", "logistics", "--reset-breaker"); r.code != 0 || !strings.HasSuffix(r.stdout, "Its breaker is closed: what is due is sent. To try now what waits for its next attempt: outbox-relay retry --destination logistics\n") {
		t.Errorf("%+v", r)
	}
	execute(t, db, "UPDATE outbox_destination SET breaker = 'open', breaker_opened_at = now(), breaker_until = now() + interval '1 hour'")
	if r = command(env, "resume", "logistics", "--reset-breaker", "--json"); r.code != 0 || !strings.Contains(r.stdout, `"breaker_reset": true`) || !strings.Contains(r.stderr, `"breaker_reset":true`) {
		t.Errorf("%+v", r)
	}
	command(env, "pause", "logistic").expect(t, cli.ExitFailed, "",
		"outbox-relay: there is no destination \"logistic\": no route, no state and no waiting delivery has that name; did you mean \"logistics\"?\n")
	command(env, "resume", "x").expect(t, cli.ExitFailed, "",
		"outbox-relay: there is no destination \"x\": no route, no state and no waiting delivery has that name; see: outbox-relay status\n")
	fresh := []string{"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox)}
	command(fresh, "pause", "logistics").expect(t, cli.ExitFailed, "",
		"outbox-relay: there is no destination \"logistics\": no route, no state and no waiting delivery has that name; no destination is known before the first relay has run: outbox-relay run\n")
}

func TestRoutesAndRelays(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 1)
	db := open(t, dsn)
	command(env, "relays").expect(t, 0, "No relay is running. Start one: outbox-relay run\n", "")
	command(env, "relays", "--json").expect(t, 0, "[]\n", "")
	execute(t, db, "INSERT INTO outbox_relay (name, version) VALUES ('r1', 'v1')")
	execute(t, db, "INSERT INTO outbox_relay_destination VALUES (1, 'logistics'), (1, 'analytics')")
	execute(t, db, "INSERT INTO outbox_relay_route VALUES (1, 'paid.*', 'logistics')")
	if r := command(env, "relays"); r.code != 0 || !strings.Contains(r.stdout, "\nr1    1   v1       idle") || !strings.Contains(r.stdout, "heartbeat") ||
		!strings.HasSuffix(r.stdout, "  analytics, logistics\n") {
		t.Errorf("%+v", r)
	}
	var relays []ops.RelayStatus
	if r := command(env, "relays", "--json"); json.Unmarshal([]byte(r.stdout), &relays) != nil || len(relays) != 1 || relays[0].Name != "r1" || relays[0].Session {
		t.Errorf("%+v", r)
	}

	execute(t, db, "UPDATE outbox_route SET pattern = 'paid.*'")
	execute(t, db, "UPDATE outbox_delivery SET status = 'pending'")
	command(env, "routes", "list").expect(t, 0, "EVENT   DESTINATION  PENDING  RELAYS\npaid.*  logistics    1        r1 (1)\n", "")
	configured := append(env, "OUTBOX_DESTINATION_URL=http://127.0.0.1:9/in")
	command(configured, "routes", "list").expect(t, 0, "EVENT   DESTINATION  PENDING  RELAYS  CONFIGURED\npaid.*  logistics    1        r1 (1)  no\nOnly configured: * to default\n\n"+
		"The database has the routes of all running relays; one that starts with this configuration adds its own.\n", "")
	var list destinations.RouteList
	if r := command(configured, "routes", "list", "--json"); json.Unmarshal([]byte(r.stdout), &list) != nil || len(list.Routes) != 1 || *list.Routes[0].Configured || len(list.Missing) != 1 {
		t.Errorf("%+v", r)
	}
	command(env, "routes", "test", "paid.late").expect(t, 0, "paid.late goes to logistics, by the route paid.*\n", "")
	command(configured, "routes", "test", "paid.late").expect(t, 0, "paid.late goes to logistics, by the route paid.*\nBy the configuration it goes to default, once a relay starts with it.\n", "")
	command(env, "routes", "test", "sent").expect(t, cli.ExitFound, "", "outbox-relay: an event of type \"sent\" would be parked: no route in the database matches\n")
	r := command(configured, "routes", "test", "sent", "--json")
	var test destinations.RouteTest
	if err := json.Unmarshal([]byte(r.stdout), &test); err != nil || r.code != cli.ExitFound || !test.Parked || len(test.Stored) != 0 || len(test.Configured) != 1 {
		t.Errorf("%+v: %v", r, err)
	}
}

func TestFiltersOfEventsList(t *testing.T) {
	t.Parallel()
	env, dsn := failedOutbox(t, 2)
	execute(t, open(t, dsn), "INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, created_at) VALUES ('sent', '{}', 'o1', 'x', now() - interval '3 hours')")
	for args, want := range map[string]string{
		"--type=pa*": "2 1", "--type=*d --status=discarded": "", "--ordering-key=x": "3", "--since=2h": "2 1", "--until=2h": "3", "--since=4h --until=2h": "3", "--reason=timeout": "2 1",
	} {
		r := command(env, append([]string{"events", "list", "--json"}, strings.Fields(args)...)...)
		var list []ops.Delivery
		if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || r.code != 0 {
			t.Fatalf("%+v: %v", r, err)
		}
		var ids []string
		for _, d := range list {
			ids = append(ids, fmt.Sprint(d.EventID))
		}
		if got := strings.Join(ids, " "); got != want {
			t.Errorf("%s: got %s, want %s", args, got, want)
		}
	}
}
