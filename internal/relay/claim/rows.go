package claim

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/join"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
)

// failedScanRest is how long a cursor is put off whose claim failed, at most.
const failedScanRest = 5 * time.Second

// Rows claims pending rows that are due. It belongs to the claimer's goroutine.
type Rows struct {
	DB           pg.Pool
	Lease        time.Duration
	PollInterval time.Duration
	MaxInFlight  func() int
	RestFactor   int // agenda.RestFactor; less in tests, where a busy machine would make the rests last for minutes

	Lanes   *lane.Lanes
	Agenda  *agenda.Agenda
	Pace    *agenda.Pace
	Clock   *pg.Clock
	Joins   *join.Keys
	Settler *settle.Settler
	Waiting *waiting.Keeper
	Start   func(*lane.Lane) // a sender

	// What follows what happens; nil: nothing does.
	LaneChanged func(lane.State)
	Handed      func(destination string, deliveries int)
	Ran         func(deliveries int, took time.Duration)
	Failed      func(operation string, err error)

	floors     ordering.Floors
	damaged    damaged
	lost       session.Unacknowledged
	contention agenda.Contention
	searchAt   time.Time // when the next search of many lanes may begin
	claimed    int       // deliveries of the last claim: about as many will be in the next
}

// Forget drops the remembered floors: after a failover they may not hold.
func (c *Rows) Forget() { c.floors = ordering.Floors{} }

// NoteRange drops the floors above events that this relay has in hand of a range. It must be called
// before any of them gets a row.
func (c *Rows) NoteRange(r *settle.TakenRange) {
	switch {
	case r.Seq == c.floors.Range+1:
		c.floors.Range = r.Seq
	case r.Seq > c.floors.Range: // other relays have taken ranges
		c.floors = ordering.Floors{Range: r.Seq}
	}
	for i := range r.Deliveries {
		if d := &r.Deliveries[i]; d.OrderingKey != nil {
			c.floors.Forget(ordering.Key{Destination: d.Destination, Key: *d.OrderingKey}, d.EventID)
		}
	}
}

// ClaimRows claims what the lanes ask for, if they do. scan makes those with room read what is due.
func (c *Rows) ClaimRows(ctx context.Context, relayID int32, scan bool) error {
	c.Lanes.Dismiss(time.Now(), c.LaneChanged)
	if scan && c.Lanes.AreMany() {
		if err := c.searchDue(ctx, relayID); err != nil {
			return err
		}
	}
	now := time.Now()
	c.tryDamaged(now)
	claims := c.laneClaims(now, scan)
	if len(claims) == 0 {
		return nil
	}
	result, err := c.claim(ctx, relayID, claims)
	if err != nil {
		c.Agenda.At(agenda.CauseScan, now)
		c.claimFailed(claims)
		return err
	}
	c.Clock.Set(result.at)
	work, took := c.countWork(result.Deliveries), time.Since(now)
	ready := c.applyResult(claims, result, took)
	c.handOut(claims, result)
	if ready { // the next claim brings the deliveries of the keys that this one found
		c.Agenda.At(agenda.CauseReadyKeys, now)
	}
	if work > 0 || ready {
		c.Pace.Worked(time.Now())
	}
	return nil
}

// claim gives back the rows of an earlier claim whose answer was lost, and then claims.
func (c *Rows) claim(ctx context.Context, relayID int32, claims []laneClaim) (Result, error) {
	requests := make([]Request, len(claims))
	for i, claim := range claims {
		requests[i] = claim.request
	}
	if err := c.lost.GiveBack(ctx, c.DB, relayID); err != nil {
		return Result{}, err
	}
	return c.claimAll(ctx, relayID, requests)
}

// claimFailed makes the keys of a failed claim ready again and puts its cursors off, so that the
// next claim costs less.
func (c *Rows) claimFailed(claims []laneClaim) {
	for _, claim := range claims {
		for _, key := range claim.request.Keys {
			claim.lane.MakeReady(key.Key, ordering.Place{}, key.Class)
		}
		for _, s := range claim.request.Scans {
			if s.Class != lane.Live && !s.Rescan {
				claim.lane.Cursors[s.Class].Failed(time.Now(), min(c.PollInterval, failedScanRest))
			}
		}
	}
}

