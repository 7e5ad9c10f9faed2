package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

const days = 24 * time.Hour

type database struct{ *relaytest.Database }

func newDatabase(t testing.TB, destinations ...string) *database {
	t.Helper()
	return &database{relaytest.Covered(t, destinations...)}
}

// archive runs Archive and fails the test on an error.
func (db *database) archive(keep Retention) Result {
	db.Helper()
	done, err := Job{DB: db.Pool, Keep: keep}.Run(db.Context())
	relaytest.Must(db, err)
	return done
}

// wantKeys checks which events stand in a table.
func (db *database) wantKeys(table string, want ...string) {
	db.Helper()
	if got := relaytest.Rows[string](db.Database, `SELECT idempotency_key FROM `+table+` ORDER BY idempotency_key`); fmt.Sprint(got) != fmt.Sprint(want) {
		db.Errorf("in %s stand %q, want %q", table, got, want)
	}
}

// Time alone removes nothing that is not settled, and nothing that was settled a moment ago.
func TestWhatIsArchived(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "a", "b")
	var settled, kept []string
	for _, c := range []struct {
		name, change string
		archived     bool
	}{
		{"01-delivered", ``, true},
		{"02-discarded", `SET status = 'discarded', delivered_at = NULL`, true},
		{"03-one-discarded", `SET status = 'discarded', delivered_at = NULL WHERE destination = 'a'`, true},
		{"04-discarded-at-once", `SET status = 'discarded', delivered_at = NULL, last_attempt_at = NULL, attempts = 0`, true},
		{"05-failed", `SET status = 'failed', delivered_at = NULL`, false},
		{"06-one-failed", `SET status = 'failed', delivered_at = NULL WHERE destination = 'b'`, false},
		{"07-pending", `SET status = 'pending', delivered_at = NULL, last_attempt_at = NULL, attempts = 0`, false},
		{"08-partly-delivered", `SET status = 'pending', delivered_at = NULL, last_attempt_at = NULL WHERE destination = 'a'`, false},
		{"09-retrying", `SET status = 'pending', delivered_at = NULL, attempts = 3, next_attempt_at = now() + interval '4 hours' WHERE destination = 'a'`, false},
		{"10-in-flight", `SET status = 'pending', delivered_at = NULL, claimed_by = 1, lease_expires_at = now() - interval '30 days'`, false},
		{"11-parked", `SET status = 'pending', delivered_at = NULL, destination = '' WHERE destination = 'b'`, false},
		{"12-due-in-the-future", `SET status = 'pending', delivered_at = NULL, next_attempt_at = now() + interval '300 days'`, false},
		{"13-delivered-just-now", `SET delivered_at = now(), last_attempt_at = now() WHERE destination = 'a'`, false},
		{"14-discarded-before-its-time", `SET status = 'discarded', delivered_at = NULL, next_attempt_at = now() + interval '1 day' WHERE destination = 'b'`, false},
		{"15-discarded-after-a-late-attempt", `SET status = 'discarded', delivered_at = NULL, last_attempt_at = now() - interval '1 day' WHERE destination = 'b'`, false},
		{"16-created-just-now", `SET delivered_at = now() - interval '35 days'`, false},
		{"17-without-deliveries", ``, false},
	} {
		db.InsertOld(1, c.name)
		key := c.name + "-1"
		if c.change != "" {
			set, condition, _ := strings.Cut(c.change, " WHERE ")
			db.Exec(`UPDATE outbox_delivery `+set+` WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = $1) AND `+cmp.Or(condition, "true"), key)
		}
		if c.archived {
			settled = append(settled, key)
		} else {
			kept = append(kept, key)
		}
	}
	db.Exec(`ALTER TABLE outbox DISABLE TRIGGER outbox_is_immutable;
		UPDATE outbox SET created_at = now() WHERE idempotency_key = '16-created-just-now-1';
		DELETE FROM outbox_delivery WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = '17-without-deliveries-1')`)
	before := relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_delivery`)

	keep := Retention{ArchiveAfter: 30 * days, DeleteAfter: 365 * days, Attempts: 90 * days}
	due, err := Job{DB: db.Pool, Keep: keep}.Rehearse(t.Context())
	relaytest.Must(t, err)
	if due.Events != int64(len(settled)) {
		t.Errorf("%d events are said to be due, want %d", due.Events, len(settled))
	}
	db.wantKeys("outbox_archive")

	if done := db.archive(keep); done.Events != int64(len(settled)) {
		t.Errorf("%d events are archived, want %d", done.Events, len(settled))
	}
	db.wantKeys("outbox_archive", settled...)
	db.wantKeys("outbox", kept...)
	if n := relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_delivery`); n != before-2*len(settled) {
		t.Errorf("%d of %d deliveries are left", n, before)
	}
	testkit.Equal(t, "archived events with both deliveries", relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_archive WHERE jsonb_array_length(deliveries) = 2`), len(settled))
	if done := db.archive(keep); done.Events != 0 {
		t.Errorf("a second run archived %d", done.Events)
	}
}

// Older means older: what has exactly the age stays.
func TestArchiveBoundary(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		created, delivered string
		archived           int
	}{
		"both older":                  {"720 hours 0.000001 seconds", "720 hours 0.000001 seconds", 1},
		"created exactly so long ago": {"720 hours", "720 hours 0.000001 seconds", 0},
		"settled exactly so long ago": {"720 hours 0.000001 seconds", "720 hours", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			tx := db.Begin()
			for _, statement := range []string{
				`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ('t', '1', 'k', now() - interval '` + c.created + `', '2020-01-01')`,
				`UPDATE outbox_delivery SET status = 'delivered', next_attempt_at = '2020-01-01', delivered_at = now() - interval '` + c.delivered + `'`,
			} {
				_, err := tx.Exec(t.Context(), statement)
				relaytest.Must(t, err)
			}
			var settled int
			relaytest.Must(t, tx.QueryRow(t.Context(), `SELECT settled FROM outbox_archive_batch(0, 10, interval '720 hours', false)`).Scan(&settled))
			relaytest.Must(t, tx.Rollback(t.Context()))
			testkit.Equal(t, "archived", settled, c.archived)
		})
	}
}

// The archive is evidence: what stands in it is what was delivered, byte for byte, with all that
// became of it.
func TestArchiveKeepsEverything(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "a", "b")
	db.Exec(`INSERT INTO outbox (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at, created_at)
		VALUES ('invoice.issued', 3, '{"b" :1,"a":1e3, "a":2, "zero":"\u0000", "lone":"\ud800"}'::json, 'odd', 'customer-1', 'INV-1', '{"traceparent": "00-1"}', '2026-01-31 23:59:59.999999+00', '2026-01-31 23:59:59.999999+00'),
		       ('big', 1, (SELECT json_agg(md5(i::text)) FROM generate_series(1, 20000) i), 'big', NULL, NULL, '{}', '2026-01-01 00:00:00+00', '2026-01-01 00:00:00+00')`)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', attempts = 2, claim = 7, next_attempt_at = '2026-01-01', last_http_status = 204,
		last_attempt_at = '2026-02-01 10:00:00.123456+00', delivered_at = '2026-02-01 10:00:00.123456+00' WHERE destination = 'b'`)
	db.Exec(`UPDATE outbox_delivery SET status = 'discarded', attempts = 8, next_attempt_at = '2026-01-01', last_reason = 'rejected', last_error = E'a "quoted"\nline' WHERE destination = 'a'`)
	inZone := func(zone string) {
		db.Exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = %L', current_database(), ` + zone + `); END $$`)
		db.Pool.Reset()
	}
	const columns = `concat_ws('|', id, event_type, event_version, md5(payload::text), idempotency_key, coalesce(ordering_key, '-'),
		coalesce(related_reference, '-'), headers, available_at AT TIME ZONE 'UTC', created_at AT TIME ZONE 'UTC')`
	inZone(`'UTC'`)
	events := relaytest.Rows[string](db.Database, `SELECT `+columns+` FROM outbox ORDER BY id`)
	const (
		a = `{"claim": 0, "replay": false, "status": "discarded", "attempts": 8, "last_error": "a \"quoted\"\nline", "destination": "a", "last_reason": "rejected", "discarded_at": "2026-01-01T00:00:00+00:00"}`
		b = `{"claim": 7, "replay": false, "status": "delivered", "attempts": 2, "destination": "b", "delivered_at": "2026-02-01T10:00:00.123456+00:00", "last_attempt_at": "2026-02-01T10:00:00.123456+00:00", "last_http_status": 204}`
	)
	deliveries := []string{"1" + a, "1" + b, "2" + a, "2" + b}

	inZone(`'Asia/Kathmandu'`)
	if done := db.archive(Retention{ArchiveAfter: 30 * days}); done.Events != 2 {
		t.Fatalf("archived %+v", done)
	}
	if got := relaytest.Rows[string](db.Database, `SELECT `+columns+` FROM outbox_archive ORDER BY id`); !reflect.DeepEqual(got, events) {
		t.Errorf("events are\n%q, were\n%q", got, events)
	}
	if got := relaytest.Rows[string](db.Database, `SELECT id || d::text FROM outbox_archive, jsonb_array_elements(deliveries) WITH ORDINALITY x (d, n) ORDER BY id, n`); !reflect.DeepEqual(got, deliveries) {
		t.Errorf("deliveries are\n%q, were\n%q", got, deliveries)
	}
	testkit.Equal(t, "the payload", relaytest.Row[string](db.Database, `SELECT payload::text FROM outbox_archive WHERE idempotency_key = 'odd'`), `{"b" :1,"a":1e3, "a":2, "zero":"\u0000", "lone":"\ud800"}`)
	if months := relaytest.Rows[string](db.Database, `SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass`); fmt.Sprint(months) != "[outbox_archive_202601]" {
		t.Errorf("months are %q", months)
	}
}

