package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
)

// failedScanRest is how long a cursor is put off whose claim failed, at most.
const failedScanRest = 5 * time.Second

// rows claims pending rows that are due. It belongs to the claimer's goroutine.
type rows struct {
	db           pg.Pool
	lease        time.Duration
	pollInterval time.Duration
	maxInFlight  func() int
	restFactor   int // agenda.RestFactor; less in tests, where a busy machine would make the rests last for minutes

	lanes   *lanes
	agenda  *agenda.Agenda
	pace    *agenda.Pace
	clock   *pg.Clock
	joins   *joins
	settler *settle.Settler
	waiting *waiting.Keeper
	start   func(*lane) // a sender

	// What follows what happens; nil: nothing does.
	laneChanged func(LaneState)
	handed      func(destination string, deliveries int)
	ran         func(deliveries int, took time.Duration)
	failed      func(operation string, err error)

	floors     ordering.Floors
	damaged    damaged
	lost       session.Unacknowledged
	contention agenda.Contention
	searchAt   time.Time // when the next search of many lanes may begin
	claimed    int       // deliveries of the last claim: about as many will be in the next
}

// forget forgets what another server may not know.
func (c *rows) forget() { c.floors = ordering.Floors{} }

// claimRows claims what the lanes ask for, if they do. scan makes those with room read what is due.
func (c *rows) claimRows(ctx context.Context, instance int32, scan bool) error {
	c.lanes.dismiss(time.Now(), c.laneChanged)
	if scan && c.lanes.areMany() {
		if err := c.searchDue(ctx, instance); err != nil {
			return err
		}
	}
	now := time.Now()
	claims := c.laneClaims(now, scan)
	if len(claims) == 0 {
		return nil
	}
	result, err := c.claim(ctx, instance, claims)
	if err != nil {
		c.agenda.At(agenda.CauseScan, now)
		c.claimFailed(claims)
		return err
	}
	c.clock.Set(result.at)
	work, took := c.countWork(result.deliveries), time.Since(now)
	ready := c.applyResult(claims, result, took)
	c.handOut(claims, result)
	if ready { // the next claim brings the deliveries of the keys that this one found
		c.agenda.At(agenda.CauseReadyKeys, now)
	}
	if work > 0 || ready {
		c.pace.Worked(time.Now())
	}
	return nil
}

// claim gives back the rows of an earlier claim whose answer was lost, and then claims.
func (c *rows) claim(ctx context.Context, instance int32, claims []laneClaim) (claimResult, error) {
	requests := make([]claimRequest, len(claims))
	for i, claim := range claims {
		requests[i] = claim.request
	}
	if err := c.lost.GiveBack(ctx, c.db, instance); err != nil {
		return claimResult{}, err
	}
	return c.claimAll(ctx, instance, requests)
}

// claimFailed makes the keys of a failed claim ready again and puts its cursors off, so that the next claim costs less.
func (c *rows) claimFailed(claims []laneClaim) {
	for _, claim := range claims {
		for _, key := range claim.request.keys {
			claim.lane.makeReady(key.key, ordering.Place{}, key.class)
		}
		for _, s := range claim.request.scans {
			if s.class != live && !s.rescan {
				claim.lane.cursors[s.class].failed(time.Now(), min(c.pollInterval, failedScanRest))
			}
		}
	}
}

// countWork counts the claimed deliveries that are no probes. A probe does not end idleness.
func (c *rows) countWork(claimed []delivery) (n int) {
	var l *lane
	probe := false
	for i := range claimed {
		if d := &claimed[i]; l == nil || l.name != d.destination {
			l = c.lanes.get(d.destination)
			probe = l.state().Breaker != policy.BreakerClosed.String()
		}
		if !probe {
			n++
		}
	}
	return n
}

// applyResult moves the cursors past what a claim has read. It reports whether any ordering key can be claimed at once.
func (c *rows) applyResult(claims []laneClaim, result claimResult, took time.Duration) (ready bool) {
	if result.contended {
		c.contention.Record(time.Now(), true)
		c.agenda.At(agenda.CauseContention, c.contention.Next)
	}
	for i, claim := range claims {
		if reordered, changed := result.reordered[i]; changed {
			claim.lane.reordered = reordered
		}
	}
	c.rememberFloors(claims, result) // before noteKeys: a key of which a scan saw an earlier event loses its floor again
	c.noteWaiting(claims, result.heads)
	brought := result.broughtByScan()
	n := 0
	for _, claim := range claims {
		for _, s := range claim.request.scans {
			read := result.scans[n]
			c.noteKeys(claim.lane, s.class, read.keys)
			c.advanceCursor(claim.lane, s, read, brought[n], result.at, took)
			n++
		}
		ready = ready || claim.lane.hasReady()
	}
	return ready
}

// rememberFloors remembers where the unsettled deliveries of each ordering key begin: at the head that the claim brought,
// or at the one that it found and could not claim. No floor stands at one that joined its key later: rows of events that were in hand then
// come before it.
func (c *rows) rememberFloors(claims []laneClaim, result claimResult) {
	index := map[string]int{}
	for i := range claims {
		index[claims[i].lane.name] = i
	}
	remember := func(request int, key string, head ordering.Place) {
		if head.Joined != 0 {
			return
		}
		claim := claims[request]
		c.floors.Set(ordering.Key{Destination: claim.lane.name, Key: key},
			ordering.Floor{Event: head.Event - 1, Reordered: claim.lane.reordered, SkipFailed: claim.request.skipFailed})
	}
	for _, head := range result.heads {
		remember(head.request, head.key, head.place)
	}
	for i := range result.deliveries {
		if d := &result.deliveries[i]; d.scan == 0 && d.after == 0 && d.event.OrderingKey != nil {
			remember(index[d.destination], *d.event.OrderingKey, d.placeInKey())
		}
	}
}

