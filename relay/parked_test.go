package relay

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

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
		_, err = tx.Exec(t.Context(), relaytest.NoteReads)
		must(t, err)
		var released int
		must(t, tx.QueryRow(t.Context(), releaseParked, 100*i, 100*i+100).Scan(&released))
		result, err := tx.Query(t.Context(), `SELECT format('%s: %s sequential scans, %s rows', relname, seq_scan, idx_tup_fetch) FROM `+relaytest.SinceNoted+`
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
