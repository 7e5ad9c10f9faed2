package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
	"github.com/outbox-relay/outbox-relay/internal/shortsleep"
)

// claimer takes new events and claims rows that are due, when its agenda says so. It is one goroutine and owns all its fields.
type claimer struct {
	*progress
	presence      *session.Presence
	lanes         *lanes
	store         *store
	wake          *wakeup
	hands         *hands
	config        func() *Config // in effect
	databaseError func(operation string, err error)

	senders    *senders
	settler    *settle.Settler
	waiting    *waiting.Keeper
	restFactor int // see the constant; less in tests, where a busy machine would make the rests last for minutes

	agenda     agenda.Agenda
	pace       agenda.Pace
	breakers   breakerKeeper
	clock      databaseClock
	floors     ordering.Floors
	damaged    damaged
	lost       session.Unacknowledged
	contention agenda.Contention
	taker      taker
	joins      joins
	searchAt   time.Time // when the next search of many lanes may begin
}

// run takes one turn after the other until ctx is done.
func (c *claimer) run(ctx context.Context) {
	failing := newBackoff()
	sleeper := shortsleep.New()
	defer sleeper.Close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		c.markTurn()
		due, err := c.turn(ctx)
		wait, next := c.agenda.Next(time.Now())
		if err != nil {
			wait = failing.NextBackOff()
			c.databaseError("claim", err)
		} else {
			failing.Reset()
		}
		if line := c.config().Log.Debug(); line.Enabled() {
			line.Stringer("due", due).Stringer("next", next).Float64("in_ms", wait.Seconds()*1000).Msg("claimer: turn")
		}
		switch {
		case wait >= shortsleep.Longest:
			timer.Reset(wait)
			select {
			case <-ctx.Done():
			case <-timer.C:
			case <-c.wake.token:
			}
		case wait > 0: // what is posted meanwhile is met right after it
			sleeper.Sleep(wait)
		}
		c.readMailbox(time.Now())
	}
}

// turn does once what is due. After an error all of it is due again.
func (c *claimer) turn(ctx context.Context) (due agenda.Cause, err error) {
	now := time.Now()
	instance, alive := c.presence.Current()
	if c.presence.WasLost() || !alive || ctx.Err() != nil {
		// Without its session this relay's claims would look like a dead relay's. What it knows may be of another server: the
		// database may have failed over since.
		c.floors = ordering.Floors{}
		c.taker = taker{awaiting: c.taker.awaiting}
		// What is due stays due, but not at once: an urgent cause would have one turn follow the other until the database is back.
		c.agenda.At(c.agenda.Take(now)|agenda.CauseEntry, now.Add(agenda.TurnGap))
		return 0, nil
	}
	if err := c.prepare(ctx, now, instance); err != nil {
		return 0, err
	}
	if hook := c.config().Hooks.Idle; c.becomeIdle(now) && hook != nil {
		defer hook() // after the poll that idleness begins with
	}
	c.plan(now)
	due = c.agenda.Take(now)
	if err = c.act(ctx, now, instance, due); err != nil {
		c.agenda.At(due, now)
	}
	c.plan(time.Now())
	return due, err
}

// prepare writes whether producers notify and what the breakers have decided, and learns the database's time.
func (c *claimer) prepare(ctx context.Context, now time.Time, instance int32) error {
	if err := c.arm(ctx, now); err != nil {
		return err
	}
	if err := c.breakers.writeDecisions(&c.agenda, now, instance); err != nil {
		return err
	}
	if !c.clock.read.IsZero() {
		return nil
	}
	at, err := c.store.now(ctx)
	if err == nil {
		c.clock.set(at)
	}
	return err
}

