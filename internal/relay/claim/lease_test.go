package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Relays take, claim, settle and rescue each other at the same time, while transactions overlap.
// What each call returned about a delivery is what some order of the calls would have returned, one
// after the other: the lease is a register. Each committed event is in one range, those of an
// ordering key in the order of their commits, and is delivered.
func TestConcurrentClaims(t *testing.T) {
	t.Parallel()
	const relays, free = 6, 3
	c := &contest{Database: relaytest.New(t, "a", "unasked"), begun: time.Now(), seqs: map[int64]int64{}, unread: map[int64][]porcupine.Operation{}, calls: map[int64][]porcupine.Operation{}, living: make([]atomic.Int32, relays), idle: make([]atomic.Bool, relays)}
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
		if calls = slices.Concat(calls, c.rescues, c.unread[c.seqs[id]]); !porcupine.CheckOperations(leaseModel, calls) {
			t.Errorf("no order explains the calls about event %d:", id)
			for _, call := range calls {
				t.Logf("%9d to %9d: %+v: %t", call.Call, call.Return, call.Input, call.Output)
			}
		}
	}
	if n := relaytest.Row[int](c.Database, `SELECT count(*) FROM outbox_delivery WHERE destination = 'unasked' AND claim % 2 = 1`); n != 0 {
		t.Errorf("%d of another destination were claimed", n)
	}
	if n := relaytest.Row[int](c.Database, `SELECT count(*) FROM outbox_delivery WHERE destination = 'unasked'`); n != len(c.seqs) {
		t.Errorf("%d of %d events have a row of another destination", n, len(c.seqs))
	}
	c.wantTaken()
}

// wantTaken checks that each committed event, and no other, was taken, that none was taken before
// an earlier one of its ordering key, and that what makes that hard has happened.
func (c *contest) wantTaken() {
	c.Helper()
	last, events := map[string]int64{}, relaytest.Rows[int64](c.Database, `SELECT id FROM outbox ORDER BY id`)
	for _, id := range events {
		key := relaytest.Row[string](c.Database, `SELECT coalesce(ordering_key, '') FROM outbox WHERE id = $1`, id)
		if seq := c.seqs[id]; seq == 0 || key != "" && seq < last[key] {
			c.Errorf("event %d of key %q is in range %d, behind %d", id, key, seq, last[key])
		}
		last[key] = c.seqs[id]
	}
	if n := relaytest.Row[int](c.Database, `SELECT count(*) FROM outbox_delivery d WHERE NOT EXISTS (SELECT FROM outbox WHERE id = event_id)`); n != 0 || len(events) != len(c.seqs) {
		c.Errorf("%d events are committed, and %d were taken; %d deliveries have none", len(events), len(c.seqs), n)
	}
	if c.Logf("%d events, %d cuts, %d taken over, %d deaths", len(events), c.cuts, c.takenOver, len(c.rescues)); c.cuts == 0 || c.takenOver == 0 || len(c.rescues) == 0 {
		c.Error("no range was cut, none was taken over, or no relay died")
	}
}

// Histories that a lease without a part of its rules would allow are found.
func TestLeaseModelFindsPlantedBreaches(t *testing.T) {
	t.Parallel()
	take, claim := leaseCall{kind: "take", relay: 1, fence: 2}, leaseCall{kind: "claim", relay: 2, fence: 5}
	lost := leaseCall{kind: "take", relay: 1, fence: 2, lost: true}
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
		"taken over from itself":         {[]leaseCall{take, {kind: "take over", relay: 1, fence: 4}}, false},
		"a lost take":                    {[]leaseCall{lost, {kind: "take over", relay: 1, fence: 4}}, true},
		"a lost take, taken over twice":  {[]leaseCall{lost, {kind: "take over", relay: 1, fence: 4}, {kind: "take over", relay: 1, fence: 6}}, false},
		"another relay's lost take":      {[]leaseCall{lost, {kind: "take over", relay: 2, fence: 4}}, false},
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
	lost    bool // of a take or a take over: the relay did not get the answer
	outcome policy.Outcome
}