// What an operator has locked is left alone, and no run waits for it.
func TestArchiveLeavesLockedDeliveries(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "a", "b")
	db.InsertOld(3, "key")
	tx := db.Begin()
	_, err := tx.Exec(t.Context(), `UPDATE outbox_delivery SET status = 'pending', delivered_at = NULL
		WHERE destination = 'b' AND event_id = (SELECT id FROM outbox WHERE idempotency_key = 'key-2')`)
	relaytest.Must(t, err)
	if done := db.archive(Retention{ArchiveAfter: 30 * days}); done.Events != 2 {
		t.Errorf("archived %+v", done)
	}
	relaytest.Must(t, tx.Commit(t.Context()))
	db.archive(Retention{ArchiveAfter: 30 * days})
	db.wantKeys("outbox", "key-2")
	testkit.Equal(t, "deliveries left", relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_delivery`), 2)
}

// Many batches, several archivers: each event moves once.
func TestTwoArchivers(t *testing.T) {
	t.Parallel()
	const events, archivers = 3000, 4
	db := newDatabase(t)
	db.InsertOld(events, "key")
	var mu sync.Mutex
	var moved int64
	var completed int
	var running sync.WaitGroup
	for range archivers {
		running.Go(func() {
			done, err := Job{DB: db.Pool, Keep: Retention{ArchiveAfter: 30 * days, Batch: 50}}.Run(t.Context())
			if err != nil && !errors.Is(err, ErrArchiving) {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			moved += done.Events
			if err == nil {
				completed++
			}
		})
	}
	running.Wait()
	if moved != events || completed == 0 {
		t.Errorf("%d events moved, %d archivers came to the end", moved, completed)
	}
	if n := relaytest.Row[int](db.Database, `SELECT count(DISTINCT id) FROM outbox_archive`); n != events || relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox`) != 0 {
		t.Errorf("%d of %d are in the archive", n, events)
	}
}

