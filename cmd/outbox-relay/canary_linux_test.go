package main

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/notify/notifytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// canary is what a receiver, a producer or another login writes to be obeyed where it is read: by
// terminals, by readers' eyes, and by chats. Whatever shows it as text shows its first word.
const canary = "CANARY\x1b]0;owned\x07\x1b[2J\u009b31m\r\nFORGED line\u202e\u2066\u2028\u2029\u200f\u061c\u200b\U000e0041\u00ad\ufeff" +
	" <!channel> <@U012> @everyone @here <users/all> [x](https://evil.example/a) http://evil.example evil.example a@evil.example"

// plant writes the canary into every column of the outbox that holds text, in a row of every table,
// after removing the constraints that refuse it: what is shown must not depend on them.
func plant(t *testing.T, db *sql.DB) {
	t.Helper()
	execute(t, db, `
		INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('type', '{}', 'key', 'order'), ('type', '{}', 'key-2', 'order');
		INSERT INTO outbox_relay (name, version, quarantined, environment, address) VALUES ('name', 'v1', 'why', 'environment', 'address');
		INSERT INTO outbox_route (pattern, destination) VALUES ('type', 'shop');
		INSERT INTO outbox_relay_route (relay_id, pattern, destination) SELECT id, 'type', 'shop' FROM outbox_relay;
		INSERT INTO outbox_relay_destination (relay_id, destination) SELECT id, 'shop' FROM outbox_relay;
		INSERT INTO outbox_destination (destination, paused, paused_reason, paused_at, breaker, breaker_error, breaker_opened_at, breaker_until)
		VALUES ('shop', true, 'why', now(), 'open', 'why', now(), now())
		ON CONFLICT (destination) DO UPDATE SET (paused, paused_reason, paused_at, breaker, breaker_error, breaker_opened_at, breaker_until) =
			(true, 'why', now(), 'open', 'why', now(), now());
		UPDATE outbox_delivery SET destination = 'shop', status = 'failed', attempts = 1, last_reason = 'rejected', last_error = 'error', last_attempt_at = now();
		UPDATE outbox_delivery SET status = 'pending' WHERE event_id = (SELECT max(id) FROM outbox);
		INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, error)
		SELECT id, 1, now(), 1, 1, 1, 'shop', 'retry', 'rejected', 'error' FROM outbox;
		INSERT INTO outbox_alert (rule, subject, first_error, detail) VALUES ('rule', 'subject', 'error', 'detail');
		INSERT INTO outbox_identity (system_identifier, database_oid, timeline, environment, addresses) VALUES (1, 1, 1, 'environment', '{address}');`)
	rows, err := db.QueryContext(t.Context(), `
		SELECT format('ALTER TABLE %s DROP CONSTRAINT %I', conrelid::regclass, conname) FROM pg_constraint
		WHERE contype IN ('c', 'f') AND conrelid::regclass::text LIKE 'outbox%' AND conparentid = 0
		UNION ALL SELECT format('ALTER DOMAIN %s DROP CONSTRAINT %I', contypid::regtype, conname) FROM pg_constraint WHERE contype = 'c' AND contypid <> 0
			AND connamespace = current_schema::regnamespace
		UNION ALL SELECT format('ALTER TABLE %s DISABLE TRIGGER USER', c.oid::regclass) FROM pg_class c
			WHERE relkind = 'r' AND relname LIKE 'outbox%' AND relnamespace = current_schema::regnamespace
		UNION ALL SELECT format(CASE WHEN a.atttypid = 'text[]'::regtype THEN 'UPDATE %s SET %I = ARRAY[%L]' ELSE 'UPDATE %s SET %I = %2$I || %3$L' END,
				c.oid::regclass, a.attname, $1::text)
			FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND attnum > 0 AND NOT attisdropped AND attgenerated = '' JOIN pg_type ty ON ty.oid = a.atttypid
			WHERE relkind = 'r' AND relname LIKE 'outbox%' AND relnamespace = current_schema::regnamespace
				AND (a.atttypid = 'text[]'::regtype OR 'text'::regtype IN (ty.oid, ty.typbasetype))`, canary)
	pgtest.Must(t, err)
	defer rows.Close()
	var statements []string
	for rows.Next() {
		var statement string
		pgtest.Must(t, rows.Scan(&statement))
		statements = append(statements, statement)
	}
	if len(statements) < 40 || rows.Err() != nil {
		t.Fatalf("%d statements: %v", len(statements), rows.Err())
	}
	for _, statement := range statements {
		execute(t, db, statement)
	}
}

