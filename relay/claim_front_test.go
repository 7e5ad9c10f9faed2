package relay

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
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

// A scan that shares its front passes what other relays have in flight, however much that is, and reads no further than it has room.
func TestSharedScanPassesWhatIsInFlight(t *testing.T) {
	t.Parallel()
	const inFlight, free = 3 * scanExtra, 20
	db := relaytest.Covered(t)
	db.Insert(inFlight+10*free, "key")
	s, other := registered(db)
	_, own := registered(db)
	claim := func(instance int32, one scan) (scanResult, []delivery) {
		t.Helper()
		result, err := s.claim(t.Context(), instance, time.Minute, []claimRequest{{destination: "default", scans: []scan{one}}})
		relaytest.Must(t, err)
		return result.scans[0], result.deliveries
	}
	if _, claimed := claim(other, scan{free: inFlight}); len(claimed) != inFlight {
		t.Fatalf("the other relay claimed %d", len(claimed))
	}

	alone, claimed := claim(own, scan{free: free})
	if len(claimed) != 0 || !alone.more || alone.passed != free+scanExtra || alone.candidates != 0 || alone.last.id != free+scanExtra {
		t.Errorf("without others: claimed %d, %+v", len(claimed), alone)
	}
	shared, claimed := claim(own, scan{free: free, clear: true, shared: true})
	if len(claimed) != free || !shared.more || shared.passed != inFlight || shared.candidates != free || shared.unkeyed != free ||
		shared.last.id != inFlight+free {
		t.Errorf("beside others: claimed %d, %+v", len(claimed), shared)
	}
	rest, claimed := claim(own, scan{free: 100 * free, after: shared.last, shared: true})
	if len(claimed) != 9*free || rest.more || rest.passed != 0 {
		t.Errorf("the rest: claimed %d, %+v", len(claimed), rest)
	}
}

// Only one claim at a time reads what shared scans ask for. Other scans go on beside it.
func TestSharedScansReadOneAfterTheOther(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Insert(40, "key")
	s, instance := registered(db)
	claim := func(alone bool) claimResult {
		t.Helper()
		result, err := s.claim(t.Context(), instance, time.Minute, []claimRequest{
			{destination: "a", scans: []scan{{free: 10, shared: true, alone: alone}}}, {destination: "b", scans: []scan{{free: 10}}},
		})
		relaytest.Must(t, err)
		return result
	}
	stranger := holdFront(db)
	for range 2 {
		result := claim(false)
		if !result.contended || !result.scans[0].unread || result.scans[1].unread || len(result.deliveries) != 10 || result.deliveries[0].destination != "b" {
			t.Errorf("while another one claims: %+v", result)
		}
	}
	if result := claim(true); result.contended || result.scans[0].unread || len(result.deliveries) != 20 {
		t.Errorf("alone: %+v", result)
	}
	relaytest.Must(t, stranger.Close(t.Context()))
	relaytest.Becomes(db, 0, heldLocks)
	if result := claim(false); result.contended || result.scans[0].unread || len(result.deliveries) != 20 {
		t.Errorf("afterwards: %+v", result)
	}
	if n := relaytest.Row[int](db, heldLocks); n != 0 {
		t.Errorf("%d locks are left", n)
	}
}

// A claim that meets what others have in flight, or have just locked, makes the next ones of its walk ask for the lock. One that was
// refused leaves the walk where it is, and is repeated.
func TestWalkSharesItsFront(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named2("default"))
	l := c.lanes.get("default")
	c.clock.Set(time.Now())
	first, second := keyset{at: c.clock.Now(), id: 1}, keyset{at: c.clock.Now(), id: 2}
	for name, read := range map[string]scanResult{
		"passed":        {last: first, more: true, passed: 1},
		"locked":        {last: first, more: true, candidates: 5, unkeyed: 5},
		"alone":         {last: first, more: true},
		"ordering keys": {last: first, more: true, candidates: 5},
		"the end":       {last: first, passed: 1},
	} {
		l.cursors[live], c.contention, *c.agenda = cursor{}, agenda.Contention{}, agenda.Agenda{}
		scans := func(after time.Duration) []scan {
			return c.newScans(l, time.Now().Add(after), [classes]int{live: 4}, false, true)
		}
		advance := func(read scanResult, taken bool, scans []scan) {
			c.applyResult([]laneClaim{{l, claimRequest{destination: l.name, scans: scans}}},
				claimResult{at: c.clock.Now(), scans: []scanResult{read}, contended: taken}, time.Millisecond)
		}
		advance(read, false, []scan{{class: live}})
		shared := name == "passed" || name == "locked"
		next := scans(0)
		if read.more != (len(next) == 1) || read.more && (next[0].shared != shared || next[0].after != first) {
			t.Errorf("%s: next %+v", name, next)
		}
		if !shared {
			continue
		}
		advance(scanResult{unread: true}, true, next)
		if again := scans(0); len(again) != 0 || c.next() < 0 || c.next() > time.Second || l.cursors[live].position != first {
			t.Errorf("%s, refused: next %+v in %s, position %+v", name, again, c.next(), l.cursors[live].position)
		}
		if later := scans(agenda.SharedFor); len(later) != 1 || later[0].shared {
			t.Errorf("%s, refused for long: next %+v", name, later)
		}
		c.contention.Next = time.Now()
		advance(scanResult{last: second, more: true}, false, scans(0))
		if again := scans(0); len(again) != 1 || again[0].after != second || !again[0].shared {
			t.Errorf("%s, after its turn: next %+v", name, again)
		}
	}
}

// A relay that has had no turn for long claims without the lock at once. Nothing else would wake it: it has sent all that it had.
func TestClaimWithoutTheLockIsMadeAtOnce(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named2("default"))
	l := c.lanes.get("default")
	now := time.Now()
	c.clock.Set(now)
	l.cursors[live] = cursor{position: keyset{at: now}, more: true, shared: now.Add(time.Hour)}
	for _, refused := range []time.Duration{agenda.SharedFor, agenda.SharedFor / 2} {
		c.contention.Record(now.Add(-refused), true)
	}
	scans := func() []scan { return c.newScans(l, time.Now(), [classes]int{live: 4}, false, true) }
	c.applyResult([]laneClaim{{l, claimRequest{destination: l.name, scans: scans()}}},
		claimResult{at: now, scans: []scanResult{{unread: true}}, contended: true}, time.Millisecond)
	if next := scans(); len(next) != 1 || !next[0].alone {
		t.Errorf("next %+v", next)
	}
	if wait := c.next(); wait < 0 || wait > agenda.TurnGap {
		t.Errorf("the next turn is planned in %s", wait)
	}
}

// All candidates are locked by one node: one for each would prepare anew for each row that another relay has claimed meanwhile.
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