func TestArchiveGivesWayToAnother(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.InsertOld(1, "key")
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason) VALUES (1, 1, '2020-01-01', 1, 1, 1, 'default', 'retry', 'x')`)
	tx := db.Begin()
	_, err := tx.Exec(t.Context(), `LOCK TABLE ONLY outbox_archive IN SHARE UPDATE EXCLUSIVE MODE`)
	relaytest.Must(t, err)
	for name, keep := range map[string]Retention{"events": {ArchiveAfter: days}, "attempts": {Attempts: days}} {
		if done, err := (Job{DB: db.Pool, Keep: keep}).Run(t.Context()); !errors.Is(err, ErrArchiving) || done.Events+done.Attempts != 0 {
			t.Errorf("%s: %+v, %v", name, done, err)
		}
	}
	relaytest.Must(t, tx.Rollback(t.Context()))
	if done := db.archive(Retention{ArchiveAfter: days, Attempts: days}); done.Events != 1 || done.Attempts != 1 {
		t.Errorf("then: %+v", done)
	}
}

// The end of ctx is waited for only as long as one batch takes, and the batch counts.
func TestArchiveIsInterruptedBetweenBatches(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.InsertOld(25, "key")
	ctx, cancel := context.WithCancel(t.Context())
	done, err := Job{DB: db.Pool, Keep: Retention{ArchiveAfter: 30 * days, Batch: 10}, Progress: func(p Progress) {
		if p.Batch.Events != 10 || p.Total.Events != 10 {
			t.Errorf("progress is %+v", p)
		}
		cancel()
	}}.Run(ctx)
	if !errors.Is(err, context.Canceled) || done.Events != 10 || relaytest.Row[int](db.Database, `SELECT count(*) FROM outbox_archive`) != 10 {
		t.Errorf("interrupted: %+v, %v", done, err)
	}
	if done := db.archive(Retention{ArchiveAfter: 30 * days, Batch: 10}); done.Events != 15 {
		t.Errorf("resumed: %+v", done)
	}
}

func TestArchiveStandsDownUnderPressure(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.InsertOld(1, "key")
	ctx, cancel := context.WithCancel(t.Context())
	pressed := true
	told := ""
	a := Job{DB: db.Pool, Keep: Retention{ArchiveAfter: 30 * days}, Pressed: func() (string, bool) { return "old xmin", pressed }, Progress: func(p Progress) {
		told = p.Waiting
		cancel()
	}}
	if done, err := a.Run(ctx); !errors.Is(err, context.Canceled) || done.Events != 0 || told != "old xmin" {
		t.Errorf("under pressure: %+v, %v, told %q", done, err, told)
	}
	pressed = false
	if done, err := a.Run(t.Context()); err != nil || done.Events != 1 || told != "" {
		t.Errorf("without: %+v, %v, told %q", done, err, told)
	}
}

// Events that a producer dates into the future end no walk; neither do those that are kept.
func TestArchiveLooksBehindWhatItKeeps(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) SELECT 't', '1', 'later-' || i, now() + interval '1 year' FROM generate_series(1, 20) i`)
	db.InsertOld(20, "failed")
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL WHERE status = 'delivered'`)
	db.InsertOld(1, "old")
	db.Insert(40, "young")
	db.InsertOld(1, "behind-the-young") // found when those have become old
	if done := db.archive(Retention{ArchiveAfter: 30 * days, Batch: 10}); done.Events != 1 {
		t.Errorf("archived %+v", done)
	}
	db.wantKeys("outbox_archive", "old-1")
}

// Large events move in small transactions, and none is left out.
func TestArchiveOfLargeEvents(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at)
		SELECT 't', to_json(repeat('x', 1000000)), 'large-' || i, '2026-01-01', '2026-01-01' FROM generate_series(1, 25) i`)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = '2026-01-01', next_attempt_at = '2026-01-01'`)
	var batches []int64
	done, err := Job{DB: db.Pool, Keep: Retention{ArchiveAfter: 30 * days}, Progress: func(p Progress) { batches = append(batches, p.Batch.Events) }}.Run(t.Context())
	relaytest.Must(t, err)
	if done.Events != 25 || fmt.Sprint(batches) != "[9 9 7]" {
		t.Errorf("archived %+v in batches of %d", done, batches)
	}
}

// An archived event that was put back to be sent again, and stays in the archive, stops no run.
func TestArchiveOfWhatIsArchived(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.InsertOld(1, "key")
	db.archive(Retention{ArchiveAfter: 30 * days})
	db.Exec(`INSERT INTO outbox OVERRIDING SYSTEM VALUE
		SELECT id, event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at, created_at FROM outbox_archive`)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() - interval '31 days', next_attempt_at = now() - interval '31 days'`)
	if done := db.archive(Retention{ArchiveAfter: 30 * days}); done.Events != 1 {
		t.Errorf("archived %+v", done)
	}
	testkit.Equal(t, "deliveries remembered", relaytest.Row[int](db.Database, `SELECT jsonb_array_length(deliveries) FROM outbox_archive`), 2)
}

// An event whose deliveries are all settled is archived once it is routed: until then it may get
// others.
func TestArchiveLeavesUnroutedEvents(t *testing.T) {
	t.Parallel()
	db := &database{relaytest.New(t)}
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at) VALUES ('t', '1', 'old', now() - interval '9 days', now() - interval '9 days')`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, status, delivered_at, next_attempt_at)
		VALUES (1, 'default', 'delivered', now() - interval '8 days', now() - interval '9 days')`)
	want := func(what string, events int) {
		t.Helper()
		if done := db.archive(Retention{ArchiveAfter: days}); int(done.Events) != events {
			t.Errorf("%s: archived %d, want %d", what, done.Events, events)
		}
	}
	want("not taken", 0)
	r, err := intake.TakeRange(t.Context(), db.Pool, 1, intake.Terms{Events: 1}, false)
	relaytest.Must(t, err)
	want("in hand", 0)
	_, err = intake.SettleRanges(t.Context(), db.Pool, intake.NewRows{Relay: 1, Ranges: []intake.RangeRef{r.Ref()}, Ended: []intake.RangeRef{r.Ref()}})
	relaytest.Must(t, err)
	want("routed", 1)
}