// onTerminal runs a command on a pseudo-terminal and returns what a person would be shown.
func onTerminal(t *testing.T, env []string, args ...string) string {
	t.Helper()
	person, program := terminal(t)
	shown := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(person) // ends with an error once the other end is closed
		shown <- all
	}()
	m := Main{Env: env, Stdin: strings.NewReader(""), Stdout: program, Stderr: program}
	m.Run(args)
	_ = program.Close()
	return string(<-shown)
}

// colours are the only sequences that the program itself sends to a terminal, beside those that
// clear a line.
var colours = regexp.MustCompile(`\x1b\[[0-9;]*m|\r\x1b\[K`)

// wantText checks that a terminal or a log was sent printable lines only, and that no stored text
// began its own line.
func wantText(t *testing.T, where, shown string) {
	t.Helper()
	for line := range strings.Lines(colours.ReplaceAllString(strings.ReplaceAll(shown, "\r\n", "\n"), "")) {
		line = strings.TrimSuffix(line, "\n")
		hidden := strings.IndexFunc(line, func(r rune) bool {
			return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co, unicode.Cs)
		})
		if hidden >= 0 || !utf8.ValidString(line) || strings.HasPrefix(strings.TrimSpace(line), "FORGED") {
			t.Errorf("%s: %+q", where, line)
		}
	}
}

// Stored text reaches an operator's terminal as plain text, and JSON holds it unchanged.
func TestSecurityCanariesOnTerminals(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	plant(t, db)
	id := fmt.Sprint(query[int64](t, db, "SELECT min(id) FROM outbox"))
	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/", "TERM=xterm"}
	for _, c := range []struct {
		args   string
		silent bool // about the canary
		text   bool // has no JSON
	}{
		{args: "status"},
		{args: "status --healthcheck --name x", silent: true, text: true},
		{args: "events list"},
		{args: "events show " + id},
		{args: "events show 4711", text: true},
		{args: "relays"},
		{args: "routes list"},
		{args: "routes test type", silent: true}, // no pattern matches any more
		{args: "identity show"},
		{args: "identity accept", text: true},
		{args: "identity discard-pending", text: true},
		{args: "replay --dry-run " + id},
		{args: "discard --dry-run " + id},
		{args: "pause x", text: true},
		{args: "archive run --dry-run", silent: true},
		{args: "events create-deliveries", silent: true},
		{args: "migrate status", silent: true},
	} {
		shown := onTerminal(t, env, strings.Fields(c.args)...)
		wantText(t, c.args, shown)
		if !c.silent && !strings.Contains(shown, "CANARY") {
			t.Errorf("%s shows nothing that was planted: %s", c.args, shown)
		}
		if c.text {
			continue
		}
		args := append(strings.Fields(c.args), "--json")
		wantText(t, c.args+" --json", onTerminal(t, env, args...))
		out := command(env, args...).stdout
		if c.args == "status" {
			r, _ := process(t, env, args...)
			out = r.stdout
		}
		wantText(t, c.args+" --json", out)
		if all := stringsIn(t, []byte(out)); !c.silent && !slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, canary) }) {
			t.Errorf("%s --json: the data is not intact: %s", c.args, out)
		}
	}
}

// stringsIn returns every string of a JSON text.
func stringsIn(t *testing.T, text []byte) (all []string) {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if s, ok := token.(string); ok {
			all = append(all, s)
		}
	}
}

