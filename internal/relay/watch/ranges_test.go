package watch

import (
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The relay that looks removes the ranges that have ended, up to the oldest that may be open,
// however many there are. One that learns of the look removes none.
func TestLookPrunesRanges(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	w.Config = func() Config { return Config{Interval: time.Hour}.WithDefaults() }
	const add = `INSERT INTO outbox_range (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, ended_at)
		SELECT i, 1, 1, l.base, l.target, 0, 0, false, CASE WHEN i > $2 THEN $2 ELSE i END, CASE WHEN i <> $2 THEN now() - interval '2 minutes' END
		FROM generate_series((SELECT max(seq) + 1 FROM outbox_range), $1::bigint) i, (SELECT base, target FROM outbox_range LIMIT 1) l`
	want := func(what string, first int64) {
		t.Helper()
		relaytest.Must(t, w.Look(t.Context()))
		if got := relaytest.Row[int64](db, `SELECT min(seq) FROM outbox_range`); got != first {
			t.Errorf("%s: the first range is %d, want %d", what, got, first)
		}
	}
	again := func() { db.Exec(`UPDATE outbox_watch SET watched_at = now() - interval '2 hours'`) }
	db.Exec(`UPDATE outbox_range SET ended_at = now() - interval '2 minutes'`)
	db.Exec(add, 25_010, 25_000)
	want("beside an open one", 25_000)
	db.Exec(`UPDATE outbox_range SET ended_at = now() - interval '2 minutes' WHERE seq = 25000`)
	db.Exec(add, 25_020, 25_020)
	want("another relay has looked", 25_000)
	again()
	want("the next look", 25_020)
	again()
	want("nothing is left to prune", 25_020)
	db.Exec(`UPDATE outbox_range SET seq = 5; INSERT INTO outbox_range SELECT 4, relay_id, fence, base, target, low, upto, new_above, more, 4, keys, promised, taken_at, now() - interval '2 minutes' FROM outbox_range`)
	again()
	want("numbers are given out again", 5)
	if got := relaytest.Rows[int64](db, `SELECT seq FROM outbox_range ORDER BY seq`); !slices.Equal(got, []int64{5}) {
		t.Errorf("ranges %d are left", got)
	}
}
