package archive

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// months returns the archive's partitions.
func (db *database) months() string {
	db.Helper()
	return strings.Join(relaytest.Rows[string](db.Database, `SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass ORDER BY 1`), " ")
}

// at adds a settled event of that day.
func (db *database) at(day string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ('t', '1', $1::text, $1::text::timestamptz, '2000-01-01')`, day)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = next_attempt_at, attempts = 1 WHERE status = 'pending'`)
	db.Exec(`UPDATE outbox_delivery SET delivered_at = '2000-01-01', next_attempt_at = '2000-01-01'`)
}

// keptLong makes everything in the archive look as if it were there for longer than the archive
// keeps it at least.
func (db *database) keptLong() {
	db.Helper()
	db.Exec(`UPDATE outbox_archive SET archived_at = now() - interval '31 days'`)
}

// since returns a duration that reaches back to that day.
func (db *database) since(day string) time.Duration {
	return time.Duration(relaytest.Row[float64](db.Database, `SELECT extract(epoch FROM now() - $1::text::timestamptz)::float8`, day) * float64(time.Second))
}

func TestArchiveMonths(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.Exec(`CREATE TABLE "a whole year" (LIKE outbox_archive INCLUDING ALL);
		ALTER TABLE outbox_archive ATTACH PARTITION "a whole year" FOR VALUES FROM ('2022-01-01 00:00+00') TO ('2023-01-01 00:00+00')`)
	for _, day := range []string{
		"2001-01-01 00:00:00+00", "2022-05-05 00:00:00+00", "2025-02-28 23:59:59.999999+00", "2025-03-01 00:00:00+00", "2025-12-31 23:30:00-01", "9998-12-31 23:59:59+00",
	} {
		db.at(day)
	}
	db.archive(Retention{ArchiveAfter: days})
	if got, want := db.months(), `"a whole year" outbox_archive_200101 outbox_archive_202502 outbox_archive_202503 outbox_archive_202601`; got != want {
		t.Errorf("months are %s, want %s", got, want)
	}
	if n := relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_archive`); n != 5 || relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox`) != 1 {
		t.Errorf("%d events are archived", n)
	}

	// It has just come here, and stays for 30 days.
	if done := db.archive(Retention{DeleteAfter: 30 * days}); len(done.Months) > 0 {
		t.Errorf("dropped %q at once", done.Months)
	}
	db.keptLong()
	// A month goes when its last event could be old enough, not when its first is.
	due, err := Job{DB: db.Pool, Keep: Retention{DeleteAfter: db.since("2025-03-31 12:00+00")}}.Rehearse(t.Context())
	relaytest.Must(t, err)
	done := db.archive(Retention{DeleteAfter: db.since("2025-03-31 12:00+00")})
	want := `[outbox_archive_200101 "a whole year" outbox_archive_202502]`
	if fmt.Sprint(due.Months) != want || fmt.Sprint(done.Months) != want {
		t.Errorf("dropped %q, announced %q, want %s", done.Months, due.Months, want)
	}
	if got, want := db.months(), `outbox_archive_202503 outbox_archive_202601`; got != want {
		t.Errorf("months are %s, want %s", got, want)
	}

	// One that the owner detached stays, and is in no run's way.
	db.Exec(`ALTER TABLE outbox_archive DETACH PARTITION outbox_archive_202503`)
	db.at("2025-03-15 00:00:00+00")
	db.archive(Retention{ArchiveAfter: days, DeleteAfter: 100 * 365 * days})
	if got, want := db.months(), `outbox_archive_202503_ outbox_archive_202601`; got != want {
		t.Errorf("months are %s, want %s", got, want)
	}
	// A default partition takes what has none, and is never dropped.
	db.Exec(`CREATE TABLE rest PARTITION OF outbox_archive DEFAULT`)
	db.at("2024-01-01 00:00:00+00")
	db.archive(Retention{ArchiveAfter: days})
	db.keptLong()
	db.archive(Retention{DeleteAfter: 30 * days})
	if got, want := db.months(), `rest`; got != want {
		t.Errorf("months are %s, want %s", got, want)
	}
}

