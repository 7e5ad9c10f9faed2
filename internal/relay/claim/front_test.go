package claim

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// takeFront is what a claim with a shared scan does first.
const takeFront = `SELECT pg_try_advisory_xact_lock(427020085613 # 'outbox_delivery'::regclass::oid::bigint)`

// heldLocks counts the advisory locks of this database; other tests have theirs on the same server.
const heldLocks = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`

// holdFront returns a session of a stranger who holds the lock of the front until it ends.
func holdFront(db *relaytest.Database) *pgx.Conn {
	db.Helper()
	stranger := db.Locker(`SELECT`)
	var got bool
	relaytest.Must(db, stranger.QueryRow(db.Context(), takeFront).Scan(&got))
	if !got {
		db.Fatal("the lock of the front is taken")
	}
	return stranger
}

// A scan that shares its front passes what other relays have in flight, however much that is, and
// reads no further than it has room.
func TestSharedScanPassesWhatIsInFlight(t *testing.T) {
	t.Parallel()
	const inFlight, free = 3 * lane.ScanExtra, 20
	db := relaytest.Covered(t)
	db.Insert(inFlight+10*free, "key")
	s, other := registered(db)
	_, own := registered(db)
	claim := func(relayID int32, one lane.Scan) (lane.ScanResult, []lane.Delivery) {
		t.Helper()
		result, err := s.Claim(t.Context(), relayID, time.Minute, []Request{{Destination: "default", Scans: []lane.Scan{one}}})
		relaytest.Must(t, err)
		return result.scans[0], result.Deliveries
	}
	if _, claimed := claim(other, lane.Scan{Free: inFlight}); len(claimed) != inFlight {
		t.Fatalf("the other relay claimed %d", len(claimed))
	}

	alone, claimed := claim(own, lane.Scan{Free: free})
	if len(claimed) != 0 || !alone.More || alone.Passed != free+lane.ScanExtra || alone.Candidates != 0 || alone.Last.ID != free+lane.ScanExtra {
		t.Errorf("without others: claimed %d, %+v", len(claimed), alone)
	}
	shared, claimed := claim(own, lane.Scan{Free: free, Clear: true, Shared: true})
	if len(claimed) != free || !shared.More || shared.Passed != inFlight || shared.Candidates != free || shared.Unkeyed != free ||
		shared.Last.ID != inFlight+free {
		t.Errorf("beside others: claimed %d, %+v", len(claimed), shared)
	}
	rest, claimed := claim(own, lane.Scan{Free: 100 * free, After: shared.Last, Shared: true})
	if len(claimed) != 9*free || rest.More || rest.Passed != 0 {
		t.Errorf("the rest: claimed %d, %+v", len(claimed), rest)
	}
}

// Only one claim at a time reads what shared scans ask for. Other scans continue beside it.
func TestSharedScansReadOneAfterTheOther(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Insert(40, "key")
	s, relayID := registered(db)
	claim := func(alone bool) Result {
		t.Helper()
		result, err := s.Claim(t.Context(), relayID, time.Minute, []Request{
			{Destination: "a", Scans: []lane.Scan{{Free: 10, Shared: true, Alone: alone}}}, {Destination: "b", Scans: []lane.Scan{{Free: 10}}},
		})
		relaytest.Must(t, err)
		return result
	}
	stranger := holdFront(db)
	for range 2 {
		result := claim(false)
		if !result.contended || !result.scans[0].Unread || result.scans[1].Unread || len(result.Deliveries) != 10 || result.Deliveries[0].Destination != "b" {
			t.Errorf("while another one claims: %+v", result)
		}
	}
	if result := claim(true); result.contended || result.scans[0].Unread || len(result.Deliveries) != 20 {
		t.Errorf("alone: %+v", result)
	}
	relaytest.Must(t, stranger.Close(t.Context()))
	relaytest.Becomes(db, 0, heldLocks)
	if result := claim(false); result.contended || result.scans[0].Unread || len(result.Deliveries) != 20 {
		t.Errorf("afterwards: %+v", result)
	}
	testkit.Equal(t, "locks are left", relaytest.Row[int](db, heldLocks), 0)
}

// A claim that meets what others have in flight, or have just locked, makes the next ones of its
// cursor ask for the lock. One that was refused leaves the cursor where it is, and is repeated.
func TestCursorSharesItsFront(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named("default"))
	l := c.Lanes.Get("default")
	c.Clock.Set(time.Now())
	first, second := lane.Keyset{At: c.Clock.Now(), ID: 1}, lane.Keyset{At: c.Clock.Now(), ID: 2}
	for name, read := range map[string]lane.ScanResult{
		"passed":        {Last: first, More: true, Passed: 1},
		"locked":        {Last: first, More: true, Candidates: 5, Unkeyed: 5},
		"alone":         {Last: first, More: true},
		"ordering keys": {Last: first, More: true, Candidates: 5},
		"the end":       {Last: first, Passed: 1},
	} {
		l.Cursors[lane.Live], c.contention, *c.Agenda = lane.Cursor{}, agenda.Contention{}, agenda.Agenda{}
		scans := func(after time.Duration) []lane.Scan {
			return c.newScans(l, time.Now().Add(after), [lane.Classes]int{lane.Live: 4}, false, true)
		}
		advance := func(read lane.ScanResult, taken bool, scans []lane.Scan) {
			c.applyResult([]laneClaim{{l, Request{Destination: l.Name, Scans: scans}}},
				Result{at: c.Clock.Now(), scans: []lane.ScanResult{read}, contended: taken}, time.Millisecond)
		}
		advance(read, false, []lane.Scan{{Class: lane.Live}})
		shared := name == "passed" || name == "locked"
		next := scans(0)
		if read.More != (len(next) == 1) || read.More && (next[0].Shared != shared || next[0].After != first) {
			t.Errorf("%s: next %+v", name, next)
		}
		if !shared {
			continue
		}
		advance(lane.ScanResult{Unread: true}, true, next)
		if again := scans(0); len(again) != 0 || c.next() < 0 || c.next() > time.Second || l.Cursors[lane.Live].Position != first {
			t.Errorf("%s, refused: next %+v in %s, position %+v", name, again, c.next(), l.Cursors[lane.Live].Position)
		}
		if later := scans(agenda.SharedFor); len(later) != 1 || later[0].Shared {
			t.Errorf("%s, refused for long: next %+v", name, later)
		}
		c.contention.Next = time.Now()
		advance(lane.ScanResult{Last: second, More: true}, false, scans(0))
		if again := scans(0); len(again) != 1 || again[0].After != second || !again[0].Shared {
			t.Errorf("%s, after its turn: next %+v", name, again)
		}
	}
}

// A relay that has had no turn for long claims without the lock at once. Nothing else would wake
// it: it has sent all that it had.
func TestClaimWithoutTheLockIsMadeAtOnce(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named("default"))
	l := c.Lanes.Get("default")
	now := time.Now()
	c.Clock.Set(now)
	l.Cursors[lane.Live] = lane.Cursor{Position: lane.Keyset{At: now}, More: true, Shared: now.Add(time.Hour)}
	for _, refused := range []time.Duration{agenda.SharedFor, agenda.SharedFor / 2} {
		c.contention.Record(now.Add(-refused), true)
	}
	scans := func() []lane.Scan { return c.newScans(l, time.Now(), [lane.Classes]int{lane.Live: 4}, false, true) }
	c.applyResult([]laneClaim{{l, Request{Destination: l.Name, Scans: scans()}}},
		Result{at: now, scans: []lane.ScanResult{{Unread: true}}, contended: true}, time.Millisecond)
	if next := scans(); len(next) != 1 || !next[0].Alone {
		t.Errorf("next %+v", next)
	}
	if wait := c.next(); wait < 0 || wait > agenda.TurnGap {
		t.Errorf("the next turn is planned in %s", wait)
	}
}

// All candidates are locked by one node: one for each would prepare again for each row that another
// relay has claimed meanwhile.
func TestClaimLocksInOneNode(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	plan := planned(t, engineConn(db))
	for _, name := range []string{"claim", "claim keys"} {
		text := plan(name)
		_, locked, _ := strings.Cut(text, "CTE locked")
		locked, _, _ = strings.Cut(locked, "CTE claimed")
		lock, read := strings.Index(locked, "LockRows"), strings.Index(locked, "Tid Scan on outbox_delivery")
		if join := strings.Index(locked, "Nested Loop"); lock < 0 || join < lock || read < join {
			t.Errorf("%s: the rows are locked elsewhere:\n%s", name, text)
		}
	}
}
