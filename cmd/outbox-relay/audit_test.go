package main

import (
	"encoding/json"
	"regexp"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

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