// countWork counts the claimed deliveries that are no probes. A probe does not end idleness.
func (c *Rows) countWork(claimed []lane.Delivery) (n int) {
	var l *lane.Lane
	probe := false
	for i := range claimed {
		if d := &claimed[i]; l == nil || l.Name != d.Destination {
			l = c.Lanes.Get(d.Destination)
			probe = l.State().Breaker != policy.BreakerClosed.String()
		}
		if !probe {
			n++
		}
	}
	return n
}

// applyResult moves the cursors past what a claim has read. It reports whether any ordering key can
// be claimed at once.
func (c *Rows) applyResult(claims []laneClaim, result Result, took time.Duration) (ready bool) {
	if result.contended {
		c.contention.Record(time.Now(), true)
		c.Agenda.At(agenda.CauseContention, c.contention.Next)
	}
	for i, claim := range claims {
		if reordered, changed := result.reordered[i]; changed {
			claim.lane.Reordered = reordered
		}
	}
	if result.newest > 0 {
		c.floors = ordering.Floors{Range: result.newest}
	}
	c.rememberFloors(claims, result) // before noteKeys: a key of which a scan saw an earlier event loses its floor again
	c.noteWaiting(claims, result.heads)
	brought := result.broughtByScan()
	n := 0
	for _, claim := range claims {
		for _, s := range claim.request.Scans {
			read := result.scans[n]
			c.noteKeys(claim.lane, s.Class, read.Keys)
			c.advanceCursor(claim.lane, s, read, brought[n], result.at, took)
			n++
		}
		ready = ready || claim.lane.HasReady()
	}
	return ready
}

// rememberFloors remembers where the unsettled deliveries of each ordering key begin: at the head
// that the claim brought, or at the one that it found and could not claim. No floor stands at one
// that joined its key later: rows of events that were in hand then come before it. For the same
// reason none is learnt while an open range has events of the key.
func (c *Rows) rememberFloors(claims []laneClaim, result Result) {
	if result.apart {
		return
	}
	index := map[string]int{}
	for i := range claims {
		index[claims[i].lane.Name] = i
	}
	remember := func(request int, key string, head ordering.Place) {
		claim := claims[request]
		of := ordering.Key{Destination: claim.lane.Name, Key: key}
		if head.Joined != 0 || result.inHand[of] {
			return
		}
		c.floors.Set(of, ordering.Floor{Event: head.Event - 1, Reordered: claim.lane.Reordered, SkipFailed: claim.request.skipFailed})
	}
	for _, head := range result.heads {
		remember(head.request, head.key, head.place)
	}
	for i := range result.Deliveries {
		if d := &result.Deliveries[i]; d.Scan == 0 && d.After == 0 && d.Event.OrderingKey != nil {
			remember(index[d.Destination], *d.Event.OrderingKey, d.PlaceInKey())
		}
	}
}

// broughtByScan returns how many deliveries each scan brought.
func (r *Result) broughtByScan() []int {
	brought := make([]int, len(r.scans))
	for i := range r.Deliveries {
		if d := &r.Deliveries[i]; d.Scan > 0 {
			brought[d.Scan-1]++
		}
	}
	return brought
}

// noteWaiting reports what was found behind heads that hold it, so that no claim reads it again.
func (c *Rows) noteWaiting(claims []laneClaim, heads []keyHead) {
	type askedKey struct {
		request int
		key     string
	}
	held := map[askedKey]ordering.Place{} // of each head: a claim may ask for thousands of keys
	for _, head := range heads {
		if head.waits {
			c.Joins.AddJoined(ordering.Key{Destination: claims[head.request].lane.Name, Key: head.key})
		}
		if head.holds {
			held[askedKey{head.request, head.key}] = head.place
		}
	}
	for i := range claims {
		if len(held) == 0 {
			return
		}
		request := &claims[i].request
		for _, k := range request.Keys {
			if head, is := held[askedKey{i, k.Key}]; is && k.Found.Compare(head) > 0 {
				c.Waiting.Found(waiting.Behind{Destination: request.Destination, Key: k.Key, Head: head.Event, First: k.Found})
			}
		}
	}
}

