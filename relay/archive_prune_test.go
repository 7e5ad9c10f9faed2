package relay

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// months returns the archive's partitions.
func (db *database) months() string {
	db.Helper()
	return strings.Join(rows[string](db, `SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass ORDER BY 1`), " ")
}

// at adds a settled event of that day.
func (db *database) at(day string) {
	db.Helper()
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ('t', '1', $1, $1::text::timestamptz, '2000-01-01')`, day)
	db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = next_attempt_at, attempts = 1 WHERE status = 'pending'`)
	db.exec(`UPDATE outbox_delivery SET delivered_at = '2000-01-01', next_attempt_at = '2000-01-01'`)
}

// keptLong makes everything in the archive look as if it were there for longer than the archive keeps it at least.
func (db *database) keptLong() {
	db.Helper()
	db.exec(`UPDATE outbox_archive SET archived_at = now() - interval '31 days'`)
}

// since returns a duration that reaches back to that day.
func (db *database) since(day string) time.Duration {
	return time.Duration(row[float64](db, `SELECT extract(epoch FROM now() - $1::text::timestamptz)::float8`, day) * float64(time.Second))
}

func TestArchiveMonths(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`CREATE TABLE "a whole year" (LIKE outbox_archive INCLUDING ALL);
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
	if n := row[int](db, `SELECT count(*) FROM outbox_archive`); n != 5 || row[int](db, `SELECT count(*) FROM outbox`) != 1 {
		t.Errorf("%d events are archived", n)
	}

	// It has just come here, and stays for 30 days.
	if done := db.archive(Retention{DeleteAfter: 30 * days}); len(done.Months) > 0 {
		t.Errorf("dropped %q at once", done.Months)
	}
	db.keptLong()
	// A month goes when its last event could be old enough, not when its first is.
	due, err := NewOps(db.pool).ArchiveDue(t.Context(), Retention{DeleteAfter: db.since("2025-03-31 12:00+00")}, nil)
	must(t, err)
	done := db.archive(Retention{DeleteAfter: db.since("2025-03-31 12:00+00")})
	want := `[outbox_archive_200101 "a whole year" outbox_archive_202502]`
	if fmt.Sprint(due.Months) != want || fmt.Sprint(done.Months) != want {
		t.Errorf("dropped %q, announced %q, want %s", done.Months, due.Months, want)
	}
	if got, want := db.months(), `outbox_archive_202503 outbox_archive_202601`; got != want {
		t.Errorf("months are %s, want %s", got, want)
	}

	// One that somebody detached is his, and in nobody's way.
	db.exec(`ALTER TABLE outbox_archive DETACH PARTITION outbox_archive_202503`)
	db.at("2025-03-15 00:00:00+00")
	db.archive(Retention{ArchiveAfter: days, DeleteAfter: 100 * 365 * days})
	if got, want := db.months(), `outbox_archive_202503_ outbox_archive_202601`; got != want {
		t.Errorf("months are %s, want %s", got, want)
	}
	// A default partition takes what has none, and is never dropped.
	db.exec(`CREATE TABLE rest PARTITION OF outbox_archive DEFAULT`)
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
	t.Parallel()
	db := newDatabase(t)
	db.at("2020-01-01 00:00:00+00")
	db.archive(Retention{ArchiveAfter: days})
	db.keptLong()
	db.exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay, destination, outcome, reason) VALUES (1, 1, '2020-01-01', 1, 1, 1, 'default', 'retry', 'x')`)
	db.at("2020-02-01 00:00:00+00") // makes a month beside the one that is read
	tx := db.begin()
	_, err := tx.Exec(t.Context(), `SELECT FROM outbox_archive`)
	must(t, err)
	done, err := NewOps(db.pool).Archive(t.Context(), Retention{ArchiveAfter: days, DeleteAfter: 30 * days, Attempts: days}, nil)
	if err == nil || !strings.HasPrefix(err.Error(), "drop month of the archive: ") || !pg.HasCode(err, "55P03") || done.Events != 1 || done.Attempts != 1 || len(done.Months) != 0 {
		t.Errorf("%+v, %v", done, err)
	}
	must(t, tx.Rollback(t.Context()))
	db.keptLong()
	if done := db.archive(Retention{DeleteAfter: 30 * days}); len(done.Months) != 2 {
		t.Errorf("%+v", done)
	}
}

