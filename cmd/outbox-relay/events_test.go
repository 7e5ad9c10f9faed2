package main

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestEvents(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics'), ('*', 'analytics')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, related_reference, headers) VALUES ('paid', '{\"secret\":1}', 'k1', 'invoice 42', '{\"tenant\": \"a\"}'), ('paid', '{}', 'k2', 'invoice 42', '{}')")
	execute(t, db, `UPDATE outbox_delivery SET status = 'failed', attempts = 1, last_attempt_at = '2026-01-02 03:04:05Z', last_http_status = 422,
		last_reason = 'rejected', last_error = E'422 \x1b[31mred' WHERE event_id = 1 AND destination = 'logistics'`)
	execute(t, db, `INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay_id, started_at, duration_ms, http_status, outcome, reason, error)
		VALUES (1, 'logistics', 1, 1, 7, '2026-01-02 03:04:05Z', 12, 422, 'fail', 'rejected', '422 no such customer')`)
	execute(t, db, "UPDATE outbox_delivery SET attempts = 2 WHERE event_id = 2 AND destination = 'logistics'")
	execute(t, db, "DELETE FROM outbox_route")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k3')")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}

	for name, c := range map[string]struct {
		args []string
		keys []string // of the deliveries, as "key destination"
	}{
		"all, newest first": {nil, []string{"k3 ", "k2 analytics", "k2 logistics", "k1 analytics", "k1 logistics"}},
		"failed":            {[]string{"--status=failed"}, []string{"k1 logistics"}},
		"retrying":          {[]string{"--status=retrying"}, []string{"k2 logistics"}},
		"by destination":    {[]string{"--destination=analytics", "--status=pending"}, []string{"k2 analytics", "k1 analytics"}},
		"limited":           {[]string{"--limit=2"}, []string{"k3 ", "k2 analytics"}},
		"parked":            {[]string{"--parked"}, []string{"k3 "}},
		"status parked":     {[]string{"--status=parked"}, []string{"k3 "}},
		"by key":            {[]string{"--key=k2", "--destination=logistics"}, []string{"k2 logistics"}},
		"by reference":      {[]string{"--reference=invoice 42"}, []string{"k2 analytics", "k2 logistics", "k1 analytics", "k1 logistics"}},
		"an unknown key":    {[]string{"--key=absent"}, []string{}},
		"none":              {[]string{"--destination=logistics", "--status=discarded"}, []string{}},
	} {
		r := command(env, append([]string{"events", "list", "--json"}, c.args...)...)
		var list []ops.Delivery
		if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || r.code != 0 || r.stderr != "" {
			t.Fatalf("%s: %+v: %v", name, r, err)
		}
		keys := []string{}
		for _, d := range list {
			keys = append(keys, d.IdempotencyKey+" "+d.Destination)
		}
		if strings.Join(keys, ", ") != strings.Join(c.keys, ", ") {
			t.Errorf("%s: got %q, want %q", name, keys, c.keys)
		}
	}

	command(env, "events", "list", "--status=failed").expect(t, 0, ""+
		"EVENT  TYPE  KEY  DESTINATION  STATUS  ATTEMPTS  REASON    NEXT OR LAST          LAST ERROR\n"+
		"1      paid  k1   logistics    failed  1         rejected  2026-01-02T03:04:05Z  422 \ufffd[31mred\n", "")
	for name, want := range map[string]string{
		"--destination=logistic": `there is no destination "logistic"; did you mean "logistics"?`,
		"--reason=rejectet":      `there is no reason "rejectet"; did you mean "rejected"?`,
		"--type=payed":           `no route and none of the newest events has the type "payed"; did you mean "paid"?`,
	} {
		command(env, "events", "list", name).expect(t, cli.ExitFailed, "", "outbox-relay: "+want+"\n")
		command(env, "replay", name, "--yes").expect(t, cli.ExitFailed, "", "outbox-relay: "+want+"\n")
	}
	shown := command(env, "events", "show", "1")
	if shown.code != 0 || !strings.HasSuffix(shown.stdout, "\nAttempts that did not deliver:\n"+
		"STARTED               DESTINATION  ATTEMPT  TOOK  OUTCOME  REASON    ERROR\n"+
		"2026-01-02T03:04:05Z  logistics    1        12ms  fail     rejected  422 no such customer\n") {
		t.Errorf("%+v", shown)
	}
	if strings.Contains(shown.stdout, "secret") {
		t.Error("the payload is shown")
	}
	if !strings.HasPrefix(shown.stdout, "Event 1: paid, version 1\n  key              k1\n  reference        invoice 42\n  created          ") ||
		!strings.Contains(shown.stdout, "\n  header           tenant: not shown\n  payload          12 bytes, not shown; add --payload\n\nDESTINATION") {
		t.Errorf("%+v", shown)
	}
	if byKey := command(env, "events", "show", "k1"); byKey.stdout != shown.stdout {
		t.Errorf("%+v", byKey)
	}
	revealed := command(env, "events", "show", "k1", "--payload")
	if !strings.Contains(revealed.stdout, `{"secret":1}`) || !strings.Contains(revealed.stdout, "header           tenant: a\n") || !strings.Contains(revealed.stderr, `"action":"show payload"`) || !strings.Contains(revealed.stderr, `"event_id":1`) {
		t.Errorf("%+v", revealed)
	}
	command(env, "events", "show", "invoice 42").expect(t, cli.ExitFailed, "",
		"outbox-relay: several events have the related reference \"invoice 42\": 2, 1; name one by its id, or list them: outbox-relay events list --reference 'invoice 42'\n")
	command(env, "events", "show", "4").expect(t, cli.ExitFailed, "", "outbox-relay: unknown event: no event has the id, the idempotency key or the related reference \"4\"\n")
	command(env, "explain", "absent").expect(t, cli.ExitFailed, "", "outbox-relay: unknown event: no event has the id, the idempotency key or the related reference \"absent\"\n")
	explained := command(env, "explain", "1")
	for _, part := range []string{
		"  inserted as event 1 of type paid\n", "2026-01-02 03:04:05.000  logistics: attempt 1 by relay 7 failed after 12ms: 422 no such customer\n",
		"  logistics: failed for good: 422 \ufffd[31mred. Once the cause is fixed: outbox-relay replay 1 --destination logistics\n", "\nWhy it waits:\n  analytics: ", "  logistics: the header tenant is not sent; ",
	} {
		if !strings.Contains(explained.stdout, part) {
			t.Errorf("explain does not say %q:\n%s", part, explained.stdout)
		}
	}
	execute(t, db, `UPDATE outbox_delivery d SET status = 'delivered', delivered_at = greatest(e.created_at::timestamptz, e.available_at) + interval '17 ms'
		FROM outbox e WHERE e.id = d.event_id AND d.event_id = 2 AND d.destination = 'logistics'`)
	if r := command(env, "events", "show", "2"); !strings.Contains(r.stdout, "  AFTER DUE  ") || !strings.Contains(r.stdout, "  17ms  ") {
		t.Errorf("show does not say that the delivery was 17 ms after it was due:\n%s", r.stdout)
	}
	command(env, "events", "list", "--limit=0").holds(t, cli.ExitUsage, "", "--limit: 0 is out of range")
}

