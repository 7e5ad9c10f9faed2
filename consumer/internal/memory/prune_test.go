package memory_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// lockAwaited asks whether a session waits for a lock on the table. Databases that are copies share
// its number.
const lockAwaited = `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'processed_events'::regclass AND NOT granted
	AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`

func TestPruneAnnouncesBeforeItRemoves(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		if done := e.WantPruned(receivertest.Ninety(), 0, 0); !done.RemembersSince.IsZero() {
			t.Errorf("nothing is forgotten, but remembered only since %v", done.RemembersSince)
		}
		e.Old("outbox", "old", 3)
		receivertest.WantFirst(t, e.Post("young", "{}"), http.StatusCreated, `{"done":"young"}`)

		first := e.WantPruned(receivertest.Ninety(), 0, 3)
		if ago := time.Since(first.RemembersSince); ago < 90*receivertest.Day || ago > 90*receivertest.Day+receivertest.Patience {
			t.Errorf("remembers since %v, want 90 days", ago)
		}
		// Announced, and known all the same.
		receivertest.WantReplayed(t, e.Do(e.NewRequest("old1", "{}", receivertest.LongAgo())), http.StatusOK, "")
		// It must not be removed at once, nor what was announced be moved.
		if again := e.WantPruned(receivertest.Ninety(), 0, 3); !again.RemembersSince.Equal(first.RemembersSince) {
			t.Errorf("announced %v, then %v, before the first had settled", first.RemembersSince, again.RemembersSince)
		}
		e.Settle()
		if done := e.WantPruned(receivertest.Ninety(), 3, 0); !done.RemembersSince.Equal(first.RemembersSince) {
			t.Errorf("announced %v without need, after %v", done.RemembersSince, first.RemembersSince)
		}
		receivertest.WantProblem(t, e.Do(e.NewRequest("old1", "{}", receivertest.LongAgo())), http.StatusUnprocessableEntity, "forgotten")
		e.WantRows("old1", 1, 0)
		receivertest.WantReplayed(t, e.Post("young", "{}"), http.StatusCreated, "")

		// The next time everything begins again; what was removable stays so.
		e.Old("outbox", "older", 2)
		e.MustExec(`UPDATE processed_events SET received_at = received_at - interval '9 days', processed_at = received_at - interval '9 days' WHERE idempotency_key = 'older1'`)
		e.WantPruned(receivertest.Ninety(), 2, 0)
		e.Old("outbox", "next", 2)
		e.MustExec(`UPDATE processed_events SET received_at = $1, processed_at = $1 WHERE idempotency_key LIKE 'next%'`, first.RemembersSince)
		next := e.WantPruned(receivertest.Ninety(), 0, 2)
		if !next.RemembersSince.After(first.RemembersSince) {
			t.Errorf("%v was not announced", next.RemembersSince)
		}
		e.Old("outbox", "meanwhile", 1)
		e.WantPruned(receivertest.Ninety(), 1, 2)
		e.Settle()
		e.WantPruned(receivertest.Ninety(), 2, 0)
		e.WantPruned(receivertest.Ninety(), 0, 0)
	})
}

