package claim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// While claims are made in parts, around damaged data, the answer to one part is lost after another
// has brought something.
func TestPartOfAClaimWithoutAcknowledgementIsGivenBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Insert(1, "key")
	c := newRows(t, db, named("a"), named("b"))
	lossy := &lossyExecutor{Pool: c.DB, destination: "b"}
	c.DB, c.damaged.until = lossy, time.Now().Add(time.Hour)
	for len(c.handed) < 2 {
		if err := c.ClaimRows(t.Context(), c.relayID, true); err != nil && lossy.claims > 1 || lossy.claims > 100 {
			t.Fatalf("%v were handed out, %v", c.handed, err)
		}
		for _, l := range c.Lanes.List() {
			l.RestartScans()
		}
	}
	if lossy.claims < 2 || c.handed["a"] != 1 || c.handed["b"] != 1 {
		t.Errorf("%v were handed out after %d claims", c.handed, lossy.claims)
	}
}

// A lossyExecutor loses the answer to the first claim for one destination.
type lossyExecutor struct {
	pg.Pool
	destination string
	claims      int
}

func (e *lossyExecutor) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	results := e.Pool.SendBatch(ctx, b)
	first := b.QueuedQueries[0]
	if first.SQL != ClaimDue || first.Arguments[4].([]string)[0] != e.destination {
		return results
	}
	if e.claims++; e.claims > 1 {
		return results
	}
	return lostAnswer{results}
}

// A lostAnswer is that of a batch that has committed.
type lostAnswer struct{ pgx.BatchResults }

func (l lostAnswer) Close() error { return errors.Join(l.BatchResults.Close(), io.ErrUnexpectedEOF) }

// A claim for many lanes brings a few deliveries of each. While a lane's scan takes all that it
// reads, it does not read a hundred others beyond its room.
func TestScanThatTakesAllReadsLittleMore(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named("default"))
	l := c.Lanes.Get("default")
	c.Clock.Set(time.Now())
	now := c.Clock.Now()
	free := [lane.Classes]int{lane.Live: 4, lane.Backlog: 4}
	l.Cursors[lane.Backlog].Due = now.Add(-time.Second)
	for _, step := range []struct {
		found int // of a scan that looked at 5
		want  int32
	}{
		{5, 4 + lane.ScanExtra}, // the first scan reads whatever there is
		{4, 4 + 1},              // the one before took all
		{5, 4 + lane.ScanExtra}, // the one before met what it could not take
	} {
		scans := c.newScans(l, now, free, true, true)
		if len(scans) != 2 || scans[0].MaxCandidates() != step.want || scans[1].MaxCandidates() != step.want {
			t.Fatalf("after %d of 5: scans %+v", step.found, scans)
		}
		result := Result{at: now}
		for i := range scans {
			result.scans = append(result.scans, lane.ScanResult{Last: lane.Keyset{At: now, ID: 1}, More: true, Candidates: 5})
			result.Deliveries = append(result.Deliveries, make([]lane.Delivery, step.found)...)
			for j := range step.found {
				result.Deliveries[len(result.Deliveries)-1-j].Scan = i + 1
			}
		}
		c.applyResult([]laneClaim{{l, Request{Destination: l.Name, Scans: scans}}}, result, time.Millisecond)
	}
}

// A scan that is due when a lane has no room, or no turn, is made when it has.
func TestScanOfAFullLaneIsOverdue(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named("default"))
	l := c.Lanes.Get("default")
	now := time.Now()
	c.Clock.Set(now)
	for class := range l.Cursors {
		l.Cursors[class].Rest(now.Add(time.Hour))
	}
	l.Push(now, lane.Live, singly(make([]lane.Delivery, 2*post.DefaultLaneInFlight)))
	if claims := c.laneClaims(now, true); len(claims) != 0 {
		t.Fatalf("a full lane asks for %+v", claims)
	}
	l.Release(lane.Live, 2*post.DefaultLaneInFlight)
	if claims := c.laneClaims(now, false); len(claims) != 1 {
		t.Errorf("then: %+v", claims)
	}
	if claims := c.laneClaims(now, false); len(claims) != 0 {
		t.Errorf("again and again: %+v", claims)
	}
}

// Ordering keys that continue fill whatever room there is; others are looked for nevertheless.
func TestKeysThatGoOnLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named("default"))
	l := c.Lanes.Get("default")
	c.Clock.Set(time.Now())
	for i := range 2 * post.DefaultLaneInFlight {
		l.MakeReady(fmt.Sprint(i), ordering.Place{Event: 1}, lane.Live)
	}
	for _, of := range c.laneClaims(time.Now(), true) {
		if len(of.request.Keys) == 0 || len(of.request.Scans) == 0 || of.request.Scans[0].Free == 0 {
			t.Errorf("%d keys continue, with %+v for others", len(of.request.Keys), of.request.Scans)
		}
	}
}