// A lease is the register of one delivery.
type lease struct {
	fence           int64
	relay           int32
	row, free, done bool
	lost            bool // the relay does not know that it has the range
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
			can = !l.row && (l.dead[l.relay] || l.relay == in.relay && l.lost)
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
			l.fence, l.relay, l.free, l.lost = in.fence, in.relay, false, in.lost
		}
		return can || !effect, l
	},
}

// A contest is what its relays share.
type contest struct {
	*relaytest.Database
	begun  time.Time
	living []atomic.Int32 // the number of each relay
	idle   []atomic.Bool  // it produces no more

	mu              sync.Mutex
	seqs            map[int64]int64                 // of each event: its range
	calls           map[int64][]porcupine.Operation // about each event
	rescues         []porcupine.Operation           // which concern all
	unread          map[int64][]porcupine.Operation // by range: taken over, and lost before its events were read
	cuts, takenOver int
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
	more    bool
	claimed []lane.Delivery

	producer, longProducer *pgx.Conn
	produced               int    // transactions
	long                   pgx.Tx // overlaps others; nil: none
}

type heldRange struct {
	intake.Range
	relay int32
}

func (r *contestant) run() (err error) {
	ctx, cancel := context.WithTimeoutCause(r.Context(), time.Minute, errors.New("not everything is delivered"))
	defer cancel()
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
	for _, conn := range []**pgx.Conn{&r.producer, &r.longProducer} {
		if *conn, err = pgx.Connect(ctx, r.DSN); err != nil {
			return err
		}
		defer (*conn).Close(context.WithoutCancel(ctx))
	}
	for delivered := false; !delivered && err == nil; {
		if r.living[r.number].Load() == 0 {
			if r.random.IntN(2) == 0 { // its process is gone; else it only comes back late
				r.ranges, r.claimed = map[int64]heldRange{}, nil
			}
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
			err = r.Pool.QueryRow(ctx, selectDelivered).Scan(&delivered)
			for i := range r.idle {
				delivered = delivered && r.idle[i].Load()
			}
		}
	}
	return cmp.Or(context.Cause(ctx), err)
}

const selectDelivered = `
SELECT (SELECT count(*) FROM outbox) = (SELECT count(*) FROM outbox_delivery WHERE destination = 'a' AND status = 'delivered')
       AND NOT EXISTS (SELECT FROM outbox_range WHERE ended_at IS NULL)`

const insertSome = `
INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
SELECT 't', '{}', $1 || i, $2 FROM generate_series(1, $3::int) i`

// produce commits, or rolls back, a transaction with an event of the contestant's own key, and some
// in savepoints. Or it begins or ends one of events without a key that overlaps the others.
func (r *contestant) produce(ctx context.Context) error {
	last := r.produced >= testsize.Of(60, 12)
	if r.long != nil && (last || r.random.IntN(5) == 0) {
		long := r.long
		r.long = nil
		return long.Commit(ctx)
	}
	if last {
		r.idle[r.number].Store(true)
		return nil
	}
	r.produced++
	name := fmt.Sprintf("%d-%d-", r.number, r.produced)
	if r.long == nil {
		var err error
		if r.long, err = r.longProducer.Begin(ctx); err != nil {
			return err
		}
		_, err = r.long.Exec(ctx, insertSome, name+"long-", nil, 1+r.random.IntN(10))
		return err
	}
	tx, err := r.producer.Begin(ctx)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, insertSome, name, fmt.Sprint("p", r.number), 1)
	for what, end := range map[string]func(pgx.Tx, context.Context) error{"undone-": pgx.Tx.Rollback, "nested-": pgx.Tx.Commit} {
		if inner, _ := tx.Begin(ctx); inner != nil && r.random.IntN(3) == 0 {
			_, failed := inner.Exec(ctx, insertSome, name+what, nil, 3)
			err = errors.Join(err, failed, end(inner, ctx))
		}
	}
	if err != nil || r.random.IntN(5) == 0 {
		return errors.Join(err, tx.Rollback(ctx))
	}
	return tx.Commit(ctx)
}