func TestPruneAttempts(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	add := func(n int, age string) {
		db.exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay, destination, outcome, reason)
			SELECT 1, coalesce((SELECT max(claim) FROM outbox_attempt), 0) + i, now() - $2::interval, 1, 1, 1, 'default', 'retry', 'x' FROM generate_series(1, $1) i`, n, age)
	}
	add(2*attemptBatch, "91 days")
	add(1, "89 days")
	add(1, "91 days")
	keep := Retention{Attempts: 90 * days}
	if due, err := NewOps(db.pool).ArchiveDue(t.Context(), keep, nil); err != nil || due.Attempts != 2*attemptBatch+1 || row[int](db, `SELECT count(*) FROM outbox_attempt`) != 2*attemptBatch+2 {
		t.Errorf("announced %+v, %v", due, err)
	}
	if done := db.archive(keep); done.Attempts != 2*attemptBatch+1 || row[int](db, `SELECT count(*) FROM outbox_attempt`) != 1 {
		t.Errorf("pruned %+v", done)
	}
}

func TestPruneProcessedEvents(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{TB: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
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
		db.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, processed_at)
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
	if n := row[int](db, `SELECT count(*) FROM inbox_forgotten WHERE source = 's' AND received_before BETWEEN now() - interval '91 days' AND now() - interval '90 days'`); n != 1 {
		t.Error("what will be removed was not announced")
	}
	db.exec(`UPDATE inbox_forgotten SET announced_at = announced_at - interval '2 minutes'`)
	// A duplicate of one of them is just being looked at, as the package consumer does it.
	tx := db.begin()
	_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended('test' || E'\n' || $1::text || E'\n' || $2::text, 122550254464888 # 'processed_events'::regclass::oid::bigint))`,
		pgx.QueryExecModeSimpleProtocol, "s", "succeeded/"+old+"/"+old+"7") // which keeps no snapshot
	must(t, err)
	if due, err := NewOps(db.pool).ArchiveDue(t.Context(), keep, nil); err != nil || due.ProcessedEvents != int64(4000-kept) {
		t.Errorf("announced %+v, %v", due, err)
	}
	if done := db.archive(keep); done.ProcessedEvents != int64(4000-kept-1) {
		t.Errorf("pruned %+v", done)
	}
	must(t, tx.Rollback(t.Context()))
	if done := db.archive(keep); done.ProcessedEvents != 1 {
		t.Errorf("then %+v", done)
	}
	if n := row[int](db, `SELECT count(*) FROM processed_events`); n != kept {
		t.Errorf("%d are left, want %d", n, kept)
	}
}

// The function of an older receiver searches a schema in which others may create: it does not run with the owner's rights.
func TestPruneProcessedEventsOfAnOldReceiver(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{TB: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
	inbox := stdlib.OpenDBFromPool(db.pool)
	defer inbox.Close()
	provider, err := migrations.New(inbox, migrations.Inbox, migrations.Options{})
	must(t, err)
	_, err = provider.DownTo(t.Context(), 7)
	must(t, err)
	db.exec(`INSERT INTO processed_events (source, idempotency_key, processing_state, received_at)
		SELECT 's', i, 'succeeded', now() - make_interval(days => i) FROM generate_series(1, 180) i`)
	done, err := NewOps(db.pool).Archive(t.Context(), Retention{ProcessedEvents: 90 * days}, nil)
	if err == nil || !strings.Contains(err.Error(), "the receiver's tables in schema public are not those of version 9 that belong to postgres") || done.ProcessedEvents != 0 {
		t.Errorf("%+v, %v", done, err)
	}
}

// A caller's own table of that name is not the receiver's, and what he hangs on it does not run with the owner's rights.
func TestPruneWithoutReceiver(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	conn, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), `CREATE TEMP TABLE processed_events (source text, idempotency_key text, processing_state text, received_at timestamptz, processed_at timestamptz);
		INSERT INTO processed_events VALUES ('s', 'k', 'succeeded', '2020-01-01', '2020-01-01')`)
	must(t, err)
	a := archiver{q: conn, keep: Retention{ProcessedEvents: days}}
	if done, err := a.run(t.Context()); err != nil || done.ProcessedEvents != 0 {
		t.Errorf("%+v, %v", done, err)
	}
}

// Zero keeps for ever.
func TestRetentionOfNothing(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.aged(1, "key")
	if done := db.archive(Retention{}); done.Events != 0 || (Retention{}).removes() {
		t.Errorf("%+v", done)
	}
}

