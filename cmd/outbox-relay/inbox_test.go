package main

import (
	"encoding/json"
	"errors"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// fillInbox makes n failed events of an inbox, with ids from 1 on, and one that a middleware
// processed.
const fillInbox = `
INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, attempts, last_error, payload, request_headers, ordering_key, sequence)
SELECT 'shipping', 'finance', 'k' || i, 'paid', 'failed', i, 8, 'no such customer', 'the payload', '{"X-Secret": ["header"]}', CASE WHEN i % 2 = 0 THEN 'o' || i END, i
FROM generate_series(1, $1::int) i`

const rememberInbox = `
INSERT INTO processed_events (receiver, source, idempotency_key, event_type, processing_state, payload_hash)
SELECT receiver, source, idempotency_key, event_type, 'recorded', sha256(payload) FROM inbox_events
UNION ALL SELECT 'billing', 'finance', 'direct', 'paid', 'ignored', NULL`

// failedInbox returns an environment whose database has n failed events.
func failedInbox(t *testing.T, n int) (env []string, dsn string) {
	t.Helper()
	dsn = pgtest.New(t, migrations.Inbox)
	db := open(t, dsn)
	execute(t, db, fillInbox, n)
	execute(t, db, rememberInbox)
	return []string{"OUTBOX_DATABASE_URL=" + dsn}, dsn
}

// What is wrong whatever stands in the database is said without asking one: here there is none.
func TestMistakesOfInboxCommands(t *testing.T) {
	t.Parallel()
	env := []string{"OUTBOX_DATABASE_URL=postgres://u@127.0.0.1:1/db?connect_timeout=2"}
	const nothing = "nothing says which events are meant; name inbox ids, or narrow it with --status, --type, --key, --ordering-key, --reference, --from, --to, --since or --until"
	for _, test := range []struct{ args, stdin, want string }{
		{"inbox replay", "", nothing},
		{"inbox replay --receiver shipping --source finance --yes", "", nothing},
		{"inbox ignore --yes --limit 5", "", nothing},
		{"inbox replay 0", "", `"0" is not the id of an event; write a number such as 17`},
		{"inbox replay - --yes", "1\nx7\n", `standard input, line 2: "x7" is not the id of an event; write a number such as 17`},
		{"inbox ignore -", "1\n", "standard input cannot both name the events and answer the question; name them as arguments, or look first with --dry-run"},
		{"inbox replay --status processing", "", `--status must be one of "pending","failed","ignored","succeeded" but got "processing" (see: outbox-relay inbox replay --help)`},
		{"inbox ignore --status succeeded", "", `--status must be one of "pending","failed" but got "succeeded" (see: outbox-relay inbox ignore --help)`},
		{"inbox replay 1 --limit 0", "", "--limit: 0 is out of range; write 1 to 100000"},
		{"inbox replay --from 7 --to 3", "", "--from 7 is above --to 3"},
		{"inbox replay --since 3d", "", `--since: "3d" uses a unit longer than hours; write "72h"`},
		{"inbox list --limit 0", "", "--limit: 0 is out of range; write 1 to 10000"},
		{"inbox list --status recorded", "", "--status recorded needs --remembered: it says that an inbox has the event"},
		{"inbox list --remembered --status pending", "", "--status pending: events with --remembered are succeeded, ignored, failed or recorded"},
		{"inbox list --remembered --ordering-key o", "", "--remembered excludes --ordering-key, --from, --to and --before: only inboxes know them"},
		{"inbox list --after a/b/c", "", "--after needs --remembered; a list of the inbox continues with --before"},
		{"inbox list --remembered --after a/b", "", `--after: "a/b" is not a place as a list shows it, such as shipping/finance/invoice-17`},
		{"inbox show", "", "name one event: by its inbox id, or by --key"},
		{"inbox show 7 --key k", "", "name one event: by its inbox id, or by --key"},
		{"inbox prune", "", "missing flags: --older-than=2160h (see: outbox-relay inbox prune --help)"},
		{"inbox prune --older-than 23h", "", "--older-than: 23h is less than 24h: senders may send such an event again"},
		{"inbox prune --older-than 90d", "", `--older-than: "90d" uses a unit longer than hours; write "2160h"`},
	} {
		t.Run(test.args, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			with(test.stdin, env, strings.Fields(test.args)...).expect(t, cli.ExitUsage, "", "outbox-relay: "+test.want+"\n")
		})
	}
}

