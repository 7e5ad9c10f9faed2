package claim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// leaseEvents is how many events relays contest.
const leaseEvents = 24

// Relays take, claim, settle and rescue each other at the same time. What each call returned about
// a delivery is what some order of the calls would have returned, one after the other: the lease is
// a register.
func TestConcurrentClaims(t *testing.T) {
	t.Parallel()
	const relays, free = 6, 3
	c := &contest{Database: relaytest.New(t, "a", "unasked"), begun: time.Now(), calls: map[int64][]porcupine.Operation{}, living: make([]atomic.Int32, relays)}
	var running sync.WaitGroup
	for i := range relays {
		running.Go(func() {
			r := &contestant{contest: c, number: i, free: free, random: rand.New(rand.NewPCG(uint64(i), 1)), settled: make(chan bool)}
			if err := r.run(); err != nil {
				t.Error(err)
			}
		})
	}
	running.Wait()
	for id, calls := range c.calls {
		if calls = append(calls, c.rescues...); !porcupine.CheckOperations(leaseModel, calls) {
			t.Errorf("no order explains the calls about event %d:", id)
			for _, call := range calls {
				t.Logf("%9d to %9d: %+v: %t", call.Call, call.Return, call.Input, call.Output)
			}
		}
	}
	if n := relaytest.Row[int](c.Database, `SELECT count(*) FROM outbox_delivery WHERE destination = 'unasked' AND claim % 2 = 1`); n != 0 {
		t.Errorf("%d of another destination were claimed", n)
	}
}

// Histories that a lease without a part of its rules would allow are found.
func TestLeaseModelFindsPlantedBreaches(t *testing.T) {
	t.Parallel()
	take, claim := leaseCall{kind: "take", relay: 1, fence: 2}, leaseCall{kind: "claim", relay: 2, fence: 5}
	row := leaseCall{kind: "settle", relay: 1, fence: 2, outcome: policy.Retry}
	rescue := func(relay int32) leaseCall { return leaseCall{kind: "rescue", relay: relay} }
	settle := func(relay int32, fence int64, outcome policy.Outcome) leaseCall {
		return leaseCall{kind: "settle", relay: relay, fence: fence, claimed: true, outcome: outcome}
	}
	again := leaseCall{kind: "claim", relay: 3, fence: 7}
	for name, h := range map[string]struct {
		calls []leaseCall
		right bool
	}{
		"a life":                         {[]leaseCall{take, row, claim, rescue(2), again, settle(3, 7, policy.Delivered)}, true},
		"an outcome after a rescue":      {[]leaseCall{take, row, claim, rescue(2), settle(2, 5, policy.Delivered)}, true},
		"taken twice":                    {[]leaseCall{take, {kind: "take", relay: 2, fence: 4}}, false},
		"taken over from a living relay": {[]leaseCall{take, {kind: "take over", relay: 2, fence: 4}}, false},
		"claimed in a living hand":       {[]leaseCall{take, row, claim, again}, false},
		"claimed by a dead relay":        {[]leaseCall{take, row, rescue(2), claim}, false},
		"an outcome under an old fence":  {[]leaseCall{take, row, claim, rescue(2), again, settle(2, 5, policy.Delivered)}, false},
		"claimed when delivered":         {[]leaseCall{take, row, claim, settle(2, 5, policy.Delivered), again}, false},
		"a fence that repeats":           {[]leaseCall{take, row, claim, settle(2, 5, policy.Retry), {kind: "claim", relay: 3, fence: 5}}, false},
	} {
		var history []porcupine.Operation
		for i, call := range h.calls {
			history = append(history, porcupine.Operation{Input: call, Output: true, Call: int64(2 * i), Return: int64(2*i + 1)})
		}
		if porcupine.CheckOperations(leaseModel, history) != h.right {
			t.Errorf("%s: accepted is %t", name, !h.right)
		}
	}
}

// A leaseCall is what one relay asked of one delivery. Its output is whether that had an effect.
type leaseCall struct {
	kind    string // take, take over, claim, settle, rescue
	relay   int32  // that asks; of a rescue, that is dead
	fence   int64
	claimed bool // of a settle: not of a range
	outcome policy.Outcome
}

// A lease is the register of one delivery.
type lease struct {
	fence           int64
	relay           int32
	row, free, done bool
	dead            [256]bool
}

