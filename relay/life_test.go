package relay

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// Producers, two relays, deaths, an operator and the archive take steps in any order, against a
// model of what each delivery is. After every step the tables hold what the model says, and each
// delivery is in exactly one place. Nothing is sent beside another request, before an earlier event
// of its key, or to a paused destination. In the end everything is delivered.
func TestLifeOfDeliveries(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "block", "skip") // by what a failure does to its key
	db.Exec(`UPDATE outbox_route SET pattern = 't'`)
	rapid.Check(t, func(t *rapid.T) {
		db.Exec(`TRUNCATE outbox_delivery, outbox_relay, outbox_void, outbox_attempt CASCADE; TRUNCATE outbox;
			UPDATE outbox_range SET ended_at = now() WHERE ended_at IS NULL; UPDATE outbox_destination SET paused = false, paused_at = NULL`)
		l := &life{Database: db, operator: ops.New(db.Pool), paused: map[string]time.Time{}}
		l.join(t)
		l.join(t)
		t.Cleanup(func() { l.end(false) })
		t.Repeat(map[string]func(*rapid.T){
			"": l.check, "produce": l.produce, "turn": l.turn, "turn again": l.turn, "send": l.send, "answer": l.answer, "die": l.die,
			"rescue": l.rescue, "operate": l.operate, "archive": l.archive, "wait": l.wait,
			"pause or resume": func(t *rapid.T) { l.pause(rapid.SampledFrom([]string{"block", "skip"}).Draw(t, "destination")) },
		})
		l.finish(t)
	})
}

// A life is the model, and what takes the steps.
type life struct {
	*relaytest.Database
	operator *ops.Outbox
	model    []*modelled
	open     pgx.Tx      // of a producer; nil: none
	produced []*modelled // by it
	number   int         // of all events
	members  []*member
	flights  []*flight
	paused   map[string]time.Time // since when
}

// A member is a relay whose claimer and senders act step by step.
type member struct {
	*Relay
	*claimer
	number        int32
	senders       []*lane.Lane // that are idle
	written       chan bool    // the outcome of a request is
	unwritten     int
	dead, rescued bool
}

// A flight is a run of which the first request is under way.
type flight struct {
	*member
	lane *lane.Lane
	run  []lane.Delivery
}

// join adds a relay.
func (l *life) join(t *rapid.T) {
	destinations := []post.Destination{to("http://receiver.test/"), to("http://receiver.test/")}
	destinations[0].Name, destinations[1].Name, destinations[1].OnFailure = "block", "skip", policy.SkipFailed
	for i := range destinations {
		destinations[i].Breaker.Disabled, destinations[i].Retry.MaxAttempts, destinations[i].MaxInFlight = true, 3, 4
	}
	cfg := config(l.Database, destinations...)
	cfg.Hooks.DatabaseError = func(operation string, err error) {
		if !pg.HasCode(err, pg.LockNotAvailable) {
			l.Errorf("%s: %v", operation, err)
		}
	}
	r, err := New(cfg)
	relaytest.Must(l, err)
	ctx, stop := context.WithCancel(l.Context())
	relaytest.Must(l, r.session.Open(ctx))
	r.setDatabase(r.session.Database)
	r.restFactor, r.phases.Taking, r.phases.Doing, r.phases.Settling = 1, ctx, ctx, ctx
	number, err := session.Register(ctx, r.store.pool, false, "member", "", time.Minute)
	relaytest.Must(l, err)
	r.presence.Set(number, true)
	m := &member{Relay: r, claimer: r.newClaimer(), number: number, written: make(chan bool, 1000)}
	start := func(of *lane.Lane) { m.senders = append(m.senders, of) }
	m.taker.Start, m.rows.Start = start, start
	r.settler.Written = func(list []settle.Settlement) {
		r.applyWritten(list)
		for i := range list {
			if list[i].Posted {
				m.written <- true
			}
		}
	}
	var running sync.WaitGroup
	running.Go(func() { r.settler.Run(ctx) })
	running.Go(func() { r.waiting.Run(ctx) })
	t.Cleanup(func() {
		r.settler.Close()
		stop()
		running.Wait()
		r.session.Database.Close()
	})
	l.members = append(l.members, m)
}

// await waits until the outcomes of all requests are written.
func (m *member) await() {
	for ; m.unwritten > 0; m.unwritten-- {
		<-m.written
	}
}

