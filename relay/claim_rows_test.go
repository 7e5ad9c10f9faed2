package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// While claims are made in parts, around damaged data, the answer to one part is lost after another has brought something.
func TestPartOfAClaimWithoutAcknowledgementIsGivenBack(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Insert(1, "key")
	c := newRows(t, db, named2("a"), named2("b"))
	lossy := &lossyExecutor{Pool: c.db, destination: "b"}
	c.db, c.damaged.until = lossy, time.Now().Add(time.Hour)
	for len(c.handed) < 2 {
		if err := c.claimRows(t.Context(), c.instance, true); err != nil && lossy.claims > 1 || lossy.claims > 100 {
			t.Fatalf("%v were handed out, %v", c.handed, err)
		}
		for _, l := range c.lanes.list() {
			l.restartScans()
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
	if first.SQL != claimDue || first.Arguments[4].([]string)[0] != e.destination {
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

// A claim for many lanes brings a few deliveries of each. While a lane's scan takes all that it looks at, it does not read a
// hundred others beyond its room.
func TestScanThatTakesAllLooksAtLittleMore(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named2("default"))
	l := c.lanes.get("default")
	c.clock.Set(time.Now())
	now := c.clock.Now()
	free := [classes]int{live: 4, backlog: 4}
	l.cursors[backlog].due = now.Add(-time.Second)
	for _, step := range []struct {
		found int // of a scan that looked at 5
		want  int32
	}{
		{5, 4 + scanExtra}, // the first scan looks for whatever there is
		{4, 4 + 1},         // the one before took all
		{5, 4 + scanExtra}, // the one before met what it could not take
	} {
		scans := c.newScans(l, now, free, true, true)
		if len(scans) != 2 || scans[0].maxCandidates() != step.want || scans[1].maxCandidates() != step.want {
			t.Fatalf("after %d of 5: scans %+v", step.found, scans)
		}
		result := claimResult{at: now}
		for i := range scans {
			result.scans = append(result.scans, scanResult{last: keyset{at: now, id: 1}, more: true, candidates: 5})
			result.deliveries = append(result.deliveries, make([]delivery, step.found)...)
			for j := range step.found {
				result.deliveries[len(result.deliveries)-1-j].scan = i + 1
			}
		}
		c.applyResult([]laneClaim{{l, claimRequest{destination: l.name, scans: scans}}}, result, time.Millisecond)
	}
}

// A look that comes when a lane has no room, or no turn, is made up for when it has.
func TestLookIsOwedToAFullLane(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named2("default"))
	l := c.lanes.get("default")
	now := time.Now()
	c.clock.Set(now)
	for class := range l.cursors {
		l.cursors[class].rest(now.Add(time.Hour))
	}
	l.push(now, live, singly(make([]delivery, 2*post.DefaultLaneInFlight)))
	if claims := c.laneClaims(now, true); len(claims) != 0 {
		t.Fatalf("a full lane asks for %+v", claims)
	}
	l.release(live, 2*post.DefaultLaneInFlight)
	if claims := c.laneClaims(now, false); len(claims) != 1 {
		t.Errorf("then: %+v", claims)
	}
	if claims := c.laneClaims(now, false); len(claims) != 0 {
		t.Errorf("again and again: %+v", claims)
	}
}

// Ordering keys that go on fill whatever room there is; others are looked for nevertheless.
func TestKeysThatGoOnLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named2("default"))
	l := c.lanes.get("default")
	c.clock.Set(time.Now())
	for i := range 2 * post.DefaultLaneInFlight {
		l.makeReady(fmt.Sprint(i), ordering.Place{Event: 1}, live)
	}
	for _, of := range c.laneClaims(time.Now(), true) {
		if len(of.request.keys) == 0 || len(of.request.scans) == 0 || of.request.scans[0].free == 0 {
			t.Errorf("%d keys go on, with %+v for others", len(of.request.keys), of.request.scans)
		}
	}
}

// A scan sees an event of a key below what the same claim has learnt of the key: its id was handed out in a block. The next
// claim of the key reads all of it.
func TestFloorYieldsToWhatTheSameClaimHasSeen(t *testing.T) {
	t.Parallel()
	c := newRows(t, nil, named2("default"))
	l := c.lanes.get("default")
	key := "k"
	d := delivery{eventID: 60, destination: l.name, event: post.Event{OrderingKey: &key}}
	claims := []laneClaim{{l, claimRequest{destination: l.name, scans: []scan{{}}, keys: []readyKey{{key: key}}}}}
	c.applyResult(claims, claimResult{deliveries: []delivery{d}, scans: []scanResult{{keys: []foundKey{{key: key, place: ordering.Place{Event: 5}}}}}}, 0)
	if floor := c.floors.LookUp(ordering.Key{Destination: l.name, Key: key}, 0, false); floor.Event >= 5 {
		t.Errorf("the next claim begins behind event %d", floor.Event)
	}
}