// Events without deliveries get theirs after a yes, once.
func TestEventsCreateDeliveries(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, `INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics'), ('*', 'analytics')`)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k1'), ('paid', '{}', 'k2')`)
	execute(t, db, `DELETE FROM outbox_delivery WHERE event_id = 2`)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	command(env, "events", "create-deliveries").expect(t, 2, "",
		"outbox-relay: create the deliveries of 1 event without any, the first is event 2, as the stored routes say; nothing was done: run the command on a terminal, where it asks first\n")
	command(env, "events", "create-deliveries", "--yes").holds(t, 0, "2 deliveries created for 1 event\n", `"action":"events create-deliveries"`)
	command(env, "events", "create-deliveries", "--yes").expect(t, 0, "0 deliveries created for 0 events\n", "")
	command(env, "events", "create-deliveries", "--json").expect(t, 0, "{\n  \"events\": 0,\n  \"deliveries\": 0\n}\n", "")
}

// words splits a command as a shell does.
func words(t *testing.T, line string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf '%s\\0' "+line).Output()
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
}

// The commands that explain and status advise work when they are pasted, whatever the ordering key
// is.
func TestAdvisedCommandsTakeOddKeys(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"--destination", "-", "-y", `it's "a" $(id) \ key`, "# key", "*", "--", strings.Repeat("k", 255)} {
		dsn := coveredOutbox(t)
		db := open(t, dsn)
		execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics')")
		quoted := "'" + strings.ReplaceAll(key, "'", "''") + "'"
		execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 'paid', '1', 'k' || i, "+quoted+" FROM generate_series(1, 3) i")
		env := []string{"OUTBOX_DATABASE_URL=" + dsn}
		execute(t, db, "UPDATE outbox_delivery SET status = 'failed', attempts = 1, last_reason = 'rejected' WHERE event_id = 1")
		_, advised, _ := strings.Cut(command(env, "explain", "2").stdout, ", or outbox-relay ")
		advised, _, _ = strings.Cut(advised, "\n")
		var status ops.Status
		pgtest.Must(t, json.Unmarshal([]byte(command(env, "status", "--json").stdout), &status))
		fromStatus := ""
		for _, a := range status.Advice {
			for _, c := range a.Commands {
				if strings.Contains(c, "--head-of-key") {
					fromStatus = strings.TrimPrefix(c, "outbox-relay ")
				}
			}
		}
		for i, line := range []string{advised, fromStatus} {
			execute(t, db, fmt.Sprintf("UPDATE outbox_delivery SET status = 'failed', attempts = 1, last_reason = 'rejected' WHERE event_id = %d", i+1))
			if r := command(env, append(words(t, line), "--yes")...); r.code != 0 || r.stdout != "Discarded 1 delivery.\n" {
				t.Errorf("%q: %s: %+v", key, line, r)
			}
		}
	}
}

