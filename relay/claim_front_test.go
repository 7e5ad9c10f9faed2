package relay

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// takeFront is what an exclusive claim does first.
const takeFront = `SELECT pg_try_advisory_xact_lock(427020085613 # 'outbox_delivery'::regclass::oid::bigint)`

// holdFront returns a session of a stranger who holds the lock of the front until it ends.
func (db *database) holdFront() *pgx.Conn {
	db.Helper()
	stranger := db.locker(`SELECT`)
	var got bool
	must(db, stranger.QueryRow(db.Context(), takeFront).Scan(&got))
	if !got {
		db.Fatal("the lock of the front is taken")
	}
	return stranger
}

// A scan that shares its front passes what other relays have in flight, however much that is, and reads no further than it has room.
func TestSharedScanPassesWhatIsInFlight(t *testing.T) {
	t.Parallel()
	const inFlight, free = 3 * scanExtra, 20
	db := newDatabase(t)
	db.insert(inFlight+10*free, "key")
	s, other := db.registered()
	_, own := db.registered()
	claim := func(instance int32, one scan) (scanResult, []delivery) {
		t.Helper()
		result, err := s.claim(t.Context(), instance, time.Minute, []claimRequest{{destination: "default", scans: []scan{one}}})
		must(t, err)
		return result.scans[0], result.deliveries
	}
	if _, claimed := claim(other, scan{free: inFlight}); len(claimed) != inFlight {
		t.Fatalf("the other relay claimed %d", len(claimed))
	}

	alone, claimed := claim(own, scan{free: free})
	if len(claimed) != 0 || !alone.more || alone.passed != free+scanExtra || alone.looked != 0 || alone.last.id != free+scanExtra {
		t.Errorf("without others: claimed %d, %+v", len(claimed), alone)
	}
	shared, claimed := claim(own, scan{free: free, clear: true, shared: true})
	if len(claimed) != free || !shared.more || shared.passed != inFlight || shared.looked != free || shared.unkeyed != free ||
		shared.last.id != inFlight+free {
		t.Errorf("beside others: claimed %d, %+v", len(claimed), shared)
	}
	rest, claimed := claim(own, scan{free: 100 * free, after: shared.last, shared: true})
	if len(claimed) != 9*free || rest.more || rest.passed != 0 {
		t.Errorf("the rest: claimed %d, %+v", len(claimed), rest)
	}
}

// Of exclusive scans only one claim at a time reads anything. Others, and those of other lanes, go on beside it.
func TestExclusiveScanWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "a", "b")
	db.insert(30, "key")
	s, instance := db.registered()
	claim := func() claimResult {
		t.Helper()
		result, err := s.claim(t.Context(), instance, time.Minute, []claimRequest{
			{destination: "a", scans: []scan{{free: 10, shared: true, exclusive: true}}}, {destination: "b", scans: []scan{{free: 10}}},
		})
		must(t, err)
		return result
	}
	stranger := db.holdFront()
	for range 2 {
		result := claim()
		if !result.frontTaken || !result.scans[0].unread || result.scans[1].unread || len(result.deliveries) != 10 || result.deliveries[0].destination != "b" {
			t.Errorf("while another one claims: %+v", result)
		}
	}
	must(t, stranger.Close(t.Context()))
	becomes(db, 0, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`)
	if result := claim(); result.frontTaken || result.scans[0].unread || len(result.deliveries) != 20 {
		t.Errorf("afterwards: %+v", result)
	}
	if n := row[int](db, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`); n != 0 {
		t.Errorf("%d locks are left", n)
	}
}

// A claim that meets what others have in flight, or have just locked, makes the next ones of its walk ask for the lock. One that was
// refused leaves the walk where it is, and is repeated.
func TestWalkSharesItsFront(t *testing.T) {
	t.Parallel()
	r := prepared(t, newDatabase(t).config(to("http://receiver.test/")))
	c, l := r.newClaimer(), r.lane("default")
	c.clock.set(time.Now())
	first, second := keyset{at: c.clock.now(), id: 1}, keyset{at: c.clock.now(), id: 2}
	for name, read := range map[string]scanResult{
		"passed":        {last: first, more: true, passed: 1},
		"locked":        {last: first, more: true, looked: 5, unkeyed: 5},
		"alone":         {last: first, more: true},
		"ordering keys": {last: first, more: true, looked: 5},
		"the end":       {last: first, passed: 1},
	} {
		l.walks[live], c.front, c.next = walk{}, policy.Front{}, time.Time{}
		scans := func() []scan { return c.scans(l, time.Now(), [classes]int{live: 4}, false, true) }
		advance := func(read scanResult, taken bool, scans []scan) {
			c.advance([]laneClaim{{l, claimRequest{destination: l.name, scans: scans}}},
				claimResult{at: c.clock.now(), scans: []scanResult{read}, frontTaken: taken}, time.Millisecond)
		}
		advance(read, false, []scan{{class: live}})
		shared := name == "passed" || name == "locked"
		next := scans()
		if read.more != (len(next) == 1) || read.more && (next[0].shared != shared || next[0].exclusive != shared || next[0].after != first) {
			t.Errorf("%s: next %+v", name, next)
		}
		if !shared {
			continue
		}
		advance(scanResult{unread: true}, true, next)
		if again := scans(); len(again) != 0 || c.next.IsZero() || c.next.After(time.Now().Add(time.Second)) || l.walks[live].position != first {
			t.Errorf("%s, refused: next %+v at %s, position %+v", name, again, c.next, l.walks[live].position)
		}
		c.front.Next = time.Now()
		advance(scanResult{last: second, more: true}, false, scans())
		if again := scans(); len(again) != 1 || again[0].after != second || !again[0].exclusive {
			t.Errorf("%s, after its turn: next %+v", name, again)
		}
	}
}

// A stranger who holds the lock of the front keeps no relay from delivering.
func TestStrangerHoldsTheFront(t *testing.T) {
	t.Parallel()
	const events = 6000
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	stranger := db.holdFront()
	db.insert(events, "key")
	for range 2 {
		start(t, db.config(to(rc.URL)))
	}
	becomes(db, events, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`)
	if n := len(counted(rc.keys())); rc.total() != events || n != events {
		t.Errorf("%d requests for %d keys", rc.total(), n)
	}
	must(t, stranger.Close(context.WithoutCancel(t.Context())))
}

// All candidates are locked by one node: one for each would prepare anew for each row that another relay has claimed meanwhile.
func TestClaimLocksInOneNode(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	plan := planned(t, engineConn(t, db))
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