// act does what is due. What this relay takes over, and what waits for other relays, precedes what it takes.
func (c *claimer) act(ctx context.Context, now time.Time, instance int32, due agenda.Cause) error {
	if due.Has(agenda.CauseEntry | agenda.CauseTick) {
		c.agenda.At(agenda.CauseTick, now.Add(c.config().PollInterval))
	}
	if due.Has(agenda.CauseEntry) {
		if err := c.checkOrigin(ctx); err != nil {
			return err
		}
	}
	// The end of ctx cancels nothing from here on: what is cancelled may have committed, and would wait until its lease ends.
	ctx = context.WithoutCancel(ctx)
	if due.Has(agenda.CauseEntry | agenda.CauseRescue) {
		if err := c.rescueRanges(ctx, now, instance); err != nil {
			return err
		}
	}
	if due.Has(agenda.CauseAwaitedKeys) {
		if err := c.recheckAwaiting(ctx, instance); err != nil {
			return err
		}
	}
	polling := due.Has(agenda.CausePoll | agenda.CauseTick)
	if polling || due.Has(agenda.CauseCutRange|agenda.CauseTakeAgain) {
		if err := c.takeEvents(ctx, instance, polling); err != nil {
			return err
		}
		if err := c.passCut(ctx, instance); err != nil {
			return err
		}
	}
	if due.Has(agenda.CauseJoinKeys) {
		if err := c.joinKeys(ctx); err != nil {
			return err
		}
	}
	scanning := due.Has(agenda.CauseEntry | agenda.CauseTick | agenda.CauseSweep | agenda.CauseRetry | agenda.CauseScan)
	return c.claimRows(ctx, instance, scanning)
}

// plan registers what the pace and the retries of this relay ask for.
func (c *claimer) plan(now time.Time) {
	c.pace.Plan(&c.agenda, now)
	c.wake.retries.Plan(&c.agenda, now)
}

// readMailbox makes due what other goroutines have posted.
func (c *claimer) readMailbox(now time.Time) {
	posted, commits := c.wake.read()
	c.agenda.At(posted, now)
	by := WakePoll
	switch {
	case posted.Has(agenda.CauseNotified | agenda.CauseNotifyGap | agenda.CauseSweep):
		by = WakeNotify
		c.pace.Notified(now, commits)
	case posted.Has(agenda.CauseRoom | agenda.CauseBreaker):
		by = WakeRoom
	}
	if posted.Has(agenda.CauseNotifyGap) {
		c.pace.NotifyGap(now)
	}
	if posted.Has(agenda.CauseSweep) { // a relay that stops may leave open ranges
		c.agenda.At(agenda.CauseRescue, now)
	}
	if hook := c.config().Hooks.Woken; hook != nil {
		hook(by)
	}
	for _, l := range c.lanes.visited() {
		if posted.Has(agenda.CauseSweep) {
			l.restartScans()
		}
		if posted.Has(agenda.CauseRescue) { // a cursor may have a large backlog before it
			l.rescanSince(c.clock.now().Add(-rescuedWindow))
		}
	}
}

