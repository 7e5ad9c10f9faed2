package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

func TestEvents(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'logistics'), ('*', 'analytics')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{\"secret\":1}', 'k1'), ('paid', '{}', 'k2')")
	execute(t, db, `UPDATE outbox_delivery SET status = 'failed', attempts = 1, last_attempt_at = '2026-01-02 03:04:05Z', last_status = 422,
		last_reason = 'rejected', last_error = E'422 \x1b[31mred' WHERE event_id = 1 AND destination = 'logistics'`)
	execute(t, db, `INSERT INTO outbox_attempt (event_id, destination, claim, attempt, relay, started_at, duration_ms, status, outcome, reason, error)
		VALUES (1, 'logistics', 1, 1, 7, '2026-01-02 03:04:05Z', 12, 422, 'fail', 'rejected', '422 no such customer')`)
	execute(t, db, "DELETE FROM outbox_route")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k3')")
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}

	for name, c := range map[string]struct {
		args []string
		keys []string // of the deliveries, as "key destination"
	}{
		"all, newest first": {nil, []string{"k3 ", "k2 analytics", "k2 logistics", "k1 analytics", "k1 logistics"}},
		"failed":            {[]string{"--status=failed"}, []string{"k1 logistics"}},
		"by destination":    {[]string{"--destination=analytics", "--status=pending"}, []string{"k2 analytics", "k1 analytics"}},
		"limited":           {[]string{"--limit=2"}, []string{"k3 ", "k2 analytics"}},
		"parked":            {[]string{"--parked"}, []string{"k3 "}},
		"none":              {[]string{"--destination=absent"}, []string{}},
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
		"EVENT  TYPE  KEY  DESTINATION  STATUS  ATTEMPTS  NEXT OR LAST          REASON    LAST ERROR\n"+
		"1      paid  k1   logistics    failed  1         2026-01-02T03:04:05Z  rejected  422 \ufffd[31mred\n", "")
	command(env, "events", "list", "--destination=absent").expect(t, 0, "No delivery matches.\n", "")
	shown := command(env, "events", "show", "1")
	if shown.code != 0 || !strings.HasSuffix(shown.stdout, "\nAttempts that did not deliver:\n"+
		"STARTED               DESTINATION  ATTEMPT  TOOK  OUTCOME  REASON    ERROR\n"+
		"2026-01-02T03:04:05Z  logistics    1        12ms  fail     rejected  422 no such customer\n") {
		t.Errorf("%+v", shown)
	}
	if strings.Contains(shown.stdout, "secret") {
		t.Error("the payload is shown")
	}
	command(env, "events", "show", "4").expect(t, exitFailed, "", "outbox-relay: event 4 has no delivery: it does not exist, was archived, or needs outbox-relay events create-deliveries\n")
	command(env, "events", "show", "0").expect(t, exitUsage, "", "outbox-relay: 0 is not the id of an event\n")
	if r := command(env, "events", "list", "--limit=0"); r.code != exitUsage || !strings.Contains(r.stderr, "--limit: 0 is out of range") {
		t.Errorf("%+v", r)
	}
}
