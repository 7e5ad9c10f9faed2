package lane

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// Give queues deliveries of a range, in the order of their events. One of an ordering key that is
// in flight waits behind it. It returns how many senders to start, and what must become pending
// instead.
func (o *outgoing) Give(deliveries []Delivery) (start int, refused []Delivery) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range deliveries {
		d := &deliveries[i]
		q := &o.queues[d.Class]
		if d.Event.OrderingKey != nil {
			begins, no := o.keys.give(*d)
			switch {
			case no:
				refused = append(refused, *d)
				continue
			case !begins:
				q.taken++
				q.behind++
				continue
			}
		}
		q.push(deliveries[i : i+1 : i+1])
	}
	return o.startSenders(), refused
}

// NextOfKey returns what a sender sends after a run of an ordering key that was delivered; nothing:
// the key is free.
func (o *outgoing) NextOfKey(key string) []Delivery {
	o.mu.Lock()
	defer o.mu.Unlock()
	run := o.keys.next(key)
	if len(run) > 0 {
		o.queues[run[0].Class].behind--
	}
	return run
}

// StopKey keeps anything of an ordering key from being sent until one that was not delivered is
// settled, and returns what waits behind it.
func (o *outgoing) StopKey(key string) []Delivery {
	o.mu.Lock()
	defer o.mu.Unlock()
	behind := o.keys.stop(key)
	for i := range behind {
		o.queues[behind[i].Class].behind--
	}
	return behind
}

// BeginSpill and endSpill enclose the way of a delivery that becomes pending: what follows it in
// its ordering key must too.
func (o *outgoing) BeginSpill(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys.spill(key, 1)
}

func (o *outgoing) endSpill(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys.spill(key, -1)
	o.keys.block(key)
}

// BeginArrival and endArrival enclose the way of a row that joins its ordering key when it is due.
func (o *outgoing) BeginArrival(key string, due time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys.arrive(key, due)
}

func (o *outgoing) endArrival(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.keys.arrived(key)
}

// AwaitsArrival reports whether a row of an ordering key is about to be written that was due at the
// given time of the database. Until it can be joined, nothing that was due later may be sent.
func (o *outgoing) AwaitsArrival(key string, due time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	a, is := o.keys.arriving[key]
	return is && !due.Before(a.due)
}

// NoteDue notes a row that became due at the given time, by the database's clock.
func (o *outgoing) NoteDue(at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.noteDue(at)
}

func (o *outgoing) noteDue(at time.Time) {
	if o.dueSince.IsZero() || at.Before(o.dueSince) {
		o.dueSince = at
	}
}

// NoteHeld notes a row that became due at the given time, by the database's clock, was held, and is
// to be read again after until.
func (o *outgoing) NoteHeld(at, until time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.heldSince.IsZero() {
		o.heldSince, o.heldUntil = at, until
	} else if at.Before(o.heldSince) {
		o.heldSince = at
	}
}

// TakeDue returns since when rows are due that were noted after the last call. Held ones are none
// of them once the breaker is not closed: probes lead to them.
func (o *outgoing) TakeDue(now time.Time) (since time.Time, are bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.heldSince.IsZero() && !now.Before(o.heldUntil) {
		if o.breaker.State == policy.BreakerClosed {
			o.noteDue(o.heldSince)
		}
		o.heldSince = time.Time{}
	}
	since, o.dueSince = o.dueSince, time.Time{}
	return since, !since.IsZero()
}

// ForgetBlocked forgets which ordering keys have got rows: a statement that begins later sees
// these.
func (o *outgoing) ForgetBlocked() {
	o.mu.Lock()
	defer o.mu.Unlock()
	clear(o.keys.blocked)
}

// perSecond returns how many deliveries the lane can send; 0: unknown. The caller holds mu.
func (o *outgoing) perSecond() float64 {
	able := o.rate.PerSecond
	if o.perPost > 0 {
		able = max(able, float64(o.limit())/o.perPost.Seconds())
	}
	if paced := o.flow.Paced(); paced > 0 && (able == 0 || paced < able) {
		return paced
	}
	return able
}

// RoomForRange returns how many deliveries of ranges the lane may get: what it sends within about
// settle.RowsAfter.
func (o *outgoing) RoomForRange(now time.Time, lease time.Duration) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.roomAhead(now, lease)
}

func (o *outgoing) roomAhead(now time.Time, lease time.Duration) int {
	if o.stopReason(now) != "" {
		return 0
	}
	most := o.limit()
	if trying, _ := o.breaker.Trying(); !trying {
		most = maxTaken
		if perSecond := o.perSecond(); perSecond > 0 {
			most = min(maxTaken, o.limit()+int(perSecond*min(settle.RowsAfter, o.ahead(lease)).Seconds()))
		}
	}
	return max(most-o.taken(), 0)
}

// fastRoom returns capacity of a lane that sends quickly at this moment. Waiting for its room takes
// some milliseconds, and is cheaper than making rows of what it cannot take. Any other lane must
// not hold up takes: its receiver may have stopped answering.
func (o *outgoing) fastRoom(now time.Time, lease time.Duration) (room int, fast bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now.Sub(o.releasedAt) > stillSending || o.perSecond() < fastLane {
		return 0, false
	}
	return o.roomAhead(now, lease), true
}

// taken returns how many deliveries the lane holds. The caller holds mu.
func (o *outgoing) taken() (n int) {
	for i := range o.queues {
		n += o.queues[i].taken
	}
	return n
}
