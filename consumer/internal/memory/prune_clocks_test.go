package memory_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// eachClock runs test in two time zones whose clocks changed half a day ago, as they do twice a year where people live: by
// PostgreSQL's reckoning a day ago is 25 hours ago in the one, and 23 in the other.
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

// settleADay is settle for a memory of 24 hours, whose announcement may not come closer to what it announces.
func settleADay(e *receivertest.Env) {
	e.T.Helper()
	e.MustExec(`UPDATE inbox_forgotten SET announced_at = announced_at - interval '2 minutes', received_before = received_before - interval '2 minutes'`)
}

// What may have been forgotten is refused, whatever the receiver's clock says and whatever program prunes.
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
			const byHand = `SELECT announced FROM inbox_prune(NULL, 0, 16, interval '1 day', false)`
			if n := e.Count(byHand); n != 1 {
				t.Errorf("%d events are announced", n)
			}
			e.MustExec(`DELETE FROM inbox_forgotten`)
			if n := e.Count(byHand); n != 1 {
				t.Errorf("%d events are announced by hand", n)
			}
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