// What a receiver answers, and what stands in an alert, is text in the log, in the database and in
// every channel.
func TestSecurityCanariesInAlertsAndLogs(t *testing.T) {
	t.Parallel()
	authority := notifytest.NewAuthority()
	w := notifytest.New(t, authority, nil)
	hostile := newChat(t, func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header()["X-Canary"] = []string{"CANARY\u202e <!channel>"}
		rw.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = io.WriteString(rw, canary)
	})
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	// The proxy of egress is that of the services; the channels and destinations of this host would
	// be refused by none.
	config := fmt.Appendf(nil, "egress: {proxy: %q}\nalerts:\n  after: 0s\n  channels:\n  - {service: %q}\n", w.Proxy.URL, w.Mail.URL())
	for _, url := range slices.Sorted(maps.Values(notifytest.ServiceURLs())) {
		config = fmt.Appendf(config, "  - {service: %q}\n", url)
	}
	config = fmt.Appendf(config, "  - {webhook: %q}\n  - {slack: %q}\ndestinations:\n  shop: {url: %q, proxy: none, excerpts: text}\nroutes:\n- {event: '*', to: [shop]}\n",
		"http://webhook.test/", "http://slack.test/", hostile.URL)
	dir := t.TempDir()
	file := writeFile(t, filepath.Join(dir, usualFile), string(config))
	env := append(os.Environ(), asProgram+"=1", "SSL_CERT_FILE="+writeFile(t, filepath.Join(dir, "authority.pem"), string(authority.PEM)), "OUTBOX_DATABASE_URL="+dsn, allowSuperuser)
	execute(t, db, `INSERT INTO outbox_alert (rule, subject, first_error, detail) VALUES ('rule' || $1, 'subject' || $1, 'error' || $1, 'detail' || $1)`, canary)
	log := relayOnTerminal(t, env, file, func() {
		execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'type', '{}', 'key-' || n FROM generate_series(1, 20) n`)
		channels := len(notifytest.ServiceURLs()) + 3 // mail, a webhook, Slack
		until(t, db, `SELECT count(*) = 2 * $1 FROM outbox_alert_notice WHERE sent_at IS NOT NULL AND channel <> 'log'`, channels)
		until(t, db, `SELECT count(*) = 20 FROM outbox_delivery WHERE status = 'failed'`)
	})
	wantText(t, "log", log)
	if strings.Count(log, "CANARY") < 4 {
		t.Errorf("the log holds nothing of it: %s", log)
	}
	if stored := query[string](t, db, `SELECT min(last_error) FROM outbox_delivery`); !strings.Contains(stored, "CANARY") {
		t.Errorf("last_error is %q", stored)
	} else {
		wantText(t, "last_error", stored)
	}
	for _, raw := range w.Mail.All() {
		subject, body := notifytest.ParseMail(t, raw)
		wantHarmless(t, "smtp", subject)
		wantHarmless(t, "smtp", strings.TrimSpace(body))
	}
	if mails := w.Mail.All(); len(mails) != 2 {
		t.Errorf("%d mails", len(mails))
	}
	messages := w.Messages()
	for host, bodies := range messages {
		found := 0
		for _, body := range bodies {
			for _, text := range textsOf(body) {
				if strings.Contains(text, "CANARY") {
					found++
					wantText(t, host, text)
					if host != "webhook.test" { // whose fields are data
						wantHarmless(t, host, text)
					}
				}
			}
		}
		if found == 0 {
			t.Errorf("%s was sent nothing of it: %q", host, bodies)
		}
	}
	testkit.Equal(t, "hosts were told", len(messages), len(notifytest.ServiceURLs())+2)
}

// relayOnTerminal runs a relay whose log is shown on a terminal, until what is awaited has
// happened.
func relayOnTerminal(t *testing.T, env []string, file string, await func()) string {
	t.Helper()
	person, program := terminal(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "run", "--config", file)
	cmd.Env = append(env, "TERM=xterm")
	cmd.Stdout, cmd.Stderr = program, program
	pgtest.Must(t, cmd.Start())
	_ = program.Close()
	shown := make(chan []byte, 1)
	go func() {
		all, _ := io.ReadAll(person)
		shown <- all
	}()
	await()
	pgtest.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	all := <-shown
	_ = cmd.Wait()
	return string(all)
}

// textsOf returns the strings of a message's JSON, the values of its forms, and the lines of what
// is neither.
func textsOf(m notifytest.Message) (texts []string) {
	for _, part := range []string{m.Query, m.Body, m.Headers} {
		values, err := url.ParseQuery(part)
		switch {
		case json.Valid([]byte(part)):
			decoder := json.NewDecoder(strings.NewReader(part))
			for token, err := decoder.Token(); err == nil; token, err = decoder.Token() {
				if s, ok := token.(string); ok {
					texts = append(texts, s)
				}
			}
		case err == nil && strings.Contains(part, "=") && !strings.Contains(part, " "):
			for _, v := range values {
				texts = append(texts, v...)
			}
		default:
			texts = append(texts, strings.Split(part, "\n")...)
		}
	}
	return texts
}

// runbookOf finds the relay's own link in an alert, and codeOf what Slack is sent as code, where it
// obeys nothing.
var runbookOf, codeOf = regexp.MustCompile(`Runbook: https://github\.com/\S+#alert-\w+`), regexp.MustCompile("`[^`]*`")

// wantHarmless checks that nothing in a text that a chat was sent works there.
func wantHarmless(t *testing.T, where, text string) {
	t.Helper()
	text = runbookOf.ReplaceAllString(text, "")
	if where == "slack.test" {
		text = codeOf.ReplaceAllString(text, "")
	}
	for _, attack := range []string{"<!", "<@", "@everyone", "@here", "<users", "](", "://", "evil.example", "a@"} {
		if strings.Contains(text, attack) {
			t.Errorf("%s: %q reached the chat: %s", where, attack, text)
		}
	}
}
