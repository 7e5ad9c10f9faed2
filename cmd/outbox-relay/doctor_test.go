package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

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

// doctor reports nothing about an outbox that is well, and what is wrong with the configuration. It examines the database with it. The
// tests of package ops have each finding about the database.
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
	command(env, "doctor").expect(t, 0, "Nothing is wrong. Checked: configuration, server, session, transactions, schema, rights, indexes, constraints, triggers, functions, vacuum, identity, intake, events, deliveries, destinations.\n", "")

	conn, err := pgx.Connect(t.Context(), dsn)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	pgtest.Exec(t, conn, "BEGIN; SELECT pg_current_xact_id()")
	file := writeFile(t, filepath.Join(t.TempDir(), "relay.yaml"), "destinations: {new: {url: '"+receiver+"'}}\n")
	for _, c := range []struct {
		env                []string
		check, says, mends string
	}{
		{append(env, "OUTBOX_LEASE=5s"), "configuration", "OUTBOX_LEASE", "config check"},
		{append(env, "OUTBOX_RETENTION_PROCESSED_EVENTS=48h"), "configuration", "not_after", "config check"},
		{append(env, "OUTBOX_ALERT_VACUUM_BLOCKED_OVER=1ms"), "transactions", "has had a transaction open for", "pg_terminate_backend("},
		{[]string{env[0], "OUTBOX_CONFIG=" + file}, "deliveries", `no running relay has the destination "new"`, "SIGHUP"},
		{[]string{env[0], "OUTBOX_DESTINATION_URL=" + closedPort(t)}, "destinations", "connection refused", "Start the receiver"},
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
		"\n         outbox-relay replay --destination default    # once the cause is mended\n"
	if !strings.Contains(r.stdout, want) {
		t.Errorf("%+v does not say %q", r, want)
	}
}
