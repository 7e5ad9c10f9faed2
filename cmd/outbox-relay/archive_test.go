package main

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// settled adds events that were delivered 35 days ago, with the xid of events that have their
// deliveries.
func settled(t testing.TB, db *sql.DB, from, to int) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), `
		WITH event AS (
			INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at, xid)
			SELECT 'invoice.issued', json_build_object('invoice', i, 'pad', repeat('x', 250)), 'settled-' || i, now() - interval '40 days', now() - interval '40 days', '2'
			FROM generate_series($1::int, $2::int) i RETURNING id
		)
		INSERT INTO outbox_delivery (event_id, destination, status, delivered_at, next_attempt_at, attempts)
		SELECT id, 'default', 'delivered', now() - interval '35 days', now() - interval '35 days', 1 FROM event`, from, to); err != nil {
		t.Fatal(err)
	}
}

// moved returns how many of the settled events stand in the archive, after having checked that each
// stands in exactly one place, with its delivery.
func moved(t testing.TB, db *sql.DB, all int) (n int) {
	t.Helper()
	var lost, wrong int
	err := db.QueryRowContext(t.Context(), `
		WITH everywhere AS (
			SELECT o.id, o.payload::text, false AS archived, (SELECT count(*) FROM outbox_delivery d WHERE d.event_id = o.id AND d.status = 'delivered') AS deliveries
			FROM outbox o WHERE o.idempotency_key LIKE 'settled-%'
			UNION ALL
			SELECT a.id, a.payload::text, true, jsonb_array_length(a.deliveries) + (SELECT count(*) FROM outbox_delivery d WHERE d.event_id = a.id)
			FROM outbox_archive a WHERE a.idempotency_key LIKE 'settled-%'
		)
		SELECT count(*) FILTER (WHERE archived), $1 - count(DISTINCT id), count(*) - count(DISTINCT id) + count(*) FILTER (WHERE deliveries <> 1)
			+ count(*) - count(DISTINCT payload) FROM everywhere`, all).Scan(&n, &lost, &wrong)
	if err != nil || lost != 0 || wrong != 0 {
		t.Errorf("%d events are lost, %d twice or without their delivery: %v", lost, wrong, err)
	}
	return n
}

// archiveProcess starts outbox-relay archive run in its own process.
func archiveProcess(t testing.TB, dsn string, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command(os.Args[0], append([]string{"archive", "run"}, args...)...)
	var out bytes.Buffer
	cmd.Env = append(os.Environ(), asProgram+"=1", "OUTBOX_DATABASE_URL="+dsn, "OUTBOX_RETENTION_ARCHIVE_AFTER=720h")
	cmd.Stdout, cmd.Stderr = &out, &out
	pgtest.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, &out
}

// until waits for what a process does to the database.
func until(t testing.TB, db *sql.DB, statement string, args ...any) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var done bool
		pgtest.Must(t, db.QueryRowContext(t.Context(), statement, args...).Scan(&done))
		if done {
			return
		}
		<-tick.C
	}
}

const archivedOver = `SELECT count(*) > $1 FROM outbox_archive`

// A signal lets the batch at hand end, and the command say what it did.
func TestArchiveIsInterrupted(t *testing.T) {
	t.Parallel()
	const events = 4000
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	settled(t, db, 1, events)
	cmd, out := archiveProcess(t, dsn, "--batch=20", "--json")
	until(t, db, archivedOver, 100)
	pgtest.Must(t, cmd.Process.Signal(os.Interrupt))
	_ = cmd.Wait()
	var done struct {
		DryRun, Complete bool
		Events           int
	}
	line, text, _ := strings.Cut(out.String(), "\n")
	text, errors, _ := strings.Cut(text, "}\n")
	if err := json.Unmarshal([]byte(text+"}"), &done); err != nil || errors != "outbox-relay: interrupted\n" || !strings.Contains(line, `"action":"archive run"`) || cmd.ProcessState.ExitCode() != cli.ExitInterrupted {
		t.Fatalf("exit code %d, %v:\n%s", cmd.ProcessState.ExitCode(), err, out)
	}
	if n := moved(t, db, events); n != done.Events || done.Complete || n <= 100 || n >= events {
		t.Errorf("it says %+v, and %d are archived", done, n)
	}
}