// The command that send advises finds the event.
func TestSentOddKeysAreFound(t *testing.T) {
	t.Parallel()
	env := []string{"OUTBOX_DATABASE_URL=" + pgtest.New(t, migrations.Outbox)}
	for _, key := range []string{"--help", "-", "it's", "k 1"} {
		sent := command(env, "send", "paid", "--key="+key)
		_, advised, _ := strings.Cut(sent.stdout, ": outbox-relay ")
		if r := command(env, words(t, strings.TrimSpace(advised))...); r.code != 0 || !strings.Contains(r.stdout, "inserted as event ") {
			t.Errorf("%q: %+v: %+v", key, sent, r)
		}
	}
}

// A number may be the id of one event and the key of another: the commands say so.
func TestNumberIsKeyOfAnotherEvent(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('paid', '1', 'k1', 'o'), ('paid', '1', '1', 'o'), ('paid', '1', '3', 'o'), ('paid', '1', '77', 'o')")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	const note = "Note: 1 is taken as the id of an event; event 2 has it as its idempotency key: to name that one, write 2.\n"
	for _, args := range [][]string{{"explain", "1"}, {"events", "show", "1"}, {"events", "show", "1", "--json"}, {"discard", "1", "--dry-run"}, {"replay", "1", "--dry-run"}, {"retry", "1", "--dry-run"}} {
		if r := command(env, args...); r.code != 0 || r.stderr != note {
			t.Errorf("%q: %+v", args, r)
		}
	}
	for _, args := range [][]string{{"explain", "2"}, {"explain", "3"}, {"explain", "k1"}, {"explain", "77"}, {"discard", "3", "--dry-run"}} {
		if r := command(env, args...); r.code != 0 || r.stderr != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if r := command(env, "discard", "--destination=logistics", "--head-of-key=o", "--yes"); r.code != 0 || strings.Contains(r.stderr, "Note") {
		t.Errorf("%+v", r)
	}
}

func TestAuditCommand(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	command(env, "audit").expect(t, 0, "No entry: nothing was changed or revealed.\n", "")
	command(env, "audit", "--json").expect(t, 0, "[]\n", "")
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '1', 'k1'), ('paid', '1', 'k2')")
	for _, args := range [][]string{
		{"pause", "logistics", "--as=ann", "--reason=a \x1b[31mred\u202e night"},
		{"discard", "--destination=logistics", "--type=p*", "--yes", "--as=bob"},
		{"events", "show", "1", "--payload"},
	} {
		if r := command(env, args...); r.code != 0 {
			t.Fatalf("%+v", r)
		}
	}
	at := regexp.MustCompile(`20[0-9T:-]+Z`)
	login := regexp.MustCompile(`(3 +TIME +)[^ ]+ +`)
	r := command(env, "audit")
	r.stdout = login.ReplaceAllString(at.ReplaceAllString(r.stdout, "TIME"), "${1}LOGIN ")
	rows := regexp.MustCompile(` +`).ReplaceAllString(r.stdout, " ")
	if r.stderr != "" || rows != "ENTRY WHEN WHO BY ACTION STATE DONE WHICH\n"+
		"3 TIME LOGIN cli reveal_payload done 0 event 1: login postgres\n"+
		"2 TIME bob cli discard done 2 {\"destination\":\"logistics\",\"type\":\"p*\"}\n"+
		"1 TIME ann cli pause done 0 logistics: a \ufffd[31mred\ufffd night\n" {
		t.Errorf("%s%s", rows, r.stderr)
	}
	r = command(env, "audit", "--json", "--limit=1", "--before=3")
	var list []ops.AuditEntry
	if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || len(list) != 1 || list[0].ID != 2 || list[0].Done != 2 || r.stderr != "There may be more: repeat the command with --before 2\n" {
		t.Errorf("%v: %+v", err, r)
	}
	command(env, "audit", "--limit=0").expect(t, cli.ExitUsage, "", "outbox-relay: --limit: 0 is out of range; write 1 to 10000\n")
	command(env, "audit", "--before=-1").expect(t, cli.ExitUsage, "", "outbox-relay: --before: -1 is no number of an entry; write 1 or more\n")
}