func (l *life) living() (list []*member) {
	return slices.DeleteFunc(slices.Clone(l.members), func(m *member) bool { return m.dead })
}

// member draws one that lives.
func (l *life) member(t *rapid.T) *member {
	list := l.living()
	return list[rapid.IntRange(0, len(list)-1).Draw(t, "relay")]
}

func (l *life) now() time.Time {
	return relaytest.Row[time.Time](l.Database, `SELECT clock_timestamp()`)
}

// produce inserts events in a transaction, which commits, rolls back or stays open.
func (l *life) produce(t *rapid.T) {
	if l.open == nil {
		tx, err := l.Pool.Begin(l.Context())
		relaytest.Must(l, err)
		l.open = tx
	}
	for range rapid.IntRange(1, 3).Draw(t, "events") {
		d := modelled{key: rapid.SampledFrom([]string{"", "a", "a", "b", "c"}).Draw(t, "key"), status: "pending"}
		kind := rapid.SampledFrom([]string{"t", "t", "t", "unrouted"}).Draw(t, "type")
		delay := rapid.SampledFrom([]float64{0, 0, 0, 0.12, 0.2}).Draw(t, "delay")
		l.number++
		relaytest.Must(l, l.open.QueryRow(l.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
			VALUES ($1, '{}', $2, nullif($3, ''), CASE WHEN $4 > 0 THEN clock_timestamp() + make_interval(secs => $4) ELSE now() END) RETURNING id, available_at`,
			kind, fmt.Sprint(l.number), d.key, delay).Scan(&d.event, &d.from))
		for _, d.destination = range map[string][]string{"t": {"block", "skip"}, "unrouted": {""}}[kind] {
			l.produced = append(l.produced, new(d))
		}
	}
	if end := rapid.SampledFrom([]string{"commit", "commit", "roll back", "leave open"}).Draw(t, "end"); end != "leave open" {
		l.end(end == "commit")
	}
}

func (l *life) end(commit bool) {
	if tx := l.open; tx != nil && commit {
		relaytest.Must(l, tx.Commit(l.Context()))
		now := l.now()
		for _, d := range l.produced {
			if d.to = d.from; d.to.Before(now) {
				d.to = now
			}
		}
		l.model = append(l.model, l.produced...)
	} else if tx != nil {
		relaytest.Must(l, tx.Rollback(context.WithoutCancel(l.Context())))
	}
	l.open, l.produced = nil, nil
}

// turn lets one relay's claimer do what is due.
func (l *life) turn(t *rapid.T) {
	m := l.member(t)
	m.act(t, rapid.SampledFrom([]agenda.Cause{0, agenda.CausePoll, agenda.CauseTick, agenda.CauseSweep}).Draw(t, "cause"))
}

func (m *member) act(t *rapid.T, cause agenda.Cause) {
	if cause == agenda.CauseSweep {
		m.Relay.waiting.Sweep()
		m.Relay.mailbox.post(cause)
	}
	m.readMailbox(time.Now())
	m.agenda.At(cause, time.Now())
	if _, err := m.claimer.turn(t.Context()); err != nil && !pg.HasCode(err, pg.LockNotAvailable) {
		t.Fatalf("turn: %v", err)
	}
}

// send lets senders begin runs.
func (l *life) send(t *rapid.T) {
	m := l.member(t)
	for n := min(len(m.senders), rapid.IntRange(1, 4).Draw(t, "senders")); n > 0; n-- {
		l.sendFrom(t, m)
	}
}

func (l *life) sendFrom(t *rapid.T, m *member) {
	from := m.senders[0]
	m.senders = m.senders[1:]
	switch run, wait := from.NextRun(time.Now()); {
	case run != nil:
		l.begin(t, &flight{m, from, run})
	case wait > 0:
		m.senders = append(m.senders, from)
	}
}

// begin makes the first request of a run, if it may be made.
func (l *life) begin(t *rapid.T, f *flight) {
	sent := &f.run[0]
	d := l.find(t, sent.EventID, sent.Destination)
	at := time.UnixMicro(sent.Fence) // when it was claimed, or taken
	if d.status != "pending" || d.attempts != sent.Attempts || d.isInHand() || sent.Fence < d.fence {
		t.Fatalf("%s is sent under fence %d as attempt %d, and is %+v", d, sent.Fence, sent.Attempts+1, *d)
	}
	if paused := l.paused[d.destination]; !paused.IsZero() && at.After(paused) {
		t.Fatalf("%s is sent, and its destination is paused", d)
	}
	for _, earlier := range l.model {
		if earlier.blocks(d, at) {
			t.Fatalf("%s is sent, and the earlier %s of its key is %s", d, earlier, earlier.status)
		}
	}
	d.fence, d.sender = sent.Fence, f.member
	l.flights = append(l.flights, f)
}

// answer ends requests, also of a dead relay.
func (l *life) answer(t *rapid.T) {
	for n := min(len(l.flights), rapid.IntRange(1, 3).Draw(t, "requests")); n > 0; n-- {
		l.answerTo(t, rapid.IntRange(0, len(l.flights)-1).Draw(t, "request"), rapid.SampledFrom([]int{204, 204, 500, 422}).Draw(t, "status"))
	}
}

// answerTo does what a sender does with an answer.
func (l *life) answerTo(t *rapid.T, request, status int) {
	f := l.flights[request]
	l.flights = slices.Delete(l.flights, request, request+1)
	sent, to := &f.run[0], f.lane.Current().Destination
	key := sent.Event.OrderingKey
	result := policy.Result{StatusCode: status, Posted: true, Reason: map[int]policy.Reason{204: policy.ReasonOK, 500: policy.ReasonServerError, 422: policy.ReasonRejected}[status]}
	decided := policy.Decide(result, policy.Circumstances{
		Attempt: sent.Attempts + 1, Retry: to.Retry, Responses: to.Responses, OnFailure: to.OnFailure, Ordered: key != nil, LastOfRun: sent.LastOfRun,
	})
	behind := f.run[1:]
	if decided.Blocks && key != nil && !f.dead {
		behind = slices.Concat(behind, f.lane.StopKey(*key))
	}
	f.unwritten++
	f.settler.Settle(sent.Settlement(decided, time.Now(), 0))
	l.settled(t, f, decided.Outcome)
	switch {
	case f.dead:
		return
	case decided.Blocks:
		f.lane.StepRun(sent.Class, len(f.run)-1)
		for _, d := range behind {
			f.settler.Settle(d.GivenBack(policy.ReasonOrder))
		}
		f.run = nil
	case len(behind) > 0:
		f.lane.StepRun(behind[0].Class, 1)
		f.run = behind
	case key != nil:
		f.run = f.lane.NextOfKey(*key)
	default:
		f.run = nil
	}
	if len(f.run) > 0 {
		l.begin(t, f)
	} else {
		f.senders = append(f.senders, f.lane)
	}
}

// settled changes the model as an outcome changes the delivery. That of a dead relay may come too
// late.
func (l *life) settled(t *rapid.T, f *flight, outcome policy.Outcome) {
	sent := &f.run[0]
	status := map[policy.Outcome]string{policy.Delivered: "delivered", policy.Retry: "pending", policy.Fail: "failed"}[outcome]
	if f.dead {
		f.await()
		if !relaytest.Row[bool](l.Database, `SELECT EXISTS (SELECT FROM outbox_delivery WHERE event_id = $1 AND destination = $2 AND status = $3 AND attempts = $4 AND claim = $5)`,
			sent.EventID, sent.Destination, status, sent.Attempts+1, sent.Fence) {
			return
		}
	}
	d := l.find(t, sent.EventID, sent.Destination)
	if d.status != "pending" || d.attempts != sent.Attempts || d.fence != sent.Fence {
		t.Fatalf("an outcome under fence %d after %d attempts was written of %s: %+v", sent.Fence, sent.Attempts, d, *d)
	}
	d.status, d.attempts, d.sender = status, d.attempts+1, nil
}

// die ends a relay's work. Its requests stay under way. Another relay comes.
func (l *life) die(t *rapid.T) {
	if len(l.members) == 6 {
		t.Skip("many have died")
	}
	m := l.member(t)
	m.dead = true
	l.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 hour' WHERE id = $1`, m.number)
	l.join(t)
}

// rescue ends the claims of the dead.
func (l *life) rescue(t *rapid.T) {
	for _, m := range l.members {
		if !m.dead || m.rescued {
			continue
		}
		if gone, _, err := session.Rescue(l.Context(), l.Pool, m.number); err != nil || !gone {
			t.Fatalf("rescue: %t, %v", gone, err)
		}
		m.rescued = true
		for _, other := range l.living() {
			other.Relay.mailbox.post(agenda.CauseRescue)
		}
	}
}

// operate lets an operator act on one delivery.
func (l *life) operate(t *rapid.T) {
	if len(l.model) == 0 {
		t.Skip("nothing is there")
	}
	d := l.model[rapid.IntRange(0, len(l.model)-1).Draw(t, "delivery")]
	of := ops.Selection{EventIDs: batch.IDs{d.event}, Destination: d.destination, Parked: d.destination == ""}
	var done ops.Bulk
	var err error
	before := *d
	switch rapid.SampledFrom([]string{"retry", "replay", "discard"}).Draw(t, "operation") {
	case "retry":
		_, err = l.operator.Retry(l.Context(), of, nil)
	case "replay":
		of.Statuses, of.Rate = []string{"failed", "delivered", "discarded"}, new(int64(0))
		if done, err = l.operator.Replay(l.Context(), of, 0, nil); done.Done == 1 {
			d.status, d.attempts = "pending", 0
			if before.isSettled() || d.destination == "skip" {
				d.since = l.now()
			}
		}
	case "discard":
		if done, err = l.operator.Discard(l.Context(), of, nil); done.Done == 1 {
			d.status = "discarded"
		}
	}
	if err != nil || done.Done == 1 && (d.status == before.status || before.isInHand()) {
		t.Fatalf("%s has become %s: %+v, %v", d, d.status, before, err)
	}
}

// pause pauses a destination, or resumes it.
func (l *life) pause(destination string) {
	var err error
	if l.paused[destination].IsZero() {
		_, err = l.operator.Pause(l.Context(), destination, "test")
		l.paused[destination] = l.now()
	} else {
		_, err = l.operator.Resume(l.Context(), destination, false)
		delete(l.paused, destination)
	}
	relaytest.Must(l, err)
}

// archive archives what is done with. To this end it becomes old.
func (l *life) archive(t *rapid.T) {
	l.Exec(`BEGIN; SET LOCAL session_replication_role = replica; CREATE TEMP TABLE done ON COMMIT DROP AS SELECT event_id FROM outbox_delivery
			GROUP BY event_id HAVING bool_and(status IN ('delivered', 'discarded') AND next_attempt_at > now() - interval '1 day');
		UPDATE outbox SET created_at = created_at - interval '40 days', available_at = available_at - interval '40 days' WHERE id IN (SELECT * FROM done);
		UPDATE outbox_delivery SET delivered_at = delivered_at - interval '40 days', last_attempt_at = last_attempt_at - interval '40 days', next_attempt_at = next_attempt_at - interval '40 days'
			WHERE event_id IN (SELECT * FROM done); COMMIT`)
	_, err := archive.Job{DB: l.Pool, Keep: archive.Retention{ArchiveAfter: 30 * days}}.Run(l.Context())
	relaytest.Must(l, err)
	archived := relaytest.Rows[int64](l.Database, `SELECT id FROM outbox_archive`)
	l.model = slices.DeleteFunc(l.model, func(d *modelled) bool {
		gone := slices.Contains(archived, d.event)
		if gone && !d.isSettled() {
			t.Fatalf("%s is %s, and archived", d, d.status)
		}
		return gone
	})
}

// wait waits until another event is due.
func (l *life) wait(t *rapid.T) {
	now := l.now()
	for _, d := range l.model {
		if d.from.After(now) {
			relaytest.Eventually(l, "the time of an event", func() bool { return l.now().After(d.from) })
			return
		}
	}
	t.Skip("all is due")
}

// finish delivers everything.
func (l *life) finish(t *rapid.T) {
	l.end(true)
	for destination := range l.paused {
		l.pause(destination)
	}
	l.rescue(t)
	relaytest.Eventually(l, "all deliveries", func() bool {
		for _, m := range l.living() {
			m.act(t, agenda.CauseSweep)
			m.act(t, agenda.CauseTick)
			for len(m.senders) > 0 {
				l.sendFrom(t, m)
			}
		}
		for len(l.flights) > 0 {
			l.answerTo(t, 0, 204)
		}
		l.check(t)
		done := true
		for _, d := range l.model {
			if d.status == "failed" {
				discarded, err := l.operator.Discard(l.Context(), ops.Selection{EventIDs: batch.IDs{d.event}, Destination: d.destination}, nil)
				relaytest.Must(l, err)
				d.status = map[int64]string{0: "failed", 1: "discarded"}[discarded.Done]
			}
			done = done && (d.isSettled() || d.destination == "")
		}
		return done
	})
}
