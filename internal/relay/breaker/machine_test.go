package breaker_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// The lanes of two relays to one destination, their keepers, deaths and an operator take steps in
// any order. One relay at a time tries the destination, with no more in flight than the trial
// allows. A relay that knows of an open breaker sends nothing. From wherever they are, the breakers
// close once the receiver answers.
func TestBreakersOfTwoRelays(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rapid.Check(t, func(t *rapid.T) {
		db.Exec(`TRUNCATE outbox_relay CASCADE; TRUNCATE outbox_destination, outbox_void`)
		m := &machine{Database: db, width: rapid.IntRange(1, 4).Draw(t, "most in flight")}
		m.lanes = []*laneSide{m.newSide(), m.newSide()}
		m.row = m.read()
		for range 4 { // a step takes a millisecond or two
			t.Repeat(map[string]func(*rapid.T){
				"turn": m.on((*laneSide).turn), "turn again": m.on((*laneSide).turn), "turn of a lane with nothing due": m.on((*laneSide).endTrial),
				"send": m.on((*laneSide).send), "answer": m.on((*laneSide).answer), "attempt": m.on((*laneSide).attempt), "attempt again": m.on((*laneSide).attempt),
				"database time": m.wait, "accident": m.accident,
			})
		}
		for range 20 {
			for _, s := range m.lanes {
				if m.row.State == "open" {
					m.wait(t)
				}
				for _, step := range []func(*laneSide, *rapid.T){(*laneSide).wait, (*laneSide).beat, (*laneSide).tend, (*laneSide).claim} {
					step(s, t)
					m.follow(t, s.relayID, "")
				}
				for s.senders > 0 {
					s.send(t)
				}
				for len(s.sent) > 0 {
					s.answerAs(len(s.sent)-1, policy.ReasonOK)
				}
			}
			if m.row.State == "closed" && !slices.ContainsFunc(m.lanes, func(s *laneSide) bool { return !s.breaker().IsQuiet() }) {
				return
			}
		}
		t.Fatalf("the breakers never close: the database has %+v, the relays %+v and %+v", m.row, m.lanes[0].breaker(), m.lanes[1].breaker())
	})
}

// A machine has the destination as the last step has left it.
type machine struct {
	*relaytest.Database
	lanes   []*laneSide
	row     row
	elapsed bool // the time until the next trial, or of this one, by the database
	width   int
	events  int64
}

type row struct {
	State string
	Owner int32
}

// A laneSide is one relay's lane.
type laneSide struct {
	*machine
	*lane.Lane
	all     *lane.Lanes
	keeper  breaker.Keeper
	relayID int32
	senders int
	sent    []lane.Delivery
	trial   time.Time // when it began
}

