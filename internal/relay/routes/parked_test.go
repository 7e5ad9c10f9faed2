package routes

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const parked = `SELECT count(*) FROM outbox_delivery WHERE destination = ''`

// search runs until the search has ended, and returns how often deliveries were released.
func search(db *relaytest.Database, on pg.Pool) (released int) {
	db.Helper()
	p := ParkedSearch{DB: on, Released: func() { released++ }}
	relaytest.Eventually(db, "the end of the search", func() bool {
		relaytest.Must(db, p.Run(db.Context()))
		return relaytest.Row[int](db, `SELECT count(parked_after) FROM outbox_destination`) == 0
	})
	return released
}

// Parked deliveries are those of events without a route; a route that comes later releases them.
func TestParkedDeliveriesAreReleasedByALaterRoute(t *testing.T) {
	t.Parallel()
	for name, pooled := range map[string]bool{"direct": false, "in transactions": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Exec(`DELETE FROM outbox_route`)
			db.Insert(3*parkedStep+1, "early") // more than three steps of the search
			db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('other', '{}', 'other')`)
			r := registered(db, "test")
			if pooled {
				r.keeper.DB = pg.ReadCommitted(db.Pool, nil)
			}
			if r.apply("t default"); r.added != 1 {
				t.Error("parked deliveries are not looked for")
			}
			if search(db, r.keeper.DB) == 0 || relaytest.Row[int](db, parked) != 1 {
				t.Errorf("%d are left, want the one without a route", relaytest.Row[int](db, parked))
			}
		})
	}
}

// An event that was parked long after its route was added, by a transaction with an old snapshot,
// is found when the search begins again.
func TestSearchForParkedBeginsAgain(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "key")
	db.Exec(`UPDATE outbox_delivery SET destination = '' WHERE event_id = 1; INSERT INTO outbox_destination (destination) VALUES ('default'), ('routeless')`)
	relaytest.Must(t, BeginParkedSearch(t.Context(), db.Pool))
	testkit.Equal(t, "destinations are searched for", relaytest.Row[int](db, `SELECT count(parked_after) FROM outbox_destination`), 1)
	if released := search(db, db.Pool); released != 1 || relaytest.Row[int](db, parked) != 0 {
		t.Errorf("released in %d steps", released)
	}
}

// What was put off and is due when it gets its destination joins its key then, behind what has
// joined before. What was due when it was parked has its place already.
func TestReleasedJoinTheirKeyWhenDue(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`DELETE FROM outbox_route`)
	db.InsertKeyed("k", 1, 1)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		VALUES ('t', '{}', 'was put off', 'k', now() + interval '1 hour'), ('t', '{}', 'is put off', 'k', now() + interval '1 hour')`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 second' WHERE event_id = 2`)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`)
	search(db, db.Pool)
	if got := relaytest.Rows[string](db, `SELECT destination || coalesce(joined::text, '-') FROM outbox_delivery ORDER BY event_id`); !slices.Equal(got, []string{"default0", "default-", "default-"}) {
		t.Errorf("released: %v", got)
	}
}

// Releasing what is parked reads the given range of events, whatever else is parked and whatever
// the statistics say.
func TestReleaseOfParkedIsBounded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`DELETE FROM outbox_route`)
	db.Exec(`VACUUM ANALYZE outbox, outbox_delivery`)
	db.Insert(20_000, "parked")
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'default')`)
	conn, err := pgx.Connect(t.Context(), db.DSN) // the planner's settings are not those of a relay
	relaytest.Must(t, err)
	defer conn.Close(t.Context())
	for i, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			db.Exec(`ANALYZE outbox_delivery`)
		}
		tx, err := conn.Begin(t.Context())
		relaytest.Must(t, err)
		_, err = tx.Exec(t.Context(), relaytest.NoteReads)
		relaytest.Must(t, err)
		var released int
		relaytest.Must(t, tx.QueryRow(t.Context(), releaseParked, 100*i, 100*i+100).Scan(&released))
		result, err := tx.Query(t.Context(), `SELECT format('%s: %s sequential scans, %s rows', relname, seq_scan, idx_tup_fetch) FROM `+relaytest.SinceNoted+`
			WHERE relname IN ('outbox', 'outbox_delivery') AND (seq_scan > 0 OR idx_tup_fetch > 800)`)
		relaytest.Must(t, err)
		wrong, err := pgx.CollectRows(result, pgx.RowTo[string])
		relaytest.Must(t, err)
		if released != 100 || len(wrong) > 0 {
			t.Errorf("with statistics %s: released %d, %q", statistics, released, wrong)
		}
		relaytest.Must(t, tx.Commit(t.Context()))
	}
}

// A route that comes while a part is being searched, for a destination that had none, is searched
// for from the beginning: nothing of that part was searched for it.
func TestRouteThatComesDuringASearch(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`DELETE FROM outbox_route`)
	db.Insert(1, "key")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('other', '{}', 'other')`)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('other', 'first')`)
	holds := db.Begin()
	_, err := holds.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 2 FOR UPDATE`)
	relaytest.Must(t, err)
	searched := make(chan error, 1)
	go func() {
		_, err := ReleaseParked(t.Context(), db.Pool, 1000, 2)
		searched <- err
	}()
	relaytest.Eventually(t, "the search has come to the row that is locked", func() bool {
		return relaytest.Row[bool](db, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	})
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('t', 'second')`)
	relaytest.Must(t, holds.Rollback(t.Context()))
	relaytest.Must(t, <-searched)
	got := relaytest.Rows[string](db, `SELECT destination || ' ' || parked_after FROM outbox_destination WHERE parked_after IS NOT NULL ORDER BY destination`)
	testkit.Equal(t, "the search has come to", got, []string{"first 2", "second 0"})
}