// A receiver's operator has nothing but the URL.
func TestInboxCommandsSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	r := command([]string{"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox)}, "inbox", "status")
	r.expect(t, cli.ExitSchema, "", "outbox-relay: schema mismatch: this is a producer's database, with an outbox and no inbox; name the receiver's instead (inbox: OUTBOX_DATABASE_URL; reconcile: RECEIVER_DATABASE_URL), or if both share it, run: outbox-relay migrate up --set inbox\n")
	command([]string{"OUTBOX_DATABASE_URL=postgres://u@127.0.0.1:1/db?connect_timeout=2"}, "inbox", "status").holds(t, cli.ExitDatabase, "", "")
}

func TestInboxReplayCommand(t *testing.T) {
	t.Parallel()
	env, dsn := failedInbox(t, 7)
	db := open(t, dsn)
	const waiting = "SELECT count(*) FROM inbox_events WHERE processing_state = 'pending' AND next_attempt_at <= now()"

	command(env, "inbox", "replay", "--type=pa*", "--dry-run").expect(t, 0, `7 events to replay (7 failed), such as:
  1  shipping  finance  paid  k1  failed
  2  shipping  finance  paid  k2  failed
  3  shipping  finance  paid  k3  failed
  4  shipping  finance  paid  k4  failed
  5  shipping  finance  paid  k5  failed
Nothing was replayed: this was a dry run.
`, "")
	// Without a terminal there is no answer.
	if r := command(env, "inbox", "replay", "--status=failed"); r.code != cli.ExitUsage || r.stdout != "" ||
		!strings.HasPrefix(r.stderr, "7 events to replay (7 failed), such as:\n") || !strings.HasSuffix(r.stderr, "\noutbox-relay: replay 7 events; nothing was done: run the command on a terminal, where it asks first\n") {
		t.Errorf("%+v", r)
	}
	if n := query[int](t, db, waiting); n != 0 {
		t.Fatalf("%d were replayed without a yes", n)
	}
	r := with("\ufeff2\r\n\r\n3\r\n2\r\n99\n", env, "inbox", "replay", "-", "--yes", "--json")
	var report inbox.BulkReport
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 {
		t.Fatalf("%+v: %v", r, err)
	}
	if report.Action != "inbox replay" || report.Done != 2 || report.Matched != 2 || report.Unknown != 1 || report.Left != 0 || report.DryRun || report.Interrupted {
		t.Errorf("%+v", report)
	}
	testkit.Equal(t, "due", query[int](t, db, waiting), 2)
	var audit map[string]any
	if err := json.Unmarshal([]byte(r.stderr), &audit); err != nil || audit["msg"] != "audit" || audit["action"] != "inbox replay" ||
		audit["selection"] != "2 inbox ids" && audit["selection"] != "3 inbox ids" || audit["done"] != 2.0 {
		t.Errorf("%s: %v", r.stderr, err)
	}
	command(env, "inbox", "replay", "2", "3", "--yes").expect(t, 0, "There is nothing to replay.\nLeft alone: 2 pending; to replay these too: --status pending.\n", "")
	r = command(env, "inbox", "ignore", "--status=failed", "--limit=2", "--yes")
	if r.code != 0 || r.stdout != "Ignored 2 events.\n" || query[string](t, db, "SELECT string_agg(inbox_id::text, ' ' ORDER BY inbox_id) FROM inbox_events WHERE processing_state = 'ignored'") != "1 4" {
		t.Errorf("%+v", r)
	}
}

func TestInboxListCommand(t *testing.T) {
	t.Parallel()
	env, _ := failedInbox(t, 60)
	listed := func(args ...string) (n int, next string) {
		t.Helper()
		r := command(env, append([]string{"inbox", "list", "--json"}, args...)...)
		var list struct {
			Events     []map[string]any
			Remembered []inboxops.Memory
			Next       string
		}
		if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || r.code != 0 {
			t.Fatalf("%+v: %v", r, err)
		}
		return len(list.Events) + len(list.Remembered), list.Next
	}
	for _, test := range []struct {
		continues, what string
		all             int
	}{{"--before", "--receiver=shipping", 60}, {"--after", "--remembered", 61}} {
		first, next := listed(test.what)
		rest, end := listed(test.what, test.continues, next)
		if first != 50 || first+rest != test.all || end != "" {
			t.Errorf("%s: %d and %d events, then %q", test.what, first, rest, end)
		}
	}
	if r := command(env, "inbox", "list", "--key", "k7"); r.code != 0 || strings.Count(r.stdout, "\n") != 2 || !strings.Contains(r.stdout, "no such customer") {
		t.Errorf("%+v", r)
	}
	if r := command(env, "inbox", "list", "--limit=3"); !strings.HasSuffix(r.stdout, "\nThere are more: repeat the command with --before 58.\n") {
		t.Errorf("%+v", r)
	}
	command(env, "inbox", "list", "--type=none").expect(t, 0, "No event matches.\n", "")
	command(env, "inbox", "list", "--before=1").expect(t, 0, "No event matches.\n", "")
	if r := command(env, "inbox", "list", "--remembered", "--status=ignored"); r.code != 0 || strings.Count(r.stdout, "\n") != 2 || !strings.Contains(r.stdout, "direct") {
		t.Errorf("%+v", r)
	}
}

var (
	hours  = regexp.MustCompile(`\b(1h(0m)?|59m|1h\dm)(\d+s)?\b`)
	blanks = regexp.MustCompile(` +`)
)

// roughly makes one text of all times that an hour is shown as, however long the test took, and one
// blank of several.
func roughly(text string) string {
	return blanks.ReplaceAllString(hours.ReplaceAllString(text, "AN HOUR"), " ")
}

func TestInboxShowCommand(t *testing.T) {
	t.Parallel()
	env, dsn := failedInbox(t, 3)
	db := open(t, dsn)
	execute(t, db, "UPDATE inbox_events SET ordering_key = 'o'")
	execute(t, db, "UPDATE inbox_events SET processing_state = 'pending' WHERE inbox_id = 2")
	for _, test := range []struct {
		args string
		want []string
	}{
		{"1", []string{"state failed after 8 attempts", "no such customer", "to try it: outbox-relay inbox replay 1", "events wait behind it (1)", "Remembered:", "recorded"}},
		{"2", []string{"2: behind inbox id 1 of its ordering key, which is failed"}},
		{"--key k1", []string{"inbox id 1"}},
		{"--key direct", []string{"Remembered:", "billing", "ignored"}},
	} {
		r := command(env, append([]string{"inbox", "show"}, strings.Fields(test.args)...)...)
		for _, want := range append(test.want, "The payload and the headers of the request are not shown: this command never reads them.") {
			if r.code != 0 || r.stderr != "" || !strings.Contains(roughly(r.stdout), want) {
				t.Errorf("%s: %+v lacks %q", test.args, r, want)
			}
		}
		if strings.Contains(r.stdout, "X-Secret") {
			t.Errorf("%s shows headers: %s", test.args, r.stdout)
		}
	}
	r := command(env, "inbox", "show", "2", "--json")
	var shown inboxops.Shown
	if err := json.Unmarshal([]byte(r.stdout), &shown); err != nil || len(shown.Events) != 1 || len(shown.Waits) != 1 || shown.Waits[0].Cause != "behind" || len(shown.Remembered) != 1 {
		t.Errorf("%+v: %v", r, err)
	}
	command(env, "inbox", "show", "77").expect(t, cli.ExitFailed, "", "outbox-relay: there is no event with inbox id 77: it was never recorded, or was pruned\n")
	command(env, "inbox", "show", "--key=x").expect(t, cli.ExitFailed, "", "outbox-relay: there is no event with key \"x\": it was never received, or was pruned\n")
}

func TestInboxStatusCommand(t *testing.T) {
	t.Parallel()
	empty := pgtest.New(t, migrations.Inbox)
	command([]string{"OUTBOX_DATABASE_URL=" + empty}, "inbox", "status").expect(t, 0, "No event was received here yet, or none of this receiver and source.\n", "")
	env, dsn := failedInbox(t, 4)
	db := open(t, dsn)
	execute(t, db, "UPDATE inbox_events SET processing_state = 'pending', next_attempt_at = now() - interval '1 hour' WHERE inbox_id = 1")
	execute(t, db, "UPDATE inbox_events SET processing_state = 'pending', next_attempt_at = now() + interval '1 hour' WHERE inbox_id = 3")
	execute(t, db, "INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, ordering_key, sequence, inbox_id) VALUES ('shipping', 'finance', 'w', 'pending', 'o2', 9, 9)")
	execute(t, db, "ANALYZE")
	r := command(env, "inbox", "status")
	for _, want := range []string{
		"billing finance 0", "shipping finance 3 1 1 1 0 2 0 AN HOUR the beginning", "5 in inbox_events, 5 in processed_events",
		`2 events of "shipping" failed; 1 ordering key waits behind them`, "outbox-relay inbox replay --status failed --receiver shipping --source finance", "has been due for AN HOUR",
	} {
		if r.code != 0 || r.stderr != "" || !strings.Contains(roughly(r.stdout), want) {
			t.Errorf("%+v lacks %q", r, want)
		}
	}
	r = command(env, "inbox", "status", "--json", "--receiver=shipping")
	var status inboxops.Status
	if err := json.Unmarshal([]byte(r.stdout), &status); err != nil || len(status.Senders) != 1 || status.Senders[0].Receiver != "shipping" ||
		status.Senders[0].BlockedKeys != 1 || status.InboxRows != 5 {
		t.Errorf("%+v: %v", r, err)
	}
}

// Texts that others chose begin no line and command no terminal.
func TestInboxCommandsPrintNoControlCharacters(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	env, dsn := failedInbox(t, 2)
	db := open(t, dsn)
	for _, column := range []string{"idempotency_key", "event_type", "last_error", "related_reference", "ordering_key", "claimed_by", "receiver", "source"} {
		execute(t, db, "UPDATE inbox_events SET "+column+" = E'x\\e[31m\\nevil\\u202e' WHERE inbox_id = 1")
	}
	execute(t, db, "UPDATE processed_events SET receiver = E'x\\e[31m\\nevil\\u202e', last_error = E'\\e]0;', event_type = E'\\u009b' WHERE idempotency_key = 'k2'")
	for _, args := range []string{"inbox status", "inbox list", "inbox list --remembered", "inbox show 1", "inbox replay 1 --dry-run", "inbox ignore 1 --yes", "inbox show 1 --json", "inbox status --json"} {
		r := command(env, strings.Fields(args)...)
		if r.code != 0 || strings.ContainsAny(r.stdout+r.stderr, "\x1b\u202e\u009b") || strings.Contains(r.stdout, "\nevil") {
			t.Errorf("%s: %q", args, r.stdout+r.stderr)
		}
	}
}

// A login with the role of support looks, replays and ignores. It sees no payload, prunes nothing,
// and changes nothing else.
func TestSecurityInboxSupport(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to all of it
	pgtest.Migrate(t, server.DSN(""), migrations.Inbox)
	db := open(t, server.DSN(""))
	execute(t, db, fillInbox, 4)
	execute(t, db, rememberInbox)
	execute(t, db, "UPDATE inbox_events SET payload = NULL WHERE inbox_id = 4")
	execute(t, db, "CREATE ROLE support LOGIN")
	login, err := url.Parse(server.DSN(""))
	pgtest.Must(t, err)
	login.User = url.User("support")
	env := []string{"OUTBOX_DATABASE_URL=" + login.String()}

	lacking := func(role string, args ...string) {
		t.Helper()
		r := command(env, args...)
		if r.code != cli.ExitFailed || !strings.Contains(r.stderr, "this login needs a role of migrations/roles.sql: GRANT "+role+" TO support") {
			t.Errorf("%v: %+v", args, r)
		}
	}
	lacking("inbox_support", "inbox", "status")
	conn, err := pgx.Connect(t.Context(), server.DSN(""))
	pgtest.Must(t, err)
	defer conn.Close(t.Context())
	if _, err := conn.PgConn().Exec(t.Context(), migrations.Roles()).ReadAll(); err != nil {
		t.Fatal(err)
	}
	lacking("inbox_support", "inbox", "list")
	execute(t, db, "GRANT inbox_support TO support")

	for _, test := range [][2]string{
		{"inbox status", "shipping  finance        0"},
		{"inbox list", "no such customer"},
		{"inbox list --remembered", "direct"},
		{"inbox show 2", "outbox-relay inbox replay 2"},
		{"inbox show --key direct", "billing"},
		{"inbox replay --status failed --dry-run", "3 events to replay (3 failed):"},
		{"inbox replay 1 2 4 --yes", "Replayed 2 events.\nLeft alone: 1 whose payload was removed."},
		{"inbox ignore --from 3 --status failed --yes", "Ignored 2 events."},
	} {
		if r := command(env, strings.Fields(test[0])...); r.code != 0 || !strings.Contains(r.stdout, test[1]) || strings.Contains(r.stdout, "X-Secret") {
			t.Errorf("%s: %+v", test[0], r)
		}
	}
	lacking("inbox_receiver", "inbox", "prune", "--older-than=24h", "--yes")

	support, err := pgx.Connect(t.Context(), login.String())
	pgtest.Must(t, err)
	defer support.Close(t.Context())
	for _, statement := range []string{
		"SELECT payload FROM inbox_events", "SELECT request_headers FROM inbox_events", "SELECT * FROM inbox_events", "TABLE processed_events",
		"SELECT payload_hash FROM processed_events", "SELECT e FROM inbox_events e", "SELECT count(*) FROM inbox_events WHERE payload LIKE 'the%'",
		"UPDATE inbox_events SET processing_state = 'failed' RETURNING payload", "COPY inbox_events TO STDOUT",
		"UPDATE inbox_events SET payload = '{}'", "UPDATE inbox_events SET claim = 0", "UPDATE inbox_events SET ordering_key = NULL", "UPDATE inbox_events SET last_error = ''",
		"UPDATE inbox_events SET idempotency_key = 'x'", "UPDATE inbox_events SET receiver = 'x'", "UPDATE processed_events SET processing_state = 'ignored'",
		"INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state) VALUES ('r', 's', 'k', 'failed')",
		"INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('r', 's', 'k', 'succeeded')",
		"DELETE FROM inbox_events", "DELETE FROM processed_events", "TRUNCATE inbox_events", "DELETE FROM inbox_forgotten", "UPDATE inbox_forgotten SET received_before = now()",
		"DROP TABLE inbox_events", "SELECT nextval('inbox_id_seq')", "DO $$ BEGIN LOCK TABLE inbox_events IN SHARE MODE; END $$", "SELECT * FROM inbox_freshness",
		"CREATE TABLE public.x ()", "ALTER TABLE inbox_events DISABLE TRIGGER ALL", "UPDATE inbox_schema_version SET version_id = 0",
	} {
		_, err := support.Exec(t.Context(), statement)
		if !pg.HasCode(err, pg.LacksPrivilege) {
			t.Errorf("%s: %v", statement, err)
		}
	}
	var exists bool
	if err := support.QueryRow(t.Context(), "SELECT inbox_has_payload(1)").Scan(&exists); err != nil || !exists {
		t.Errorf("%v, %v", exists, err)
	}
	execute(t, db, "CREATE ROLE stranger LOGIN")
	pgtest.Exec(t, conn, "SET SESSION AUTHORIZATION stranger")
	if err := conn.QueryRow(t.Context(), "SELECT inbox_has_payload(1)").Scan(&exists); !pg.HasCode(err, pg.LacksPrivilege) && !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("a stranger learns whether there is a payload: %v, %v", exists, err)
	}
}