// A scan sees an event of a key below what the same claim has learnt of the key: its id was handed
// out in a block. The next claim of the key reads all of it.
func TestFloorYieldsToWhatTheSameClaimHasSeen(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named("default"))
	l := c.Lanes.Get("default")
	key := "k"
	d := lane.Delivery{EventID: 60, Destination: l.Name, Event: post.Event{OrderingKey: &key}}
	claims := []laneClaim{{l, Request{Destination: l.Name, Scans: []lane.Scan{{}}, Keys: []lane.ReadyKey{{Key: key}}}}}
	c.applyResult(claims, Result{Deliveries: []lane.Delivery{d}, scans: []lane.ScanResult{{Keys: []lane.FoundKey{{Key: key, Place: ordering.Place{Event: 5}}}}}}, 0)
	if floor := c.floors.LookUp(ordering.Key{Destination: l.Name, Key: key}, 0, false); floor.Event >= 5 {
		t.Errorf("the next claim begins behind event %d", floor.Event)
	}
}

// The parts of a claim that were not made, since one before them failed, are made by the next one.
func TestPartThatWasNotMadeIsMadeNext(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Insert(1, "key")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute' WHERE destination = 'b'`)
	c := newRows(t, db, named("a"), named("b"))
	c.DB, c.damaged.until = &lossyExecutor{Pool: c.DB, destination: "b"}, time.Now().Add(time.Hour)
	b := c.Lanes.Get("b")
	b.Cursors[lane.Backlog].Rest(time.Now().Add(time.Hour))
	b.RescanSince(c.Clock.Now().Add(-time.Hour))
	relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
	if c.handed["a"] != 1 || b.RescanFrom == (lane.Keyset{}) || b.Cursors[lane.Live].Position != (lane.Keyset{}) {
		t.Errorf("%v were handed out, %+v is left to be read", c.handed, b.RescanFrom)
	}
	if due := c.Agenda.Take(time.Now()); !due.Has(agenda.CauseScan) {
		t.Errorf("due: %s", due)
	}
	relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
	testkit.Equal(t, "handed out", c.handed, map[string]int{"a": 1, "b": 1})
}

// The answer to a part of a scan that goes around a refused row is lost. No later statement is
// made, so that the next claim gives back what that part has claimed, and all is handed out.
func TestLostPartOfAScanIsGivenBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Insert(4, "key")
	db.Refuse("UPDATE ON outbox_delivery", "OLD.destination = 'a' AND OLD.event_id = 4")
	c := newRows(t, db, named("a"), named("b"))
	lossy := &lossyPart{Pool: c.DB, events: 1}
	c.DB = lossy
	for range 3 {
		relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
	}
	testkit.Equal(t, "handed out", c.handed, map[string]int{"a": 3, "b": 4})
	testkit.Equal(t, "the answer was lost", lossy.lost, true)
}

// A lossyPart loses the first successful answer to a scan that may claim so many events.
type lossyPart struct {
	pg.Pool
	events int
	lost   bool
}

func (p *lossyPart) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	results := p.Pool.SendBatch(ctx, b)
	of, _ := b.QueuedQueries[0].Arguments[len(b.QueuedQueries[0].Arguments)-1].([]int64)
	if p.lost || len(of) != p.events {
		return results
	}
	p.lost = true
	return lostAnswer{results}
}

// The search of many destinations meets one whose rows cannot be read. It finds the others, and
// lets claims find out what can be read of that one.
func TestSearchGoesAroundAnUnreadableDestination(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "bad", "due")
	db.Insert(1, "key")
	destinations := []post.Destination{named("bad"), named("due")}
	for i := range lane.Few {
		destinations = append(destinations, named(fmt.Sprint("idle-", i)))
	}
	c := newRows(t, db, destinations...)
	c.DB = unsearchable{&relaytest.DamagedPool{Pool: db.Pool, Words: []string{"bad"}}}
	relaytest.Must(t, c.searchDue(t.Context(), c.relayID))
	var found []string
	for _, l := range c.Lanes.Visited() {
		found = append(found, l.Name)
	}
	slices.Sort(found)
	testkit.Equal(t, "found", found, []string{"bad", "due"})
}

// unsearchable fails the search of all destinations.
type unsearchable struct{ *relaytest.DamagedPool }

func (u unsearchable) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if sql == selectDue {
		args = append(args, u.Words)
	}
	return u.DamagedPool.Query(ctx, sql, args...)
}

// A scan that fails is repeated before the next poll.
func TestFailedScanIsRepeated(t *testing.T) {
	t.Parallel()
	c := newRows(t, relaytest.Covered(t), named("default"))
	relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, true))
	c.Lanes.Get("default").RestartScans()
	c.claimFailed(c.laneClaims(time.Now(), false))
	relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, false))
	if wait := c.next(); wait < 0 || wait > failedScanRest {
		t.Errorf("next turn in %s", wait)
	}
}