// Who reads an old month keeps it for a night; what is due besides is done.
func TestArchiveDoesNotWaitForReaders(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	db.at("2020-01-01 00:00:00+00")
	db.archive(Retention{ArchiveAfter: days})
	db.keptLong()
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason) VALUES (1, 1, '2020-01-01', 1, 1, 1, 'default', 'retry', 'x')`)
	db.at("2020-02-01 00:00:00+00") // makes a month beside the one that is read
	tx := db.Begin()
	_, err := tx.Exec(t.Context(), `SELECT FROM outbox_archive`)
	relaytest.Must(t, err)
	done, err := Job{DB: db.Pool, Keep: Retention{ArchiveAfter: days, DeleteAfter: 30 * days, Attempts: days}}.Run(t.Context())
	if err == nil || !strings.HasPrefix(err.Error(), "drop month of the archive: ") || !pg.HasCode(err, "55P03") || done.Events != 1 || done.Attempts != 1 || len(done.Months) != 0 {
		t.Errorf("%+v, %v", done, err)
	}
	relaytest.Must(t, tx.Rollback(t.Context()))
	db.keptLong()
	if done := db.archive(Retention{DeleteAfter: 30 * days}); len(done.Months) != 2 {
		t.Errorf("%+v", done)
	}
}

func TestPruneAttempts(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	add := func(n int, age string) {
		db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason)
			SELECT 1, coalesce((SELECT max(claim) FROM outbox_attempt), 0) + i, now() - $2::interval, 1, 1, 1, 'default', 'retry', 'x' FROM generate_series(1, $1) i`, n, age)
	}
	add(2*attemptBatch, "91 days")
	add(1, "89 days")
	add(1, "91 days")
	keep := Retention{Attempts: 90 * days}
	if due, err := (Job{DB: db.Pool, Keep: keep}).Rehearse(t.Context()); err != nil || due.Attempts != 2*attemptBatch+1 || relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_attempt`) != 2*attemptBatch+2 {
		t.Errorf("announced %+v, %v", due, err)
	}
	if done := db.archive(keep); done.Attempts != 2*attemptBatch+1 || relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_attempt`) != 1 {
		t.Errorf("pruned %+v", done)
	}
}

func TestPruneProcessedEvents(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{&relaytest.Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}}
	const old, young = "91 days", "89 days"
	kept := 0
	for _, c := range []struct {
		state, received, processed string
		pruned                     bool
	}{
		{"succeeded", old, old, true},
		{"succeeded", old, "", true}, // as Once leaves it
		{"ignored", old, old, true},
		{"failed", old, old, false},
		{"pending", old, "", false},
		{"processing", old, "", false},
		{"succeeded", young, young, false},
		{"succeeded", old, young, false}, // after a long time in the inbox
	} {
		db.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, processed_at)
			SELECT 'test', 's', $1 || i, split_part($1, '/', 1), now() - $2::interval, now() - nullif($3, '')::interval
			FROM generate_series(1, 500) i`, fmt.Sprint(c.state, "/", c.received, "/", c.processed), c.received, c.processed)
		if !c.pruned {
			kept += 500
		}
	}
	keep := Retention{ProcessedEvents: 90 * days}
	if done := db.archive(keep); done.ProcessedEvents != 0 {
		t.Errorf("pruned %+v, and nothing of it was announced", done)
	}
	if n := relaytest.Row[int](db.Database, `SELECT count(*) FROM inbox_forgotten WHERE source = 's' AND received_before BETWEEN now() - interval '91 days' AND now() - interval '90 days'`); n != 1 {
		t.Error("what will be removed was not announced")
	}
	db.Exec(`UPDATE inbox_forgotten SET announced_at = announced_at - interval '2 minutes'`)
	// A duplicate of one of them is just being looked at, as the package consumer does it.
	tx := db.Begin()
	_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended('test' || E'\n' || $1::text || E'\n' || $2::text, 122550254464888 # 'processed_events'::regclass::oid::bigint))`,
		pgx.QueryExecModeSimpleProtocol, "s", "succeeded/"+old+"/"+old+"7") // which keeps no snapshot
	relaytest.Must(t, err)
	if due, err := (Job{DB: db.Pool, Keep: keep}).Rehearse(t.Context()); err != nil || due.ProcessedEvents != int64(4000-kept) {
		t.Errorf("announced %+v, %v", due, err)
	}
	if done := db.archive(keep); done.ProcessedEvents != int64(4000-kept-1) {
		t.Errorf("pruned %+v", done)
	}
	relaytest.Must(t, tx.Rollback(t.Context()))
	if done := db.archive(keep); done.ProcessedEvents != 1 {
		t.Errorf("then %+v", done)
	}
	testkit.Equal(t, "failed and left", relaytest.Row[int](db.Database, `SELECT count(*) FROM processed_events`), kept)
}