// broughtByScan returns how many deliveries each scan brought.
func (r *claimResult) broughtByScan() []int {
	brought := make([]int, len(r.scans))
	for i := range r.deliveries {
		if d := &r.deliveries[i]; d.scan > 0 {
			brought[d.scan-1]++
		}
	}
	return brought
}

// noteWaiting reports what was found behind heads that hold it, so that no claim reads it again.
func (c *rows) noteWaiting(claims []laneClaim, heads []keyHead) {
	type askedKey struct {
		request int
		key     string
	}
	held := map[askedKey]ordering.Place{} // of each head: a claim may ask for thousands of keys
	for _, head := range heads {
		if head.waits {
			c.joins.AddJoined(ordering.Key{Destination: claims[head.request].lane.name, Key: head.key})
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
		for _, k := range request.keys {
			if head, is := held[askedKey{i, k.key}]; is && k.found.Compare(head) > 0 {
				c.waiting.Found(waiting.Behind{Destination: request.destination, Key: k.key, Head: head.Event, First: k.found})
			}
		}
	}
}

// noteKeys makes the ordering keys ready that a scan has seen.
func (c *rows) noteKeys(l *lane, class class, keys []foundKey) {
	for _, found := range keys {
		key := ordering.Key{Destination: l.name, Key: found.key}
		if found.joins {
			c.joins.Add(key, class)
		}
		if found.place != (ordering.Place{}) {
			if found.place.Joined == 0 {
				c.floors.Forget(key, found.place.Event)
			}
			l.makeReady(found.key, found.place, class)
		}
	}
}

// makeReady makes an ordering key ready, of which the next delivery may be claimed.
func (c *rows) makeReady(key ordering.Key, first ordering.Place, class class) {
	if l := c.lanes.get(key.Destination); l != nil {
		l.makeReady(key.Key, first, class)
		c.lanes.engage(l)
	}
}

// advanceCursor moves the cursor of a lane past what its scan s has read, which brought so many deliveries.
func (c *rows) advanceCursor(l *lane, s scan, read scanResult, brought int, at time.Time, took time.Duration) {
	if s.shared && !read.unread {
		c.contention.Record(time.Now(), false)
	}
	w := &l.cursors[s.class]
	if s.rescan {
		l.advanceRescan(read)
	} else if !read.unread {
		// A little less than the poll interval, so that a scan that comes with each safety tick does not miss every other one.
		rest := agenda.Rest{Least: c.pollInterval * 9 / 10, Times: c.restFactor, Most: time.Duration(c.restFactor) * agenda.LongestWork}
		w.advance(s.class, read, brought+len(read.keys), at, took, rest)
		w.clear = brought > 0 && brought == read.candidates
		if read.more && (read.passed > 0 || read.unkeyed > brought) { // other relays claim here
			w.shared = time.Now().Add(agenda.SharedFor)
		}
	}
	// No settlement wakes the claimer for these: the requests may hang, or the deliveries are another relay's.
	if read.more || w.pause > 0 {
		c.agenda.At(agenda.CauseCursor, time.Now().Add(max(took, w.pause)))
	}
}

// handOut gives each lane what was claimed for it, and starts senders for it.
func (c *rows) handOut(claims []laneClaim, result claimResult) {
	byLane := byDestination(result.deliveries)
	window := result.at.Add(-liveWindow)
	parts := c.lanes.divide(c.maxInFlight(), byLane)
	for _, claim := range claims {
		deliveries, brought := byLane[claim.lane.name]
		if !brought {
			if claim.lane.endTrial(time.Now()) {
				c.agenda.At(agenda.CauseBreaker, time.Now())
			}
			continue
		}
		if c.handed != nil {
			c.handed(claim.lane.name, len(deliveries))
		}
		claim.lane.setShare(parts, true) // before it starts senders: all lanes together may have MaxInFlight
		c.push(claim, deliveries, window)
	}
}

// push queues the claimed deliveries of a lane, each run in the class of its most urgent delivery: a live delivery would otherwise
// wait among the replays for those that precede it in its key.
func (c *rows) push(claim laneClaim, deliveries []delivery, window time.Time) {
	l := claim.lane
	keyClass := make(map[string]class, len(claim.request.keys))
	for _, key := range claim.request.keys {
		keyClass[key.key] = key.class
	}
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: the end of a run makes its key ready, and these must be free then
		l.countTaken(d.class, 1)
		l.countClaimed(*d.event.OrderingKey, 1, d.placeInKey())
		c.settler.Settle(d.held(policy.ReasonOrder))
	}
	var byClass [classes][][]delivery
	for _, run := range all {
		class := replays
		for i := range run {
			class = min(class, run[i].classAt(window))
		}
		if key := run[0].event.OrderingKey; key != nil {
			l.countClaimed(*key, len(run), run[len(run)-1].placeInKey())
			if class == replays {
				class = keyClass[*key]
			}
		}
		for i := range run {
			run[i].class = class
		}
		byClass[class] = append(byClass[class], run)
	}
	for i, runs := range byClass {
		for range l.push(time.Now(), class(i), runs) {
			c.start(l)
		}
	}
}
