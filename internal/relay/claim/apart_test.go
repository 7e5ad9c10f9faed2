package claim

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The place of a row that cannot be read is found by few statements if it is near.
func TestFirstFailing(t *testing.T) {
	t.Parallel()
	for _, want := range []int64{0, 1, 2, 3, 1000, 1 << 40, math.MaxInt64 - 1, math.MaxInt64} {
		calls := 0
		got := firstFailing(math.MaxInt64, func(n int64) bool { calls++; return n < want })
		if most := 130; got != want || calls > most || want <= 3 && calls > 5 {
			t.Errorf("%d after %d calls, want %d", got, calls, want)
		}
	}
	if got := firstFailing(7, func(int64) bool { return true }); got != 7 {
		t.Errorf("%d, want the most", got)
	}
}

// A cursor, or a rescan, has come to a place at which not even nothing can be read. It does not
// stay there: what became due before is found.
func TestNoScanStaysWhereNothingCanBeRead(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default")
	db.Insert(1, "before")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour'`)
	for name, begin := range map[string]func(l *lane.Lane, at lane.Keyset){
		"a cursor": func(l *lane.Lane, at lane.Keyset) {
			l.Cursors[lane.Backlog] = lane.Cursor{Position: at, More: true, FoundNothing: true}
		},
		"a rescan": func(l *lane.Lane, at lane.Keyset) { l.RescanFrom = at },
	} {
		c := newRows(t, db, named("default"))
		from := c.Clock.Now().Add(-time.Minute)
		c.DB = &damagedLeaf{Pool: c.DB, from: from}
		l := c.Lanes.Get("default")
		begin(l, lane.Keyset{At: from})
		for range 3 {
			l.RestartScans()
			relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
			clear(c.damaged.scans) // they were put off
		}
		testkit.Equal(t, name, c.handed, map[string]int{"default": 1})
		db.Exec(`UPDATE outbox_delivery SET claimed_by = NULL, lease_expires_at = NULL`)
	}
}

// A damagedLeaf fails each scan that reaches a time, or begins there. One that begins two hours
// before and reads one row does not reach it.
type damagedLeaf struct {
	pg.Pool
	from time.Time
}

func (d *damagedLeaf) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if q := b.QueuedQueries[0]; q.SQL == ClaimDue {
		at := func(n int) time.Time {
			switch of := q.Arguments[n].([]pgtype.Timestamptz)[0]; of.InfinityModifier {
			case pgtype.Finite:
				return of.Time
			case pgtype.Infinity:
				return d.from
			}
			return time.Time{}
		}
		after, until, reads := at(7), at(9), q.Arguments[12].([]int32)[0]
		if !after.Before(d.from) || !until.Before(d.from) && (reads > 1 || after.After(d.from.Add(-2*time.Hour))) {
			return failedBatch{}
		}
	}
	return d.Pool.SendBatch(ctx, b)
}

// A failedBatch is that of a statement which has met a damaged page.
type failedBatch struct{ pgx.BatchResults }

func (failedBatch) Close() error {
	return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "XX001", Message: "invalid page"}
}

// Rows that cannot be read stand one behind the other, as those of a page do: each costs some
// statements, and what is due behind them is claimed.
func TestUnreadableRowsCostFewStatements(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default")
	db.Insert(1, "behind")
	c := newRows(t, db, named("default"))
	page := &damagedPage{Pool: c.DB}
	for i := range 20 {
		page.rows = append(page.rows, c.Clock.Now().Add(time.Duration(i)*10*time.Microsecond-5*time.Second))
	}
	c.DB = page
	c.Lanes.Get("default").RestartScans()
	for range len(page.rows) + 1 {
		relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
	}
	testkit.Equal(t, "handed out", c.handed, map[string]int{"default": 1})
	if most := 25 * len(page.rows); page.statements > most {
		t.Errorf("%d statements, more than %d", page.statements, most)
	}
}

// A damagedPage fails each scan that reads one of the rows, which became due at these times.
type damagedPage struct {
	pg.Pool
	rows       []time.Time
	statements int
}

func (d *damagedPage) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if q := b.QueuedQueries[0]; q.SQL == ClaimDue {
		d.statements++
		after, until := q.Arguments[7].([]pgtype.Timestamptz), q.Arguments[9].([]pgtype.Timestamptz)
		for i := range after {
			for _, at := range d.rows {
				if (after[i].InfinityModifier != pgtype.Finite || after[i].Time.Before(at)) && (until[i].InfinityModifier != pgtype.Finite || !until[i].Time.Before(at)) {
					return failedBatch{}
				}
			}
		}
	}
	return d.Pool.SendBatch(ctx, b)
}

// A foreign trigger refuses that a delivery becomes the head of its ordering key. The one before it
// is claimed nevertheless, and the claim is tried ever more rarely.
func TestHeadDoesNotWaitForARefusedFollower(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default")
	db.InsertKeyed("k", 1, 2)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id = 2`)
	db.Refuse("UPDATE ON outbox_delivery", "OLD.event_id = 2")
	c := newRows(t, db, named("default"))
	for range 2 {
		relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
	}
	testkit.Equal(t, "handed out", c.handed, map[string]int{"default": 1})
}

// A key that fails again and again is tried ever more rarely.
func TestRefusedKeyIsTriedEverMoreRarely(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default")
	db.InsertKeyed("k", 1, 1)
	db.Refuse("UPDATE ON outbox_delivery", "true")
	c := newRows(t, db, named("default"))
	key := ordering.Key{Destination: "default", Key: "k"}
	for n := range 3 {
		for range 2 { // what a scan finds is claimed by the next turn
			relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
		}
		of := c.damaged.keys[key]
		testkit.Equal(t, "tries", of.tries, n+1)
		of.again = time.Now()
		c.damaged.keys[key] = of
	}
}