// The rights that roles.sql gives a relay are enough, for all of it.
func TestArchiveWithRelayRights(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := open(t, dsn)
	execute(t, db, migrations.Roles()+`; CREATE ROLE archiving_relay LOGIN IN ROLE outbox_relay`)
	t.Cleanup(func() { _, _ = db.Exec(`DROP ROLE archiving_relay`) })
	settled(t, db, 1, 10)
	execute(t, db, `INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason) VALUES (1, 1, '2020-01-01', 1, 1, 1, 'default', 'retry', 'x')`)
	execute(t, db, `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at) VALUES ('test', 's', 'k', 'succeeded', '2020-01-01'), ('test', 'announced now', 'k', 'succeeded', '2020-01-01')`)
	execute(t, db, `INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 's', '2020-01-02', '2020-03-01')`)
	execute(t, db, `CREATE TABLE old PARTITION OF outbox_archive FOR VALUES FROM ('2020-01-01') TO ('2020-02-01')`)
	env := []string{"OUTBOX_DATABASE_URL=" + strings.Replace(dsn, "postgres@", "archiving_relay@", 1), "OUTBOX_RETENTION_ARCHIVE_AFTER=720h"}

	const all = `10 events archived, 1 month dropped (old), 1 attempt and 1 row of processed_events removed` + "\n"
	command(env, "archive", "run", "--dry-run").expect(t, 0, "to be done: "+all, "")
	command(env, "archive", "run").holds(t, 0, "done: "+all, `"action":"archive run"`)
	command(env, "archive", "run", "--json").expect(t, 0, `{
  "dry_run": false,
  "complete": true,
  "events": 0,
  "months": [],
  "attempts": 0,
  "processed_events": 0
}
`, "")

	var announced bool
	if err := db.QueryRow(`SELECT EXISTS (SELECT FROM inbox_forgotten WHERE source = 'announced now')`).Scan(&announced); err != nil || !announced {
		t.Errorf("what goes next is announced: %v, %v", announced, err)
	}

	// The owner of the tables lost the right to create partitions.
	execute(t, db, `CREATE ROLE archiving_owner; GRANT ALL ON ALL TABLES IN SCHEMA public TO archiving_owner; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO archiving_owner;
		ALTER FUNCTION outbox_archive_batch(bigint, integer, interval, boolean) OWNER TO archiving_owner`)
	t.Cleanup(func() { _, _ = db.Exec(`DROP OWNED BY archiving_owner; DROP ROLE archiving_owner`) })
	settled(t, db, 11, 11)
	execute(t, db, `DROP TABLE `+query[string](t, db, `SELECT string_agg(inhrelid::regclass::text, ', ') FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass`))
	const nothing = "done: 0 events archived, 0 months dropped, 0 attempts and 0 rows of processed_events removed\n"
	command(env, "archive", "run").expect(t, cli.ExitFailed, nothing,
		"outbox-relay: archive events: ERROR: permission denied for schema public (SQLSTATE 42501); GRANT CREATE on that schema to the owner of the tables\n")

	// A schema that was upgraded without them.
	execute(t, db, `REVOKE EXECUTE ON FUNCTION outbox_archive_batch(bigint, integer, interval, boolean) FROM outbox_relay`)
	command(env, "archive", "run").expect(t, cli.ExitFailed, nothing,
		"outbox-relay: archive events: ERROR: permission denied for function outbox_archive_batch (SQLSTATE 42501); run migrations/roles.sql again, as the owner of the tables, and grant this login outbox_relay\n")
}

// A command says which role its login lacks.
func TestCommandsWithoutRights(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	execute(t, db, migrations.Roles()+`; CREATE ROLE looking_reader LOGIN IN ROLE outbox_reader; INSERT INTO outbox_route VALUES ('*', 'shop')`)
	t.Cleanup(func() { _, _ = db.Exec(`DROP ROLE looking_reader`) })
	env := []string{"OUTBOX_DATABASE_URL=" + strings.Replace(dsn, "postgres@", "looking_reader@", 1)}
	const needs = " (SQLSTATE 42501); this login needs a role of migrations/roles.sql: outbox_reader to look, outbox_relay to change something; only the owner of the tables migrates\n"
	command(env, "events", "list", "--json").expect(t, 0, "[]\n", "")
	command(env, "pause", "shop").expect(t, cli.ExitFailed, "", "outbox-relay: pause shop: ERROR: permission denied for table outbox_destination"+needs)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k1')`)
	if r := command(env, "events", "show", "k1", "--payload"); r.code != cli.ExitFailed || !strings.HasSuffix(r.stderr, " (SQLSTATE 42501); run migrations/roles.sql and grant this login outbox_support\n") {
		t.Errorf("%+v", r)
	}
	execute(t, db, `REVOKE outbox_reader FROM looking_reader`)
	command(env, "send", "paid").expect(t, cli.ExitFailed, "", "outbox-relay: insert event: ERROR: permission denied for table outbox (SQLSTATE 42501); "+
		"run migrations/roles.sql and grant this login outbox_producer\n")
	command(env, "events", "list").expect(t, cli.ExitFailed, "", "outbox-relay: read schema version: ERROR: permission denied for table outbox_schema_version"+needs)
	r := command(env, "migrate", "up", "--set", "inbox")
	if want := "permission denied for schema public (SQLSTATE 42501); migrate as the owner of the tables, who needs CREATE on the schema (on the database, to make a schema)\n"; r.code != cli.ExitFailed || !strings.HasSuffix(r.stderr, want) {
		t.Errorf("%+v", r)
	}
}

func TestArchiveUsage(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	env := []string{"OUTBOX_DATABASE_URL=" + dsn}
	for _, batch := range []int{0, 10_001} {
		command(env, "archive", "run", fmt.Sprintf("--batch=%d", batch)).expect(t, cli.ExitUsage, "", fmt.Sprintf("outbox-relay: --batch: %d is out of range; write 1 to 10000\n", batch))
	}
	// Needs neither destinations nor their secrets, but a retention that it could work by.
	const nothing = "done: 0 events archived, 0 months dropped, 0 attempts and 0 rows of processed_events removed\n"
	command(env, "archive", "run").expect(t, 0, nothing, "")
	command(append(env, "OUTBOX_RETENTION_ARCHIVE_AFTER=0"), "archive", "run").expect(t, 0, nothing, "")
	command(append(env, "OUTBOX_RETENTION_ARCHIVE_AFTER=30d"), "archive", "run").expect(t, cli.ExitConfig, "", mistakes(`env OUTBOX_RETENTION_ARCHIVE_AFTER: "30d" uses a unit longer than hours; write "720h"`))

	db := open(t, dsn)
	tx, err := db.BeginTx(t.Context(), nil)
	pgtest.Must(t, err)
	if _, err := tx.ExecContext(t.Context(), `LOCK TABLE ONLY outbox_archive IN SHARE UPDATE EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	command(env, "archive", "run").expect(t, cli.ExitFailed, nothing, "outbox-relay: another relay or command is archiving at the moment\n")
	pgtest.Must(t, tx.Rollback())
}
