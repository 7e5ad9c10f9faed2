package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// renamed makes an outbox one that relays were accepted on as another environment, with n pending
// events.
func renamed(t *testing.T, n int) (dsn string, address string) {
	t.Helper()
	dsn = coveredOutbox(t)
	db := open(t, dsn)
	execute(t, db, "INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')")
	execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'paid', '{}', 'k' || i FROM generate_series(1, $1) i", n)
	command([]string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_ENVIRONMENT=production"}, "identity", "accept", "--yes")
	return dsn, query[string](t, db, "SELECT addresses[1] FROM outbox_identity")
}

func TestIdentityOfAFreshOutbox(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	r := command(env, "identity", "show")
	if r.code != 0 || r.stderr != "" || !strings.HasSuffix(r.stdout, "\nNo relay has worked here yet: the first one records the database as its own.\n") {
		t.Errorf("%+v", r)
	}
	command(env, "identity", "discard-pending", "--yes").expect(t, cli.ExitFailed, "",
		"outbox-relay: discard what is pending: this is the database that relays were accepted on: no relay has worked here yet\n")
	command(env, "identity", "accept", "--yes").holds(t, 0, "accepted: relays work on ", `"action":"identity accept"`)
	command(env, "identity", "accept").expect(t, 0, "nothing to accept: this is the database that relays were accepted on\n", "")
	if r = command(env, "identity", "show"); r.code != 0 || !strings.HasSuffix(r.stdout, "\nRelays may work here.\n") {
		t.Errorf("%+v", r)
	}
	command(env, "identity", "discard-pending", "--yes").expect(t, cli.ExitFailed, "",
		"outbox-relay: discard what is pending: this is the database that relays were accepted on\n")
}

func TestIdentityShow(t *testing.T) {
	t.Parallel()
	dsn, address := renamed(t, 1)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_ENVIRONMENT=staging"}
	r := command(env, "identity", "show")
	for _, line := range []string{
		"                   RECORDED", "environment        production", "  staging\n", address,
		"\nDifferent: its environment is \"staging\", recorded is \"production\".\n",
		"\n  outbox-relay identity accept\n", "\n  outbox-relay identity discard-pending\n",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("no %q in:\n%s", line, r.stdout)
		}
	}
	r = command(env, "identity", "show", "--json")
	var report identity.Report
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 || r.stderr != "" {
		t.Fatalf("%+v: %v", r, err)
	}
	if report.Recorded == nil || report.Recorded.Environment != "production" || report.Found.Environment != "staging" || len(report.Differences) != 1 {
		t.Errorf("%+v", report)
	}
	if strings.Contains(r.stdout, "null") {
		t.Errorf("empty lists are shown as null:\n%s", r.stdout)
	}
	// A person who looks at events learns why they wait, beside the list.
	r = command(env, "events", "list", "--json")
	if want := `warning: nothing is claimed or sent: this is not the database that relays were accepted on: its environment is "staging", recorded is "production"; see: outbox-relay identity show` + "\n"; r.code != 0 || r.stderr != want {
		t.Errorf("%+v", r)
	}
	if r = command(env, "status"); !strings.Contains(r.stdout, "\nNothing is claimed or sent: this is not the database") {
		t.Errorf("%+v", r)
	}
}

// Without a terminal there is no question: the flag must be there.
func TestIdentityAsksFirst(t *testing.T) {
	t.Parallel()
	dsn, _ := renamed(t, 3)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_ENVIRONMENT=staging"}
	for _, name := range []string{"accept", "discard-pending"} {
		r := command(env, "identity", name)
		if r.code != cli.ExitUsage || r.stdout != "" || !strings.HasSuffix(r.stderr, "; nothing was done: run the command on a terminal, where it asks first\n") ||
			!strings.Contains(r.stderr, `as environment "staging"`) || !strings.Contains(r.stderr, `recorded is "production"`) {
			t.Errorf("%s: %+v", name, r)
		}
	}
	db := open(t, dsn)
	testkit.Equal(t, "environment", query[string](t, db, "SELECT environment FROM outbox_identity"), "production")
	testkit.Equal(t, "pending", query[int](t, db, "SELECT count(*) FROM outbox_delivery WHERE status = 'pending'"), 3)
}

// The whole way: a relay is quarantined, says so everywhere, and works after one command.
func TestQuarantineFromEndToEnd(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		requests int64
		stdout   string
	}{
		"accept":          {3 + 1, "accepted: relays work on "},
		"discard-pending": {0 + 1, "discarded 3 pending deliveries, for the reason quarantined\naccepted: relays work on "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var requests atomic.Int64
			arrived := make(chan string, 10)
			receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				requests.Add(1)
				arrived <- r.Header.Get("X-Idempotency-Key")
			}))
			defer receiver.Close()
			dsn, _ := renamed(t, 3)
			db := open(t, dsn)
			env := []string{"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL, "OUTBOX_ENVIRONMENT=staging", "OUTBOX_RELAY_NAME=r1"}
			s := start(t, env, "--poll-interval=1s")
			s.stderr.wait(t, "quarantined: nothing is claimed or sent here.", s.code)
			r := command(env, "status", "--healthcheck")
			r.expect(t, cli.ExitFailed, "", `outbox-relay: relay "r1" is quarantined: this is not the database that relays were accepted on: `+
				`its environment is "staging", recorded is "production"; see: outbox-relay identity show`+"\n")
			if r = command(env, "status"); !strings.Contains(r.stdout, " r1 ") || !strings.Contains(r.stdout, ", quarantined, started ") ||
				!strings.Contains(r.stdout, "\nNothing is claimed or sent: ") {
				t.Errorf("%+v", r)
			}
			// Also who knows nothing of the environment, and reads only.
			if r = command(env[:1], "events", "show", "1"); r.code != 0 || !strings.HasPrefix(r.stderr, "warning: nothing is claimed or sent: ") {
				t.Errorf("%+v", r)
			}
			if n := requests.Load(); n != 0 {
				t.Fatalf("%d requests", n)
			}
			r = command(env[:1], "identity", name, "--yes") // the environment is that of the relay that waits
			if r.code != 0 || !strings.HasPrefix(r.stdout, want.stdout) || !strings.Contains(r.stdout, `as environment "staging"`) {
				t.Errorf("%+v", r)
			}
			s.stderr.wait(t, "the quarantine is over", s.code)
			execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'new')")
			for range want.requests { // in any order
				receive(t, arrived, s)
			}
			s.signals <- syscall.SIGTERM
			if code := <-s.code; code != 0 {
				t.Errorf("exit code %d, stderr:\n%s", code, s.stderr)
			}
			testkit.Equal(t, "requests", requests.Load(), want.requests)
			// What the runbook says brings back what was discarded.
			r = command(env, "replay", "--status", "discarded", "--reason", "quarantined", "--yes")
			if back := fmt.Sprintf("Replayed %d deliveries", 4-want.requests); r.code != 0 || want.requests < 4 && !strings.HasPrefix(r.stdout, back) {
				t.Errorf("%+v", r)
			}
		})
	}
}