// A function that searches a schema in which others may create does not run with the owner's
// rights.
func TestPruneProcessedEventsOfAnAlteredReceiver(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{&relaytest.Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}}
	db.Exec(`ALTER FUNCTION inbox_prune(text, bigint, integer, interval, boolean) SET search_path = public, pg_temp`)
	db.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at)
		SELECT 'r', 's', i, 'succeeded', now() - make_interval(days => i) FROM generate_series(1, 180) i`)
	done, err := Job{DB: db.Pool, Keep: Retention{ProcessedEvents: 90 * days}}.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "the receiver's tables in schema public are not those of its migrations, or do not belong to postgres") || done.ProcessedEvents != 0 {
		t.Errorf("%+v, %v", done, err)
	}
}

// A caller's own table of that name is not the receiver's, and what he hangs on it does not run
// with the owner's rights.
func TestPruneWithoutReceiver(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	conn, err := pgx.Connect(t.Context(), db.DSN)
	relaytest.Must(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), `CREATE TEMP TABLE processed_events (source text, idempotency_key text, processing_state text, received_at timestamptz, processed_at timestamptz);
		INSERT INTO processed_events VALUES ('s', 'k', 'succeeded', '2020-01-01', '2020-01-01')`)
	relaytest.Must(t, err)
	a := Job{DB: conn, Keep: Retention{ProcessedEvents: days}}
	if done, err := a.Run(t.Context()); err != nil || done.ProcessedEvents != 0 {
		t.Errorf("%+v, %v", done, err)
	}
}

// Zero keeps for ever.
func TestRetentionOfNothing(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.InsertOld(1, "key")
	if done := db.archive(Retention{}); done.Events != 0 || (Retention{}).Removes() {
		t.Errorf("%+v", done)
	}
}

// Whatever a batch does, it reads its own part of each table, through the primary key. Statistics
// from when the tables were empty, and none at all, must not change that.
func TestArchivePlans(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{&relaytest.Database{TB: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)}}
	db.Route()
	db.Cover()
	db.Exec(`ALTER TABLE outbox SET (autovacuum_enabled = off); ALTER TABLE outbox_delivery SET (autovacuum_enabled = off);
		ALTER TABLE outbox_attempt SET (autovacuum_enabled = off); ALTER TABLE processed_events SET (autovacuum_enabled = off)`)
	db.Exec(`VACUUM ANALYZE`)
	conn, err := pgx.Connect(t.Context(), db.DSN) // the planner's settings are not those of a relay
	relaytest.Must(t, err)
	defer conn.Close(t.Context())
	// More than five times, after which a plan is kept.
	run := func(statement string, from *int64, batch int) (done int) {
		for range 8 {
			w := archiveWalk{statement: statement, batch: batch}
			result, err := w.step(t.Context(), conn, *from, 30*days, false)
			relaytest.Must(t, err)
			*from, done = result.Cursor, done+int(result.Done)
		}
		return done
	}
	var events, attempts, pages int64
	run(archiveEvents, &events, 100)
	run(pruneAttempts, &attempts, 100)
	run(pruneProcessedEvents, &pages, 4)
	events, attempts, pages = 0, 0, 0

	db.InsertOld(120_000, "key")
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason)
		SELECT 1, i, now() - interval '40 days', 1, 1, 1, 'default', 'retry', 'x' FROM generate_series(1, 120000) i`)
	db.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at) SELECT 'test', 's', i, 'succeeded', now() - interval '40 days' FROM generate_series(1, 120000) i`)
	db.Exec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 's', now() - interval '30 days', now() - interval '1 day')`)
	for _, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			db.Exec(`VACUUM ANALYZE`)
		}
		_, err := conn.Exec(t.Context(), `BEGIN; `+relaytest.NoteReads)
		relaytest.Must(t, err)
		if n, m, k := run(archiveEvents, &events, 100), run(pruneAttempts, &attempts, 100), run(pruneProcessedEvents, &pages, 4); n != 800 || m != 800 || k == 0 {
			t.Errorf("archived %d events, pruned %d attempts and %d of processed_events", n, m, k)
		}
		result, err := conn.Query(t.Context(), `SELECT format('%s: %s sequential scans, %s rows', relname, seq_scan, idx_tup_fetch) FROM `+relaytest.SinceNoted+`
			WHERE relname IN ('outbox', 'outbox_delivery', 'outbox_attempt', 'processed_events') AND (seq_scan > 0 OR idx_tup_fetch > 8 * 800) ORDER BY 1`)
		relaytest.Must(t, err)
		wrong, err := pgx.CollectRows(result, pgx.RowTo[string])
		relaytest.Must(t, err)
		if len(wrong) > 0 {
			t.Errorf("with statistics %s: %q", statistics, wrong)
		}
		_, err = conn.Exec(t.Context(), `COMMIT`)
		relaytest.Must(t, err)
	}
}

// An error says what an operator forgot after an upgrade.
func TestArchiveWithoutRights(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.Exec(`CREATE ROLE nobody_in_particular; GRANT USAGE ON SCHEMA public TO nobody_in_particular`)
	tx := db.Begin()
	_, err := tx.Exec(t.Context(), `SET LOCAL ROLE nobody_in_particular`)
	relaytest.Must(t, err)
	_, err = archiveWalk{"archive events", archiveEvents, 0, 1}.step(t.Context(), tx, 0, days, false)
	relaytest.Must(t, tx.Rollback(t.Context()))
	db.Exec(`DROP OWNED BY nobody_in_particular; DROP ROLE nobody_in_particular`)
	if want := regexp.MustCompile(`^archive events: .* \(SQLSTATE 42501\); run migrations/roles.sql again, as the owner of the tables, and grant this login outbox_relay$`); err == nil || !want.MatchString(err.Error()) {
		t.Errorf("%v", err)
	}
}