var leaseModel = porcupine.Model{
	Init: func() any { return lease{} },
	Step: func(state, input, output any) (bool, any) {
		l, in, effect := state.(lease), input.(leaseCall), output.(bool)
		can := false
		switch in.kind {
		case "rescue":
			l.dead[in.relay] = true
			return true, l
		case "take":
			can = l.fence == 0
		case "take over":
			can = !l.row && l.dead[l.relay]
			effect = !l.row // what has a row is only read
		case "claim":
			can = l.row && !l.done && (l.free || l.dead[l.relay]) && !l.dead[in.relay]
		case "settle":
			can = !l.done && l.fence == in.fence && l.row == in.claimed
			if effect {
				l.row, l.free, l.done = true, true, in.outcome == policy.Delivered
			}
			return can == effect, l
		}
		if effect {
			can = can && in.fence > l.fence
			l.fence, l.relay, l.free = in.fence, in.relay, false
		}
		return can || !effect, l
	},
}

// A contest is what its relays share.
type contest struct {
	*relaytest.Database
	begun  time.Time
	living []atomic.Int32 // the number of each relay

	mu       sync.Mutex
	produced int
	calls    map[int64][]porcupine.Operation // about each event
	rescues  []porcupine.Operation           // which concern all
}

func (c *contest) since() int64 { return time.Since(c.begun).Nanoseconds() }

// note adds a call about an event that began at the given time and has just returned.
func (c *contest) note(event int64, call leaseCall, began int64, effect bool) {
	operation := porcupine.Operation{ClientId: int(call.relay), Input: call, Call: began, Output: effect, Return: c.since()}
	c.mu.Lock()
	defer c.mu.Unlock()
	if call.kind == "rescue" {
		c.rescues = append(c.rescues, operation)
	} else {
		c.calls[event] = append(c.calls[event], operation)
	}
}

// A contestant is a relay, with another number after each death.
type contestant struct {
	*contest
	number  int
	free    int
	relayID int32
	random  *rand.Rand
	settler *settle.Settler
	settled chan bool // whether in time
	ranges  map[int64]heldRange
	claimed []lane.Delivery
}

type heldRange struct {
	intake.Range
	relay int32
}

func (r *contestant) run() (err error) {
	ctx := r.Context()
	stale := false
	r.settler, r.ranges = settle.New(), map[int64]heldRange{}
	s := r.settler
	s.DB, s.RelayID = r.Pool, func() int32 { return r.living[r.number].Load() }
	s.NeedsRoom, s.ForOthers = func(string) bool { return false }, func(string) bool { return false }
	s.Dropped, s.Failed = func(*settle.Settlement) {}, func(operation string, err error) { r.Errorf("%s: %v", operation, err) }
	s.Stale = func(int) { stale = true }
	s.Written = func([]settle.Settlement) {
		r.settled <- !stale
		stale = false
	}
	var settling sync.WaitGroup
	settling.Go(func() { s.Run(ctx) })
	defer settling.Wait()
	defer s.Close()
	for delivered := false; !delivered && err == nil; {
		if r.living[r.number].Load() == 0 {
			if r.relayID, err = session.Register(ctx, r.Pool, false, fmt.Sprint(r.number), "", time.Hour); err != nil {
				return err
			}
			r.living[r.number].Store(r.relayID)
		}
		for _, step := range []func(context.Context) error{r.produce, r.take, r.takeOver, r.claim, r.rescue, r.settleRange, r.settleClaim} {
			if r.random.IntN(3) > 0 && err == nil {
				err = step(ctx)
			}
		}
		if err == nil {
			err = r.Pool.QueryRow(ctx, `SELECT count(*) = $1 FROM outbox_delivery WHERE destination = 'a' AND status = 'delivered'`, leaseEvents).Scan(&delivered)
		}
	}
	return err
}

func (r *contestant) produce(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.produced == leaseEvents {
		return nil
	}
	r.produced++
	_, err := r.Pool.Exec(ctx, `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', $1)`, fmt.Sprint(r.produced))
	return err
}

func (r *contestant) take(ctx context.Context) error {
	began := r.since()
	got, err := intake.TakeRange(ctx, r.Pool, r.relayID, intake.Terms{Events: 4, Inline: 1 << 20}, false)
	if err == nil && got.Found == intake.Taken {
		r.hold(leaseCall{kind: "take", relay: r.relayID, fence: got.Fence}, began, got)
	}
	return err
}

