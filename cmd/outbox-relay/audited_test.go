package main

import (
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Whatever a command changes, the audit has a row of it, and stderr a line.
func TestEveryChangeLeavesARowAndALine(t *testing.T) {
	t.Parallel()
	dsn := coveredOutbox(t)
	db := open(t, dsn)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	execute(t, db, `INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default');
		INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'paid', '{}', i FROM generate_series(1, 3) i;
		DELETE FROM outbox_delivery WHERE event_id = 2;
		INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'default')`)
	for _, change := range []struct{ action, prepare, args string }{
		{"pause", "", "pause default"},
		{"resume", "", "resume default"},
		{"create_deliveries", "", "events create-deliveries --yes"},
		{"replay", "UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1", "replay 1 --yes"},
		{"retry", "UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour', last_attempt_at = now() - interval '1 hour' WHERE event_id = 1", "retry 1 --yes"},
		{"discard", "", "discard 1 --yes"},
		{"acknowledge_alert", "", "alerts acknowledge lag default"},
		{"silence_alerts", "", "alerts silence --for=1h"},
		{"accept_identity", "", "identity accept --yes"},
		{"discard", "UPDATE outbox_identity SET database_oid = 1", "identity discard-pending --yes"},
		{"archive", "INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason) VALUES (1, 1, '2020-01-01', 1, 1, 1, 'default', 'retry', 'x')", "archive run --yes"},
	} {
		if change.prepare != "" {
			execute(t, db, change.prepare)
		}
		before := query[int](t, db, `SELECT count(*) FROM outbox_audit`)
		r := command(append(env, "OUTBOX_ENVIRONMENT=production"), strings.Fields(change.args)...)
		if row := query[string](t, db, `SELECT coalesce(string_agg(action || ' ' || state, ' ' ORDER BY id), '') FROM outbox_audit WHERE id > $1`, before); r.code != 0 || !strings.HasPrefix(row, change.action+" done") {
			t.Errorf("%s: the audit has %q: %+v", change.args, row, r)
		}
		if !strings.Contains(r.stderr, `"msg":"audit"`) {
			t.Errorf("%s: stderr is %q", change.args, r.stderr)
		}
	}
}

// Relays may keep for longer than the defaults that a command has without their configuration.
func TestArchiveAsksWithoutARetention(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	settled(t, db, 1, 10)
	execute(t, db, `CREATE TABLE old PARTITION OF outbox_archive FOR VALUES FROM ('2020-01-01') TO ('2020-02-01')`)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	command(env, "archive", "run").holds(t, cli.ExitUsage, "", "10 events archived, 1 month dropped (old)")
	if n := query[int](t, db, `SELECT count(*) FROM outbox_archive`); n != 0 {
		t.Errorf("%d events are archived", n)
	}
	command(append(env, "OUTBOX_RETENTION_DELETE_AFTER=0"), "archive", "run").holds(t, 0, "10 events archived, 0 months dropped", `"action":"archive run"`)
	command(env, "archive", "run", "--yes").holds(t, 0, "1 month dropped (old)", `"action":"archive run"`)
}
