package routes

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// Releasing what is parked reads the given range of events, whatever else is parked and whatever the statistics say.
func TestReleaseOfParkedIsBounded(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
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
