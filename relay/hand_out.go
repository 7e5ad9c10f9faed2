package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// handOut gives each lane what was claimed for it, and starts senders for it.
func (c *claimer) handOut(claims []laneClaim, result claimResult) {
	byLane := make(map[string][]delivery, len(claims))
	for _, d := range result.deliveries {
		byLane[d.destination] = append(byLane[d.destination], d)
	}
	window := result.at.Add(-liveWindow)
	active := 0
	for _, l := range c.lanes.list() {
		if len(byLane[l.name]) > 0 || l.isActive() {
			active++
		}
	}
	for _, claim := range claims {
		deliveries, brought := byLane[claim.lane.name]
		if !brought {
			if claim.lane.tried(time.Now()) {
				signal(c.wake.room)
			}
			continue
		}
		if c.config().Hooks.Claimed != nil {
			c.config().Hooks.Claimed(claim.lane.name, len(deliveries))
		}
		c.setShare(claim.lane, active) // before it gets senders, of which all lanes together may have so many
		c.push(claim, deliveries, window)
	}
}

// push queues the claimed deliveries of a lane, each run in the class of its most urgent delivery. Replays before something else of
// their key go in its class: it would wait for them in theirs.
func (c *claimer) push(claim laneClaim, deliveries []delivery, window time.Time) {
	l := claim.lane
	keyClass := make(map[string]class, len(claim.request.keys))
	for _, key := range claim.request.keys {
		keyClass[key.key] = key.class
	}
	all, broken := runs(deliveries)
	for _, d := range broken { // before anything is sent: the end of a run makes its key ready, and these must be free then
		l.took(d.class, 1)
		l.claimedKey(*d.event.OrderingKey, 1)
		c.settler.settle(held(d, policy.ReasonOrder))
	}
	var byClass [classes][][]delivery
	for _, run := range all {
		class := replays
		for i := range run {
			class = min(class, run[i].classAt(window))
		}
		if key := run[0].event.OrderingKey; key != nil {
			l.claimedKey(*key, len(run))
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