// claimRows claims what the lanes ask for, if they do. scan makes those with room read what is due.
func (c *claimer) claimRows(ctx context.Context, instance int32, scan bool) error {
	c.lanes.dismiss(time.Now(), c.config().Hooks.LaneChanged)
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
	c.clock.set(result.at)
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

// arm declares in the database whether producers notify: they do while the load is low.
func (c *claimer) arm(ctx context.Context, now time.Time) error {
	c.pace.CannotListen = !c.wake.listening.Load()
	armed, changed := c.pace.Declaration(now)
	if !changed {
		return nil
	}
	if err := c.store.arm(ctx, armed); err != nil {
		return err
	}
	c.pace.Declared(now, armed)
	return nil
}

// becomeIdle makes the relay idle if nothing has come for a while, and reports whether it did so now.
func (c *claimer) becomeIdle(now time.Time) bool {
	became := c.pace.BecomeIdle(now)
	c.wake.idle.Store(c.pace.Idle)
	return became
}

// claim gives back the rows of an earlier claim whose answer was lost, and then claims.
func (c *claimer) claim(ctx context.Context, instance int32, claims []laneClaim) (claimResult, error) {
	requests := make([]claimRequest, len(claims))
	for i, claim := range claims {
		requests[i] = claim.request
	}
	if err := c.lost.GiveBack(ctx, c.store.pool, instance); err != nil {
		return claimResult{}, err
	}
	return c.claimAll(ctx, instance, requests)
}

// claimFailed makes the keys of a failed claim ready again and puts its cursors off, so that the next claim costs less.
func (c *claimer) claimFailed(claims []laneClaim) {
	for _, claim := range claims {
		for _, key := range claim.request.keys {
			claim.lane.makeReady(key.key, ordering.Place{}, key.class)
		}
		for _, s := range claim.request.scans {
			if s.class != live && !s.rescan {
				claim.lane.cursors[s.class].failed(time.Now(), min(c.config().PollInterval, DefaultPollInterval))
			}
		}
	}
}

// countWork counts the claimed deliveries that are no probes. A probe does not end idleness.
func (c *claimer) countWork(claimed []delivery) (n int) {
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
func (c *claimer) applyResult(claims []laneClaim, result claimResult, took time.Duration) (ready bool) {
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
func (c *claimer) rememberFloors(claims []laneClaim, result claimResult) {
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
func (c *claimer) noteWaiting(claims []laneClaim, heads []keyHead) {
	type askedKey struct {
		request int
		key     string
	}
	held := map[askedKey]ordering.Place{} // of each head: a claim may ask for thousands of keys
	for _, head := range heads {
		if head.waits {
			c.joins.add(ordering.Key{Destination: claims[head.request].lane.name, Key: head.key}, join{class: live, done: true})
			c.agenda.At(agenda.CauseJoinKeys, time.Now().Add(joinAgain))
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
func (c *claimer) noteKeys(l *lane, class class, keys []foundKey) {
	for _, found := range keys {
		key := ordering.Key{Destination: l.name, Key: found.key}
		if found.joins {
			c.joins.add(key, join{class: class})
			c.agenda.At(agenda.CauseTakeAgain|agenda.CauseJoinKeys, time.Now()) // first, what was committed before it became due
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
func (c *claimer) makeReady(key ordering.Key, first ordering.Place, class class) {
	if l := c.lanes.get(key.Destination); l != nil {
		l.makeReady(key.Key, first, class)
		c.lanes.engage(l)
	}
}

// advanceCursor moves the cursor of a lane past what its scan s has read, which brought so many deliveries.
func (c *claimer) advanceCursor(l *lane, s scan, read scanResult, brought int, at time.Time, took time.Duration) {
	if s.shared && !read.unread {
		c.contention.Record(time.Now(), false)
	}
	w := &l.cursors[s.class]
	if s.rescan {
		l.advanceRescan(read)
	} else if !read.unread {
		// A little less than the poll interval, so that a scan that comes with each safety tick does not miss every other one.
		rest := agenda.Rest{Least: c.config().PollInterval * 9 / 10, Times: c.restFactor, Most: time.Duration(c.restFactor) * longestWork}
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
func (c *claimer) handOut(claims []laneClaim, result claimResult) {
	byLane := byDestination(result.deliveries)
	window := result.at.Add(-liveWindow)
	parts := c.lanes.divide(c.config().MaxInFlight, byLane)
	for _, claim := range claims {
		deliveries, brought := byLane[claim.lane.name]
		if !brought {
			if claim.lane.endTrial(time.Now()) {
				c.wake.post(agenda.CauseBreaker)
			}
			continue
		}
		if c.config().Hooks.Claimed != nil {
			c.config().Hooks.Claimed(claim.lane.name, len(deliveries))
		}
		claim.lane.setShare(parts, true) // before it starts senders: all lanes together may have MaxInFlight
		c.push(claim, deliveries, window)
	}
}

// push queues the claimed deliveries of a lane, each run in the class of its most urgent delivery: a live delivery would otherwise
// wait among the replays for those that precede it in its key.
func (c *claimer) push(claim laneClaim, deliveries []delivery, window time.Time) {
	l := claim.lane
	keyClass := make(map[string]class, len(claim.request.keys))
	for _, key := range claim.request.keys {
		keyClass[key.key] = key.class
	}
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: the end of a run makes its key ready, and these must be free then
		l.countTaken(d.class, 1)
		l.countClaimed(*d.event.OrderingKey, 1, d.placeInKey())
		c.settler.Settle(held(d, policy.ReasonOrder))
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
			c.senders.start(l)
		}
	}
}