// The server counts the reads of a session's last transactions in pg_stat_xact_user_tables too, until it has passed them on: at
// most once a second. So a transaction notes what it finds, and counts from there.
const (
	noteReads  = `CREATE TEMP TABLE noted ON COMMIT DROP AS SELECT relid, seq_scan, idx_tup_fetch FROM pg_stat_xact_user_tables`
	sinceNoted = `(SELECT x.relname, x.seq_scan - n.seq_scan AS seq_scan, x.idx_tup_fetch - n.idx_tup_fetch AS idx_tup_fetch
		FROM pg_stat_xact_user_tables x JOIN pg_temp.noted n USING (relid)) reads`
)

// Whatever a batch does, it reads its own part of each table, through the primary key. Statistics from when the tables
// were empty, and none at all, must not change that.
func TestArchivePlans(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox, migrations.Inbox)
	db := &database{TB: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
	db.route()
	db.exec(`ALTER TABLE outbox SET (autovacuum_enabled = off); ALTER TABLE outbox_delivery SET (autovacuum_enabled = off);
		ALTER TABLE outbox_attempt SET (autovacuum_enabled = off); ALTER TABLE processed_events SET (autovacuum_enabled = off)`)
	db.exec(`VACUUM ANALYZE`)
	conn, err := pgx.Connect(t.Context(), db.dsn) // the planner's settings are not those of a relay
	must(t, err)
	defer conn.Close(t.Context())
	// More than five times, after which a plan is kept.
	run := func(statement string, from *int64, batch int) (done int) {
		for range 8 {
			w := archiveWalk{statement: statement, batch: batch}
			result, err := w.step(t.Context(), conn, *from, 30*days, false)
			must(t, err)
			*from, done = result.Cursor, done+int(result.Done)
		}
		return done
	}
	var events, attempts, pages int64
	run(archiveEvents, &events, 100)
	run(pruneAttempts, &attempts, 100)
	run(pruneProcessedEvents, &pages, 4)
	events, attempts, pages = 0, 0, 0

	db.aged(120_000, "key")
	db.exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay, destination, outcome, reason)
		SELECT 1, i, now() - interval '40 days', 1, 1, 1, 'default', 'retry', 'x' FROM generate_series(1, 120000) i`)
	db.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at) SELECT 'test', 's', i, 'succeeded', now() - interval '40 days' FROM generate_series(1, 120000) i`)
	db.exec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 's', now() - interval '30 days', now() - interval '1 day')`)
	for _, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			db.exec(`VACUUM ANALYZE`)
		}
		_, err := conn.Exec(t.Context(), `BEGIN; `+noteReads)
		must(t, err)
		if n, m, k := run(archiveEvents, &events, 100), run(pruneAttempts, &attempts, 100), run(pruneProcessedEvents, &pages, 4); n != 800 || m != 800 || k == 0 {
			t.Errorf("archived %d events, pruned %d attempts and %d of processed_events", n, m, k)
		}
		result, err := conn.Query(t.Context(), `SELECT format('%s: %s sequential scans, %s rows', relname, seq_scan, idx_tup_fetch) FROM `+sinceNoted+`
			WHERE relname IN ('outbox', 'outbox_delivery', 'outbox_attempt', 'processed_events') AND (seq_scan > 0 OR idx_tup_fetch > 8 * 800) ORDER BY 1`)
		must(t, err)
		wrong, err := pgx.CollectRows(result, pgx.RowTo[string])
		must(t, err)
		if len(wrong) > 0 {
			t.Errorf("with statistics %s: %q", statistics, wrong)
		}
		_, err = conn.Exec(t.Context(), `COMMIT`)
		must(t, err)
	}
}

func TestRetentionMistakes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		keep Retention
		want string // empty: fine
	}{
		"nothing":                 {Retention{}, ``},
		"the defaults":            {Retention{ArchiveAfter: DefaultArchiveAfter, DeleteAfter: DefaultDeleteAfter, Attempts: DefaultKeepAttempts, ProcessedEvents: DefaultKeepProcessed, Schedule: DefaultArchiveSchedule}, ``},
		"archived, never dropped": {Retention{ArchiveAfter: days}, ``},
		"dropped, never archived": {Retention{DeleteAfter: 30 * days}, ``},
		"archived too soon":       {Retention{ArchiveAfter: days - 1}, `retention.archive_after: 23h59m59.999999999s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`},
		"dropped too soon":        {Retention{DeleteAfter: 29 * days}, `retention.delete_after: 696h0m0s is too short: the database refuses less than 720h; write 720h or more, or 0 for ever`},
		"no log":                  {Retention{Attempts: time.Hour}, `retention.attempts: 1h0m0s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`},
		"no memory":               {Retention{ProcessedEvents: time.Hour}, `retention.processed_events: 1h0m0s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`},
		"a macro":                 {Retention{Schedule: "@daily"}, ``},
		"an interval":             {Retention{Schedule: "@every 6h"}, ``},
		"negative":                {Retention{ArchiveAfter: -1}, `retention.archive_after: -1ns is negative; write a duration such as 720h, or 0 for ever`},
		"dropped before archived": {Retention{ArchiveAfter: 1000 * time.Hour, DeleteAfter: 720 * time.Hour}, `retention.delete_after: 720h0m0s is shorter than retention.archive_after (1000h0m0s), so that what is archived would be dropped at once; write 1000h0m0s or more, or 0 for ever`},
		"a short memory":          {Retention{ProcessedEvents: 100 * time.Hour}, `retention.processed_events: 100h0m0s is shorter than destinations.default.retry.horizon (720h0m0s), until when a duplicate may come, and would be processed again; write 720h or more, or 0 for ever, or a shorter horizon`},
		"just long enough":        {Retention{ProcessedEvents: 720 * time.Hour}, ``},
		"six fields":              {Retention{Schedule: "0 17 3 * * *"}, `retention.schedule: "0 17 3 * * *" is not a schedule; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"no such minute":          {Retention{Schedule: "60 3 * * *"}, `retention.schedule: "60 3 * * *" is not a schedule; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"a time zone":             {Retention{Schedule: "TZ=Europe/Berlin 17 3 * * *"}, `retention.schedule: names a time zone, where an hour is skipped or repeated; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"a time zone alone":       {Retention{Schedule: "CRON_TZ=UTC"}, `retention.schedule: names a time zone, where an hour is skipped or repeated; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"without a pause":         {Retention{Schedule: "@every 0s"}, `retention.schedule: "@every 0s" is too often; write @every 1m or more`},
		"a huge batch":            {Retention{Batch: 10_001}, `retention.batch: 10001 is out of range; write 1 to 10000`},
	} {
		var got []string
		for _, problem := range (Config{Destinations: []post.Destination{to("http://receiver.test/")}, Retention: test.keep}).Validate() {
			got = append(got, problem.Error())
		}
		if text := strings.Join(got, "\n"); text != test.want {
			t.Errorf("%s: got\n%s\nwant\n%s", name, text, test.want)
		}
	}
}

// An error says what an operator forgot after an upgrade.
func TestArchiveWithoutRights(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`CREATE ROLE nobody_in_particular; GRANT USAGE ON SCHEMA public TO nobody_in_particular`)
	tx := db.begin()
	_, err := tx.Exec(t.Context(), `SET LOCAL ROLE nobody_in_particular`)
	must(t, err)
	_, err = archiveWalk{"archive events", archiveEvents, 0, 1}.step(t.Context(), tx, 0, days, false)
	must(t, tx.Rollback(t.Context()))
	db.exec(`DROP OWNED BY nobody_in_particular; DROP ROLE nobody_in_particular`)
	if want := regexp.MustCompile(`^archive events: .* \(SQLSTATE 42501\); run migrations/roles.sql again, as the owner of the tables, and grant this login outbox_relay$`); err == nil || !want.MatchString(err.Error()) {
		t.Errorf("%v", err)
	}
}

// Releasing what is parked reads the given range of events, whatever else is parked and whatever the statistics say.
func TestReleaseOfParkedIsBounded(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`DELETE FROM outbox_route`)
	db.exec(`VACUUM ANALYZE outbox, outbox_delivery`)
	db.insert(20_000, "parked")
	db.exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`)
	conn, err := pgx.Connect(t.Context(), db.dsn) // the planner's settings are not those of a relay
	must(t, err)
	defer conn.Close(t.Context())
	for i, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			db.exec(`ANALYZE outbox_delivery`)
		}
		tx, err := conn.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), noteReads)
		must(t, err)
		var released int
		must(t, tx.QueryRow(t.Context(), releaseParked, 100*i, 100*i+100).Scan(&released))
		result, err := tx.Query(t.Context(), `SELECT format('%s: %s sequential scans, %s rows', relname, seq_scan, idx_tup_fetch) FROM `+sinceNoted+`
			WHERE relname IN ('outbox', 'outbox_delivery') AND (seq_scan > 0 OR idx_tup_fetch > 800)`)
		must(t, err)
		wrong, err := pgx.CollectRows(result, pgx.RowTo[string])
		must(t, err)
		if released != 100 || len(wrong) > 0 {
			t.Errorf("with statistics %s: released %d, %q", statistics, released, wrong)
		}
		must(t, tx.Commit(t.Context()))
	}
}