func (r *contestant) take(ctx context.Context) error {
	began := r.since()
	got, err := intake.TakeRange(ctx, r.Pool, r.relayID, intake.Terms{Events: 1 + r.random.IntN(8), Inline: 1 << 20}, r.more)
	if r.more = err == nil && got.More; r.more {
		r.mu.Lock()
		r.cuts++
		r.mu.Unlock()
	}
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
		call := r.hold(leaseCall{kind: "take over", relay: r.relayID, fence: got.Fence}, began, got)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.takenOver++
		if len(got.Events) == 0 {
			r.unread[got.Seq] = append(r.unread[got.Seq], porcupine.Operation{ClientId: int(r.relayID), Input: call, Call: began, Output: true, Return: r.since()})
		}
	}
	return err
}

// hold notes what a take or a take over answered. The relay loses one answer in ten.
func (r *contestant) hold(call leaseCall, began int64, got intake.Range) leaseCall {
	r.ranges[got.Seq] = heldRange{got, r.relayID}
	if call.lost = r.random.IntN(10) == 0; call.lost {
		delete(r.ranges, got.Seq)
	}
	last := map[string]int64{}
	for i := range got.Events {
		if key, id := got.Events[i].OrderingKey, got.Events[i].ID; key != nil {
			if id <= last[*key] {
				r.Errorf("range %d has event %d of key %q behind event %d", got.Seq, id, *key, last[*key])
			}
			last[*key] = id
		}
		r.mu.Lock()
		if seq := r.seqs[got.Events[i].ID]; seq != 0 && seq != got.Seq {
			r.Errorf("event %d is in the ranges %d and %d", got.Events[i].ID, seq, got.Seq)
		}
		r.seqs[got.Events[i].ID] = got.Seq
		r.mu.Unlock()
		r.note(got.Events[i].ID, call, began, true)
	}
	return call
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

// settleRange writes the rows of a range, in time or not, now and then some of them first. One
// event in six is to be tried again, the others are delivered.
func (r *contestant) settleRange(ctx context.Context) error {
	for seq, held := range r.ranges {
		if r.random.IntN(3) > 0 { // it takes long
			return nil
		}
		ref := []intake.RangeRef{held.Ref()}
		rows, outcomes := intake.NewRows{Relay: held.relay, Ranges: ref, Ended: ref}, []policy.Outcome{}
		for i := range held.Events {
			for _, to := range []string{"a", "unasked"} {
				if !slices.Contains(held.Events[i].Settled, to) {
					status, outcome := intake.Pending, policy.Retry
					if to == "a" && held.Events[i].ID%6 > 0 {
						status, outcome = intake.Delivered, policy.Delivered
					}
					rows.Deliveries = append(rows.Deliveries, intake.NewRow{Range: held.Ref(), EventID: held.Events[i].ID, Destination: to, Status: status, Attempts: 1})
					outcomes = append(outcomes, outcome)
				}
			}
		}
		if some := r.random.IntN(2 * (len(rows.Deliveries) + 1)); some < len(rows.Deliveries) {
			rows.Ended, rows.Deliveries = nil, rows.Deliveries[:some]
		}
		began := r.since()
		done, err := intake.SettleRanges(ctx, r.Pool, rows)
		if pg.HasCode(err, pg.LockNotAvailable) { // another relay takes it over at this moment
			return nil
		}
		if err != nil {
			return err
		}
		if rows.Ended != nil || len(done.Lost) > 0 {
			delete(r.ranges, seq)
		}
		for i, d := range rows.Deliveries {
			if d.Destination == "a" {
				r.note(d.EventID, leaseCall{kind: "settle", relay: held.relay, fence: held.Fence, outcome: outcomes[i]}, began, len(done.Lost) == 0 && !slices.Contains(done.Existing, i))
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