// noteKeys makes the ordering keys ready that a scan has seen.
func (c *Rows) noteKeys(l *lane.Lane, class lane.Class, keys []lane.FoundKey) {
	for _, found := range keys {
		key := ordering.Key{Destination: l.Name, Key: found.Key}
		if found.Joins {
			c.Joins.Add(key, class)
		}
		if found.Place != (ordering.Place{}) {
			if found.Place.Joined == 0 {
				c.floors.Forget(key, found.Place.Event)
			}
			l.MakeReady(found.Key, found.Place, class)
		}
	}
}

// advanceCursor moves the cursor of a lane past what its scan s has read, which brought so many
// deliveries.
func (c *Rows) advanceCursor(l *lane.Lane, s lane.Scan, read lane.ScanResult, brought int, at time.Time, took time.Duration) {
	if read.Unread {
		return
	}
	if s.Shared {
		c.contention.Record(time.Now(), false)
	}
	w := &l.Cursors[s.Class]
	if s.Rescan {
		l.AdvanceRescan(read)
	} else {
		// A little less than the poll interval, so that a scan that comes with each safety tick
		// does not miss every other one.
		rest := agenda.Rest{Least: c.PollInterval * 9 / 10, Times: c.RestFactor, Most: time.Duration(c.RestFactor) * agenda.LongestWork}
		w.Advance(s.Class, read, brought+len(read.Keys), at, took, rest)
		w.Clear = brought > 0 && brought == read.Candidates
		if read.More && (read.Passed > 0 || read.Unkeyed > brought) { // other relays claim here
			w.Shared = time.Now().Add(agenda.SharedFor)
		}
	}
	// No settlement wakes the claimer for these: the requests may hang, or the deliveries are
	// another relay's.
	if read.More || w.Pause > 0 {
		c.Agenda.At(agenda.CauseCursor, time.Now().Add(max(took, w.Pause)))
	}
}

// handOut gives each lane what was claimed for it, and starts senders for it.
func (c *Rows) handOut(claims []laneClaim, result Result) {
	byLane := lane.ByDestination(result.Deliveries)
	window := result.at.Add(-lane.LiveWindow)
	parts := c.Lanes.Divide(c.MaxInFlight(), byLane)
	for _, claim := range claims {
		deliveries, brought := byLane[claim.lane.Name]
		if !brought {
			if claim.lane.EndTrial(time.Now()) {
				c.Agenda.At(agenda.CauseBreaker, time.Now())
			}
			continue
		}
		if c.Handed != nil {
			c.Handed(claim.lane.Name, len(deliveries))
		}
		claim.lane.SetShare(parts, true) // before it starts senders: all lanes together may have MaxInFlight
		c.push(claim, deliveries, window)
	}
}

// push queues the claimed deliveries of a lane, each run in the class of its most urgent delivery:
// a live delivery would otherwise wait among the replays for those that precede it in its key.
func (c *Rows) push(claim laneClaim, deliveries []lane.Delivery, window time.Time) {
	l := claim.lane
	keyClass := make(map[string]lane.Class, len(claim.request.Keys))
	for _, key := range claim.request.Keys {
		keyClass[key.Key] = key.Class
	}
	all, broken := lane.Runs(deliveries)
	for _, d := range broken { // before anything is sent: the end of a run makes its key ready, and these must be free then
		l.CountTaken(d.Class, 1)
		l.CountClaimed(*d.Event.OrderingKey, 1, d.PlaceInKey())
		c.Settler.Settle(d.GivenBack(policy.ReasonOrder))
	}
	var byClass [lane.Classes][][]lane.Delivery
	for _, run := range all {
		class := lane.Replays
		for i := range run {
			class = min(class, run[i].ClassAt(window))
		}
		if key := run[0].Event.OrderingKey; key != nil {
			l.CountClaimed(*key, len(run), run[len(run)-1].PlaceInKey())
			if class == lane.Replays {
				class = keyClass[*key]
			}
		}
		for i := range run {
			run[i].Class = class
		}
		byClass[class] = append(byClass[class], run)
	}
	for i, runs := range byClass {
		for range l.Push(time.Now(), lane.Class(i), runs) {
			c.Start(l)
		}
	}
}