func (m *machine) newSide() *laneSide {
	all := lane.New(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	d := post.Destination{Name: "default", URL: "http://receiver.test/", MaxInFlight: m.width, Breaker: policy.BreakerPolicy{Failures: 1}}
	relaytest.Must(m, all.Set(time.Now(), []post.Destination{d.WithDefaults(post.Egress{})}, nil))
	relayID, err := session.Register(m.Context(), m.Pool, false, "relay", "", time.Minute)
	relaytest.Must(m, err)
	s := &laneSide{machine: m, Lane: all.Get("default"), all: all, relayID: relayID}
	s.SetShare(capacity.Divide(m.width, []capacity.Sharer{{Active: true}}), true)
	s.keeper = breaker.Keeper{DB: m.Pool, Log: zerolog.Nop(), Poll: time.Second, Due: func() {}}
	return s
}

func (m *machine) read() row {
	list, err := rows.Structs[row](m.Context(), m.Pool, "read", `SELECT breaker, coalesce(breaker_relay_id, 0) FROM outbox_destination WHERE destination = 'default'`)
	relaytest.Must(m, err)
	return append(list, row{State: "closed"})[0]
}

// on makes a step of one for either relay.
func (m *machine) on(step func(*laneSide, *rapid.T)) func(*rapid.T) {
	return func(t *rapid.T) {
		s := m.lanes[rapid.IntRange(0, 1).Draw(t, "relay")]
		step(s, t)
		m.follow(t, s.relayID, "")
	}
}

// follow compares the destination before and after a step, of a relay or of something else.
func (m *machine) follow(t *rapid.T, relay int32, other string) {
	before, after := m.row, m.read()
	m.row = after
	if after == before {
		return
	}
	allowed := false
	switch change := before.State + " " + after.State; change {
	case "closed open":
		allowed = relay != 0
	case "open half_open", "half_open half_open":
		allowed = after.Owner == relay && (m.elapsed || before.Owner == relay)
	case "half_open open":
		allowed = before.Owner == relay || other == "rescue"
	case "half_open closed":
		allowed = before.Owner == relay || other == "reset"
	case "open closed":
		allowed = other == "reset"
	}
	if !allowed || after.State != "half_open" && after.Owner != 0 {
		t.Fatalf("%+v has become %+v by relay %d %s, time elapsed: %t", before, after, relay, other, m.elapsed)
	}
	m.elapsed = false
}

func (s *laneSide) breaker() *policy.Breaker {
	b := s.View(time.Now()).Breaker
	return &b
}

// claim brings what the lane has room for, unless the database keeps the destination from it.
func (s *laneSide) claim(*rapid.T) {
	now := time.Now()
	free, _ := s.Room(now, time.Minute)
	n := min(free[lane.Live], 3)
	if s.row.State != "closed" && s.row.Owner != s.relayID || n <= 0 {
		return
	}
	runs := make([][]lane.Delivery, n)
	for i := range runs {
		s.events++
		runs[i] = []lane.Delivery{{EventID: s.events, Destination: s.Name, LeaseEnds: now.Add(time.Hour)}}
	}
	s.senders += s.Push(now, lane.Live, runs)
}

// endTrial is what a claim does that finds nothing due.
func (s *laneSide) endTrial(*rapid.T) { s.EndTrial(time.Now()) }

func (s *laneSide) send(t *rapid.T) {
	if s.senders == 0 {
		return
	}
	run, _ := s.NextRun(time.Now())
	switch {
	case run == nil:
		s.senders--
		return
	case s.StopReason(time.Now()) != "":
		s.Release(lane.Live, 1)
		return
	}
	run[0].LeaseEnds = time.Now() // when it was sent
	s.sent = append(s.sent, run[0])
	s.senders--
	b := s.breaker()
	if trying, most := b.Trying(); trying {
		in := 0
		for i := range s.sent {
			if s.sent[i].LeaseEnds.After(s.trial) {
				in++
			}
		}
		if in > most {
			t.Fatalf("%d requests of a trial that allows %d", in, most)
		}
	}
	if b.State == policy.BreakerOpen {
		t.Fatal("it sends, and its breaker is open")
	}
}

func (s *laneSide) answer(t *rapid.T) {
	if len(s.sent) > 0 {
		s.answerAs(rapid.IntRange(0, len(s.sent)-1).Draw(t, "request"), rapid.SampledFrom([]policy.Reason{policy.ReasonOK, policy.ReasonServerError, policy.ReasonConnect}).Draw(t, "answer"))
	}
}

func (s *laneSide) answerAs(request int, reason policy.Reason) {
	d := s.sent[request]
	s.sent = slices.Delete(s.sent, request, request+1)
	s.RecordResult(time.Now(), d.EventID, &policy.Result{Reason: reason, Posted: true, Message: "why"}, 0, 0)
	s.Release(lane.Live, 1)
	s.senders++
}

// turn is one of the claimer, perhaps after a beat, or after the time that the lane waits for.
func (s *laneSide) turn(t *rapid.T) {
	switch rapid.SampledFrom([]string{"nothing", "beat", "time"}).Draw(t, "before") {
	case "beat":
		s.beat(t)
	case "time":
		s.wait(t)
	}
	s.tend(t)
	s.claim(t)
}

func (s *laneSide) tend(t *rapid.T) {
	before := s.breaker()
	if _, _, err := s.keeper.Tend(s.Context(), s, time.Now(), s.relayID); err != nil {
		t.Fatal(err)
	}
	after, row := s.breaker(), s.read()
	if before.Write == policy.WriteOpen && after.Write == policy.WriteNothing && after.Alone != (row.State == "closed") {
		t.Fatalf("relay %d holds alone: %t, and the database has %+v", s.relayID, after.Alone, row)
	}
	if after.State == policy.BreakerHalfOpen && before.State != policy.BreakerHalfOpen {
		s.trial = time.Now()
		if !after.Alone && (row.State != "half_open" || row.Owner != s.relayID) {
			t.Fatalf("relay %d tries, and the database has %+v", s.relayID, row)
		}
	}
}

// beat tells the lane what the database has.
func (s *laneSide) beat(t *rapid.T) {
	began := time.Now()
	states, err := rows.Structs[policy.DestinationState](s.Context(), s.Pool, "read", `SELECT destination, breaker, coalesce((extract(epoch FROM breaker_until - now()) * 1e9)::bigint, 0),
		coalesce(breaker_relay_id, 0), breaker_failures FROM outbox_destination WHERE breaker <> 'closed' OR breaker_failures > 0`)
	relaytest.Must(s.machine, err)
	s.all.ApplyStates(began, began, states, s.relayID)
	if b := s.breaker(); b.Write == policy.WriteNothing && s.row.State != "closed" && s.row.Owner != s.relayID && !b.Holding() {
		t.Fatalf("relay %d knows %+v, and its breaker is %s", s.relayID, s.row, b.State)
	}
}

// attempt claims, sends and answers.
func (s *laneSide) attempt(t *rapid.T) {
	s.claim(t)
	s.send(t)
	s.answer(t)
}

// wait lets the times come that a lane waits for.
func (s *laneSide) wait(*rapid.T) {
	past := time.Now().Add(-2 * time.Second)
	s.Change(func(b *policy.Breaker) { b.TryAt, b.WriteAt, b.Until, b.Answered = past, past, past, past })
}

// wait lets the times come that the database has.
func (m *machine) wait(*rapid.T) {
	m.Exec(`UPDATE outbox_destination SET breaker_until = now() WHERE breaker <> 'closed'`)
	m.elapsed = true
}

func (m *machine) accident(t *rapid.T) {
	if rapid.Bool().Draw(t, "death") {
		m.die(t)
	} else {
		m.reset(t)
	}
}

// die ends a relay. Another one takes its place.
func (m *machine) die(t *rapid.T) {
	i := rapid.IntRange(0, 1).Draw(t, "relay")
	m.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 hour' WHERE id = $1`, m.lanes[i].relayID)
	if dead, _, err := session.Rescue(m.Context(), m.Pool, m.lanes[i].relayID); err != nil || !dead {
		t.Fatalf("rescue: %t, %v", dead, err)
	}
	m.follow(t, 0, "rescue")
	m.elapsed = true
	m.lanes[i] = m.newSide()
}

// reset is an operator's.
func (m *machine) reset(t *rapid.T) {
	if m.row.State == "closed" {
		t.Skip("it is closed")
	}
	if _, err := ops.New(m.Pool).ResetBreaker(m.Context(), "default"); err != nil {
		t.Fatal(fmt.Errorf("reset: %w", err))
	}
	m.follow(t, 0, "reset")
}