// A producer may write any time that PostgreSQL knows. What becomes of the event is told all the
// same, before and after a relay has refused it, by commands, page and API.
func TestSecurityAnyTimeOfAProducerIsTold(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	times := []string{"infinity", "-infinity", "4713-01-01 BC", "12345-01-01", "294276-12-31"}
	for _, at := range times {
		execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('paid', '{}', '"+at+"', '"+at+"')")
	}
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	told := func(when string) (explained []ops.Explanation) {
		for _, at := range times {
			for _, args := range [][]string{{"explain", "--", at}, {"events", "show", "--", at}, {"events", "show", "--json", "--", at}} {
				if r := command(env, args...); r.code != 0 || !strings.Contains(r.stdout, "paid") {
					t.Errorf("%s, %v: %+v", when, args, r)
				}
			}
			var x ops.Explanation
			if r := command(env, "explain", "--json", "--", at); json.Unmarshal([]byte(r.stdout), &x) != nil || x.Event.IdempotencyKey != at {
				t.Errorf("%s: explain %s: %+v", when, at, r)
			}
			explained = append(explained, x)
		}
		return explained
	}
	told("before a relay runs")
	s := start(t, append(env, "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_PATH_PREFIX=/outbox", "OUTBOX_METRICS_LISTEN=none"))
	c := s.console(t)
	testkit.Eventually(t, "that all have failed", func() bool {
		return strings.Count(command(env, "events", "list", "--status=failed").stdout, "outbox_available_at_is_in_year_1_to_366_days_ahead") == len(times)
	})
	for _, x := range told("after it was refused") {
		for _, moment := range x.History {
			if moment.What == "failed" && moment.At.Sub(x.Event.CreatedAt).Abs() > time.Hour {
				t.Errorf("%s failed at %v", x.Event.IdempotencyKey, moment.At)
			}
		}
		for _, path := range []string{"/events/", "/api/v1/events/"} {
			if status, body := c.send("GET", path+strconv.FormatInt(x.Event.ID, 10), nil); status != 200 || !strings.Contains(body, x.Event.IdempotencyKey) {
				t.Errorf("%s%d: %d %s", path, x.Event.ID, status, body)
			}
		}
	}
	s.end(t, 0)
}