func TestPruneKeepsWhatIsStillNeeded(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		want := 0
		for i, row := range []struct {
			receiver, state, received, processed, notAfter string
			kept                                           bool
		}{
			{"test", "succeeded", "91 days", "91 days", "", false},
			{"test", "succeeded", "91 days", "", "", false},
			{"test", "succeeded", "91 days", "91 days", "1 minute", false},
			{"test", "ignored", "91 days", "91 days", "", false},
			{"test", "failed", "91 days", "91 days", "", true},
			{"test", "pending", "91 days", "", "", true},
			{"test", "processing", "91 days", "", "", true},
			{"test", "succeeded", "89 days", "89 days", "", true},
			{"test", "succeeded", "91 days", "89 days", "", true}, // after a long time in an inbox
			{"test", "succeeded", "91 days", "91 days", "-1 minute", true},
			{"other", "succeeded", "91 days", "91 days", "", true},
		} {
			e.MustExec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, processed_at, not_after)
				SELECT $1, 'outbox', $2 || i, $3, now() - $4::interval, now() - nullif($5, '')::interval, now() - nullif($6, '')::interval FROM generate_series(1, 100) i`,
				row.receiver, fmt.Sprint(i, "/"), row.state, row.received, row.processed, row.notAfter)
			if row.kept {
				want += 100
			}
		}
		cfg := receivertest.Ninety()
		cfg.BatchPages, cfg.Pause = 1, time.Microsecond
		e.WantPruned(cfg, 0, 400)
		e.Settle()
		e.WantPruned(cfg, 400, 0)
		testkit.Equal(t, "rows left", e.Known(), want)
		testkit.Equal(t, "another receiver's events were announced", e.Count(`SELECT count(*) FROM inbox_forgotten WHERE receiver <> 'test'`), 0)
	})
}

// What a request or an operator has locked is left for the next run, which waits for neither.
func TestPruneLeavesWhatIsInHand(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Old("outbox", "old", 9)
		e.WantPruned(receivertest.Ninety(), 0, 9)
		e.Settle()
		releaseKey := e.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended(E'test\noutbox\nold3', 122550254464888 # 'processed_events'::regclass::oid::bigint))`)
			return err
		})
		releaseRow := e.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `UPDATE processed_events SET processing_state = 'pending' WHERE idempotency_key = 'old4'`)
			return err
		})
		e.WantPruned(receivertest.Ninety(), 7, 0)
		releaseKey()
		releaseRow()
		e.WantPruned(receivertest.Ninety(), 1, 0)
		e.WantRows("old4", 1, 1)
	})
}

// A duplicate that meets a removal which is not committed yet counts on the row, and is answered
// from it; a request that comes later is refused.
func TestDuplicateMeetsRemoval(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Old("outbox", "pruned", 1)
		e.Old("outbox", "deleted", 1)
		e.WantPruned(receivertest.Ninety(), 0, 2)
		e.Settle()
		commit := e.Hold(func(tx pgx.Tx) error {
			// By hand and without the lock of the key, as an operator may after the announcement.
			_, err := tx.Exec(t.Context(), `DELETE FROM processed_events WHERE idempotency_key = 'deleted1'`)
			if err != nil {
				return err
			}
			var removed int
			err = tx.QueryRow(t.Context(), `SELECT (inbox_prune(NULL, 0, 16, interval '90 days', false)->>'removed')::int`).Scan(&removed)
			testkit.Equal(t, "removed", removed, 1)
			return err
		})
		receivertest.WantReplayed(t, e.Do(e.NewRequest("pruned1", "{}", receivertest.LongAgo())), http.StatusOK, "")
		receivertest.WantProblem(t, e.Do(e.NewRequest("deleted1", "{}", receivertest.LongAgo())), http.StatusConflict, "in-flight")
		commit()
		for _, key := range []string{"pruned1", "deleted1"} {
			receivertest.WantProblem(t, e.Do(e.NewRequest(key, "{}", receivertest.LongAgo())), http.StatusUnprocessableEntity, "forgotten")
			e.WantRows(key, 1, 0)
		}
		// Who does not say how old an event is gets no answer but this one.
		if first, err := e.Once(t.Context(), e, "outbox", "pruned1", func() {}); err != nil || !first {
			t.Errorf("Once: %v, %v", first, err)
		}
	})
}