func (r *contestant) takeOver(ctx context.Context) error {
	fences := []int64{}
	for _, held := range r.ranges {
		fences = append(fences, held.Fence)
	}
	began := r.since()
	got, found, err := intake.RescueRange(ctx, r.Pool, r.relayID, fences, 0)
	if err == nil && found {
		r.hold(leaseCall{kind: "take over", relay: r.relayID, fence: got.Fence}, began, got)
	}
	return err
}

func (r *contestant) hold(call leaseCall, began int64, got intake.Range) {
	r.ranges[got.Seq] = heldRange{got, r.relayID}
	for i := range got.Events {
		r.note(got.Events[i].ID, call, began, true)
	}
}

func (r *contestant) claim(ctx context.Context) error {
	began := r.since()
	result, err := claims{r.Pool}.Claim(ctx, r.relayID, time.Minute, []Request{{Destination: "a", Scans: []lane.Scan{{Free: r.free}}}})
	if len(result.Deliveries) > r.free {
		r.Errorf("asked for %d, got %d", r.free, len(result.Deliveries))
	}
	for i := range result.Deliveries {
		d := &result.Deliveries[i]
		if i > 0 && d.NextAttemptAt.Time.Before(result.Deliveries[i-1].NextAttemptAt.Time) {
			r.Errorf("event %d is claimed behind one that was due later", d.EventID)
		}
		r.note(d.EventID, leaseCall{kind: "claim", relay: r.relayID, fence: d.Fence}, began, true)
	}
	r.claimed = append(r.claimed, result.Deliveries...)
	return err
}

// rescue takes another relay for dead, which may live, now and then.
func (r *contestant) rescue(ctx context.Context) error {
	other := &r.living[r.random.IntN(len(r.living))]
	of := other.Load()
	if of == 0 || of >= 200 || of == r.relayID || r.random.IntN(4) > 0 {
		return nil
	}
	began := r.since()
	if _, err := r.Pool.Exec(ctx, `UPDATE outbox_relay SET heartbeat_at = now() - interval '1 day' WHERE id = $1`, of); err != nil {
		return err
	}
	dead, _, err := session.Rescue(ctx, r.Pool, of)
	if dead {
		r.note(0, leaseCall{kind: "rescue", relay: of}, began, true)
		other.CompareAndSwap(of, 0)
	}
	return err
}

// settleRange writes the rows of a range, in time or not.
func (r *contestant) settleRange(ctx context.Context) error {
	for seq, held := range r.ranges {
		if r.random.IntN(3) > 0 { // it takes long
			return nil
		}
		ref := []intake.RangeRef{held.Ref()}
		rows := intake.NewRows{Relay: held.relay, Ranges: ref, Ended: ref}
		for i := range held.Events {
			for _, to := range []string{"a", "unasked"} {
				if !slices.Contains(held.Events[i].Settled, to) {
					rows.Deliveries = append(rows.Deliveries, intake.NewRow{Range: held.Ref(), EventID: held.Events[i].ID, Destination: to, Status: intake.Pending, Attempts: 1})
				}
			}
		}
		began := r.since()
		done, err := intake.SettleRanges(ctx, r.Pool, rows)
		if pg.HasCode(err, pg.LockNotAvailable) { // another relay takes it over at this moment
			return nil
		}
		if err != nil {
			return err
		}
		delete(r.ranges, seq)
		for i, d := range rows.Deliveries {
			if d.Destination == "a" {
				r.note(d.EventID, leaseCall{kind: "settle", relay: held.relay, fence: held.Fence, outcome: policy.Retry}, began, len(done.Lost) == 0 && !slices.Contains(done.Existing, i))
			}
		}
		return nil
	}
	return nil
}

// settleClaim writes the outcome of a claimed delivery, in time or not. The fourth attempt
// delivers.
func (r *contestant) settleClaim(context.Context) error {
	if len(r.claimed) == 0 {
		return nil
	}
	d := r.claimed[0]
	r.claimed = r.claimed[1:]
	decided := policy.Decision{Result: policy.Result{Reason: policy.ReasonServerError, StatusCode: 500, Posted: true}, Outcome: policy.Retry}
	if d.Attempts >= 3 {
		decided = policy.Decision{Result: policy.Result{Reason: policy.ReasonOK, StatusCode: 204, Posted: true}, Outcome: policy.Delivered}
	}
	began := r.since()
	r.settler.Settle(d.Settlement(decided, time.Now(), 0))
	r.note(d.EventID, leaseCall{kind: "settle", relay: r.relayID, fence: d.Fence, claimed: true, outcome: decided.Outcome}, began, <-r.settled)
	return nil
}
