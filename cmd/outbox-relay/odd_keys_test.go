package main

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// words splits a command as a shell does.
func words(t *testing.T, line string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf '%s\\0' "+line).Output()
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
}

// The commands that explain and status advise work when they are pasted, whatever the ordering key is.
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