// A request whose snapshot is older than the announcement cannot see it. Here it waits for a lock
// on the table, while the announcement is made and grows old, and a session prunes that holds that
// lock.
func TestPruneWaitsForOldSnapshots(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			t.Run(isolation.String(), func(t *testing.T) {
				t.Parallel()
				e := receivertest.NewEnv(t, f, consumer.Config{Isolation: isolation}, receivertest.Effect)
				e.Old("outbox", "old", 1)
				e.Post("prepared", "{}") // which takes a lock, too, but no snapshot that lasts
				table, err := e.Pool.Begin(t.Context())
				pgtest.Must(t, err)
				defer table.Rollback(context.Background())
				pgtest.Exec(t, table, `LOCK TABLE processed_events IN EXCLUSIVE MODE`)
				request, answer := e.NewRequest("old1", "{}", receivertest.LongAgo()), make(chan receivertest.Response, 1)
				go func() {
					got, err := e.Try(request)
					if err != nil {
						t.Error(err)
					}
					answer <- got
				}()
				e.Await(lockAwaited)
				e.MustExec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at)
					VALUES ('test', 'outbox', now() - interval '90 days', now() - interval '2 minutes')`)
				removed := pgtest.Row[int](t, table, `SELECT (inbox_prune('test', 0, 16, interval '90 days', false)->>'removed')::int`)
				pgtest.Must(t, table.Commit(t.Context()))
				receivertest.WantReplayed(t, <-answer, http.StatusOK, "")
				testkit.Equal(t, "rows were removed under a session that could not know", removed, 0)
				e.WantRows("old1", 1, 1)
				e.WantPruned(receivertest.Ninety(), 1, 0)
				receivertest.WantProblem(t, e.Do(e.NewRequest("old1", "{}", receivertest.LongAgo())), http.StatusUnprocessableEntity, "forgotten")
			})
		}
	})
}

// Two who prune at once share the work, whatever they meet.
func TestPruneConcurrently(t *testing.T) {
	testsize.Long(t)
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		receivers := []string{"shipping", "sales", "stock"}
		for _, receiver := range receivers {
			e.Old("outbox", "old", 1000)
			e.MustExec(`UPDATE processed_events SET receiver = $1 WHERE receiver = 'test'`, receiver)
		}
		total := func() (removed int64) {
			done := make(chan consumer.Pruned)
			for i := range 6 {
				go func() {
					cfg := receivertest.Ninety()
					cfg.Receiver = receivers[i%3]
					cfg.BatchPages, cfg.Pause = 1, time.Microsecond
					pruned, err := e.Prune(t.Context(), e, cfg)
					if err != nil {
						t.Error(err)
					}
					done <- pruned
				}()
			}
			for range 6 {
				removed += (<-done).Removed
			}
			return removed
		}
		testkit.Equal(t, "announced", total(), 0)
		e.Settle()
		removed := total()
		for e.Known() > 0 && !t.Failed() { // the lock of a key may have been with one that came too early to remove its row
			removed += total()
		}
		if n := e.Known(); removed != 3000 || n != 0 {
			t.Errorf("%d removed, %d left", removed, n)
		}
	})
}

func TestPruneStopsWithItsContext(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Old("outbox", "old", 1000)
		e.MustPrune(receivertest.Ninety())
		e.Settle()
		// Nothing is removed without a question before: nothing is, while a session holds a
		// snapshot older than the announcement, and a transaction of another test may make that of
		// a question old.
		e.MustExec(`CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NOTIFY removed; RETURN NULL; END $$`)
		e.MustExec(`CREATE TRIGGER tell AFTER DELETE ON processed_events EXECUTE FUNCTION tell()`)
		listener, err := e.Pool.Acquire(t.Context())
		if err == nil {
			_, err = listener.Exec(t.Context(), `LISTEN removed`)
		}
		pgtest.Must(t, err)
		defer listener.Release()
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			if _, err := listener.Conn().WaitForNotification(t.Context()); err != nil {
				t.Error(err)
			}
			e.Await(`SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%inbox_prune(%' AND state <> 'idle'
				AND pid <> pg_backend_pid())`) // it has been told what it removed
			cancel()
		}()
		cfg := receivertest.Ninety()
		cfg.BatchPages, cfg.Pause = 1, time.Hour
		done, err := e.Prune(ctx, e, cfg)
		if !errors.Is(err, context.Canceled) || done.Removed == 0 || done.Removed != int64(1000-e.Known()) {
			t.Errorf("%+v, %v; %d rows left", done, err, e.Known())
		}
		e.WantPruned(receivertest.Ninety(), int64(e.Known()), 0)
	})
}

// A session that alters the table keeps a run waiting for a moment, and does not end it.
func TestPruneOutlastsALockOnTheTable(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Old("outbox", "old", 1)
		release := e.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `LOCK TABLE processed_events IN ACCESS EXCLUSIVE MODE`)
			return err
		})
		pruned := make(chan error, 1)
		go func() {
			_, err := e.Prune(t.Context(), e, receivertest.Ninety())
			pruned <- err
		}()
		e.Await(lockAwaited)
		release()
		if err := <-pruned; err != nil {
			t.Error(err)
		}
		e.MustExec(`DROP TABLE processed_events CASCADE`)
		if _, err := e.Prune(t.Context(), e, receivertest.Ninety()); err == nil || !strings.HasPrefix(err.Error(), "prune processed_events: ") {
			t.Errorf("without a table: %v", err)
		}
	})
}

func TestPruneConfigMistakes(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		for want, cfg := range map[string]consumer.PruneConfig{
			"consumer: PruneConfig.Retention is not set: say for how long to remember":                                 {Receiver: "r"},
			"consumer: PruneConfig.Retention: 90ns is less than a day":                                                 {Receiver: "r", Retention: 90},
			"consumer: PruneConfig.Retention: -24h0m0s is less than a day":                                             {Receiver: "r", Retention: -receivertest.Day},
			`consumer: PruneConfig.Receiver: "größe" is not 1 to 255 printable ASCII characters`:                       {Retention: 30 * receivertest.Day, Receiver: "größe"},
			`consumer: PruneConfig.Receiver: "" is not 1 to 255 printable ASCII characters; set the one of the Config`: {Retention: 30 * receivertest.Day},
			"consumer: PruneConfig.BatchPages: 33 is out of range":                                                     {Receiver: "r", Retention: 30 * receivertest.Day, BatchPages: 33},
			"consumer: PruneConfig.BatchPages: -1 is out of range":                                                     {Receiver: "r", Retention: 30 * receivertest.Day, BatchPages: -1},
			"consumer: PruneConfig.Pause is negative: -1ns":                                                            {Receiver: "r", Retention: 30 * receivertest.Day, Pause: -1},
		} {
			if done, err := e.Prune(t.Context(), e, cfg); err == nil || !strings.HasPrefix(err.Error(), want) || done != (consumer.Pruned{}) {
				t.Errorf("%+v: %v\nwant %s", cfg, err, want)
			}
		}
		for age, text := range map[string]string{"NULL": "NULL", "interval '23 hours'": "23:00:00", "interval '-90 days'": "-90 days"} {
			if _, err := e.Pool.Exec(t.Context(), `SELECT inbox_prune(NULL, 0, 16, `+age+`, false)`); err == nil || !strings.Contains(err.Error(), "events cannot be forgotten after "+text) {
				t.Errorf("inbox_prune after %s: %v", age, err)
			}
		}
	})
}

// eachClock runs test in two time zones whose clocks changed half a day ago, as they do twice a
// year where people live: by PostgreSQL's reckoning a day ago is 25 hours ago in the one, and 23 in
// the other.
func eachClock(t *testing.T, test func(t *testing.T, zone string)) {
	change := time.Now().UTC().Add(-12 * time.Hour).Truncate(time.Hour)
	// Summer time is an hour ahead of UTC; each change is told by the clock that it ends.
	zone := func(begin, end time.Time) string {
		end = end.Add(time.Hour)
		return fmt.Sprintf("STD0DST-1,%d/%d,%d/%d", begin.YearDay()-1, begin.Hour(), end.YearDay()-1, end.Hour())
	}
	for hours, zone := range map[int]string{25: zone(change.AddDate(0, -1, 0), change), 23: zone(change, change.AddDate(0, 1, 0))} {
		t.Run(fmt.Sprint(hours, " hours"), func(t *testing.T) {
			t.Parallel()
			var day int
			pool := pgtest.Pool(t, receivertest.WithSetting(pgtest.New(t), "timezone", zone))
			if err := pool.QueryRow(t.Context(), "SELECT extract(epoch FROM now() - (now() - interval '1 day'))::int / 3600").Scan(&day); err != nil || day != hours {
				t.Fatalf("a day has %d hours in %s, %v", day, zone, err)
			}
			test(t, zone)
		})
	}
}

// received makes it a known event of so long ago.
func received(e *receivertest.Env, key string, ago time.Duration) {
	e.T.Helper()
	e.MustExec(`UPDATE processed_events SET received_at = now() - make_interval(secs => $2), processed_at = now() - make_interval(secs => $2)
		WHERE idempotency_key = $1`, key, ago.Seconds())
}

// settleADay is settle for a memory of 24 hours, whose announcement may not come closer to what it
// announces.
func settleADay(e *receivertest.Env) {
	e.T.Helper()
	e.MustExec(`UPDATE inbox_forgotten SET announced_at = announced_at - interval '2 minutes', received_before = received_before - interval '2 minutes'`)
}

// What may have been forgotten is refused, whatever the receiver's clock says and whatever program
// prunes.
func TestForgottenWhereTheClocksChange(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		eachClock(t, func(t *testing.T, zone string) {
			dsn := pgtest.New(t, migrations.Inbox)
			elsewhere := receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, receivertest.Effect)
			elsewhere.MustExec(receivertest.Schema)
			e := receivertest.NewEnvAt(t, f, receivertest.WithSetting(dsn, "timezone", zone), consumer.Config{}, receivertest.Effect)
			age := receivertest.Created(time.Now().Add(-receivertest.Day - 30*time.Minute))
			receivertest.WantFirst(t, e.Do(e.NewRequest("old", "{}", age)), http.StatusCreated, `{"done":"old"}`)
			received(e, "old", receivertest.Day+29*time.Minute)
			cfg := consumer.PruneConfig{Receiver: "test", Retention: receivertest.Day}
			elsewhere.WantPruned(cfg, 0, 1)
			settleADay(elsewhere)
			elsewhere.WantPruned(cfg, 1, 0)
			receivertest.WantProblem(t, e.Do(e.NewRequest("old", "{}", age)), http.StatusUnprocessableEntity, "forgotten")
			e.WantRows("old", 1, 0)
		})
	})
}

// A day's memory is one of 24 hours, also where the one that prunes says '1 day'.
func TestPruneWhereTheClocksChange(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		eachClock(t, func(t *testing.T, zone string) {
			e := receivertest.NewEnvAt(t, f, receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "timezone", zone), consumer.Config{}, receivertest.Effect)
			e.MustExec(receivertest.Schema)
			for key, ago := range map[string]time.Duration{"old": receivertest.Day + 30*time.Minute, "young": receivertest.Day - 30*time.Minute} {
				e.Post(key, "{}")
				received(e, key, ago)
			}
			cfg := consumer.PruneConfig{Receiver: "test", Retention: receivertest.Day}
			done := e.WantPruned(cfg, 0, 1)
			if ago := time.Since(done.RemembersSince); ago < receivertest.Day || ago > receivertest.Day+receivertest.Patience {
				t.Errorf("remembers since %v, want 24 hours", ago)
			}
			const byHand = `SELECT (inbox_prune(NULL, 0, 16, interval '1 day', false)->>'announced')::int`
			testkit.Equal(t, "events announced", e.Count(byHand), 1)
			e.MustExec(`DELETE FROM inbox_forgotten`)
			testkit.Equal(t, "events announced by hand", e.Count(byHand), 1)
			if n := e.Count(`SELECT count(*) FROM inbox_forgotten WHERE received_before + interval '24 hours' BETWEEN now() - interval '1 minute' AND now()`); n != 1 {
				t.Error("what is announced by hand is not 24 hours ago")
			}
			settleADay(e)
			e.WantPruned(cfg, 1, 0)
			e.WantRows("young", 1, 1)
		})
	})
}

// An announcement is as old wherever it is read, so that a dump can be restored.
func TestAnnouncementsWhereTheClocksChange(t *testing.T) {
	t.Parallel()
	eachClock(t, func(t *testing.T, zone string) {
		dsn := pgtest.New(t, migrations.Inbox)
		db := receivertest.OpenSQL(t, receivertest.WithSetting(dsn, "timezone", zone))
		insert := func(ago string) error {
			_, err := db.ExecContext(t.Context(), `INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at)
				VALUES ('test', $1::text, now() - $1::text::interval, now())`, ago)
			return err
		}
		if err := insert("23:59:59"); err == nil {
			t.Error("something of the last 24 hours is announced")
		}
		if err := insert("24:00:00"); err != nil {
			t.Error(err)
		}
		var elsewhere int
		if err := pgtest.Pool(t, dsn).QueryRow(t.Context(), `SELECT count(*) FROM inbox_forgotten WHERE received_before + interval '24 hours' = announced_at`).Scan(&elsewhere); err != nil || elsewhere != 1 {
			t.Errorf("%d of 1 announcements are 24 hours younger than what they announce, %v", elsewhere, err)
		}
	})
}
