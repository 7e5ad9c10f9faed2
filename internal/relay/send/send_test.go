package send

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// newSenders returns senders that send to the destination through a lane, without a database, and
// what they settle.
func newSenders(t testing.TB, d post.Destination) (*Senders, *lane.Lane, chan settle.Settlement) {
	t.Helper()
	all := lane.New(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	relaytest.Must(t, all.Set(time.Now(), []post.Destination{d.WithDefaults(post.Egress{})}, nil))
	settled := make(chan settle.Settlement, 1000)
	return &Senders{
		Phases: &Phases{Taking: t.Context(), Doing: t.Context(), Settling: t.Context()}, Lanes: all, LogDelivered: func() bool { return false },
		Settle: func(s settle.Settlement) { settled <- s }, Post: func(agenda.Cause) {}, Retry: func(time.Time, time.Duration) {}, Failed: func(string, error) {}, Alive: func() bool { return true },
	}, all.Get(d.Name), settled
}

// newDelivery returns a delivery with an hour of its lease left.
func newDelivery(id int64) lane.Delivery {
	kind, version, key := "t", 1, strconv.FormatInt(id, 10)
	until := time.Now().Add(time.Hour)
	return lane.Delivery{
		EventID: id, Destination: "default", Fence: 9, LeaseEnds: until, PromiseEnds: until,
		Event: post.Event{EventType: &kind, Version: &version, Key: &key, CreatedAt: pgtype.Timestamptz{Time: time.Now(), Valid: true}, Payload: []byte(`{"a":1}`)},
	}
}

// A queue that outlasts its leases is given back unsent: sending it could overlap with the relay
// that claims it next.
func TestDeliveriesWithTooLittleLeaseAreNotSent(t *testing.T) {
	t.Parallel()
	d := post.Destination{Name: "default", URL: "http://127.0.0.1:1/", Timeout: 10 * time.Second}
	s, l, _ := newSenders(t, d)
	late := newDelivery(1)
	late.LeaseEnds = time.Now().Add(d.Timeout + lane.SendMargin - time.Millisecond)
	if v := s.attempt(l, &late); v.Reason != policy.ReasonLease || v.Posted {
		t.Errorf("%+v", v)
	}
}

// Of a run only what is being sent is kept in memory, and what follows one that was not delivered
// is given back.
func TestSentPayloadsOfARunAreReleased(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Key == "3" {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	s, l, settled := newSenders(t, post.Destination{Name: "default", URL: rc.URL})
	ordering := "k"
	var run []lane.Delivery
	for i := range 4 {
		d := newDelivery(int64(i + 1))
		d.Event.OrderingKey = &ordering
		run = append(run, d)
	}
	s.sendRun(l, run, false)
	for i, want := range []policy.Outcome{policy.Delivered, policy.Delivered, policy.Retry, policy.Hold} {
		if got := <-settled; got.Outcome != want {
			t.Errorf("event %d: %s, want %s: %s", i+1, got.Outcome, want, got.Message)
		}
	}
	for i := range run[:3] {
		if run[i].Event.Payload != nil {
			t.Errorf("the payload of event %d is still there", i+1)
		}
	}
}

// A defect that one delivery trips is an attempt of that delivery and nothing to the others.
func TestPanicOfOneDelivery(t *testing.T) {
	t.Parallel()
	s, l, _ := newSenders(t, post.Destination{Name: "default", URL: "http://127.0.0.1:1/"})
	broken := newDelivery(1)
	broken.Event.Payload = nil // and there is no database to load it from
	if v := s.attempt(l, &broken); v.Reason != policy.ReasonPanic || !strings.Contains(v.Message, "nil pointer") {
		t.Errorf("%+v", v)
	}
}

// A lane whose limit grows while much is queued gets the senders it may have, though nothing more
// is to be claimed.
func TestQueueGetsSendersWhenTheLimitGrows(t *testing.T) {
	t.Parallel()
	const most, waiting = 8, 60
	arrived, answer := make(chan struct{}, waiting), make(chan struct{}, waiting)
	rc := relaytest.NewReceiver(t, func(http.ResponseWriter, relaytest.Request) {
		arrived <- struct{}{}
		select {
		case <-answer:
		case <-t.Context().Done():
		}
	})
	s, l, settled := newSenders(t, post.Destination{Name: "default", URL: rc.URL, MaxInFlight: most, Timeout: 2 * relaytest.Patience})
	share := func(n int) { l.SetShare(capacity.Divide(n, []capacity.Sharer{{Active: true}}), true) }
	share(1)
	var runs [][]lane.Delivery
	for i := range waiting {
		runs = append(runs, []lane.Delivery{newDelivery(int64(i + 1))})
	}
	for range l.Push(time.Now(), lane.Live, runs) {
		s.Start(l)
	}
	<-arrived
	share(most) // other lanes have less to send
	answer <- struct{}{}
	for range most {
		select {
		case <-arrived:
		case <-time.After(relaytest.Patience):
			t.Fatal("never came: as many requests at once as there may be")
		}
	}
	close(answer)
	s.Wait()
	if len(settled) != waiting {
		t.Errorf("%d of %d were settled", len(settled), waiting)
	}
}

// A delivery that cannot be sent now is not sent, and says why.
func TestReasonsNotToSend(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, nil)
	for reason, change := range map[policy.Reason]func(s *Senders, l *lane.Lane, d *lane.Delivery){
		policy.ReasonShutdown: func(s *Senders, _ *lane.Lane, _ *lane.Delivery) {
			taking, stop := context.WithCancel(t.Context())
			stop()
			s.Phases.Taking = taking
		},
		policy.ReasonPaused: func(_ *Senders, l *lane.Lane, _ *lane.Delivery) { l.Pause() },
		policy.ReasonBreaker: func(_ *Senders, l *lane.Lane, _ *lane.Delivery) {
			l.Change(func(b *policy.Breaker) { b.Enter(time.Now(), policy.BreakerOpen) })
		},
		policy.ReasonNotAfter:     func(_ *Senders, _ *lane.Lane, d *lane.Delivery) { d.PromiseEnds = time.Now() },
		policy.ReasonEventMissing: func(_ *Senders, _ *lane.Lane, d *lane.Delivery) { d.Event.Key = nil },
		policy.ReasonCrashLoop:    func(_ *Senders, _ *lane.Lane, d *lane.Delivery) { d.Rescues = capacity.CrashLoop },
	} {
		s, l, _ := newSenders(t, post.Destination{Name: "default", URL: rc.URL})
		d := newDelivery(1)
		change(s, l, &d)
		if v := s.attempt(l, &d); v.Reason != reason || v.Posted {
			t.Errorf("%s: %+v", reason, v)
		}
	}
	if n := rc.Total(); n > 0 {
		t.Errorf("%d requests", n)
	}
}

// What is queued at a stop is given back at once, while what is being sent may end.
func TestStopGivesBackWhatIsQueued(t *testing.T) {
	t.Parallel()
	g := relaytest.NewGate(t)
	rc := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { g.Pass(r) })
	s, l, settled := newSenders(t, post.Destination{Name: "default", URL: rc.URL, MaxInFlight: 1})
	s.Lanes.Engage(l)
	var attempts []Attempt
	s.Attempted = func(a Attempt) { attempts = append(attempts, a) }
	for range l.Push(time.Now(), lane.Backlog, [][]lane.Delivery{{newDelivery(1)}, {newDelivery(2)}, {newDelivery(3)}}) {
		s.Start(l)
	}
	<-g.Arrived
	s.GiveBackUnsent(policy.ReasonShutdown)
	for range 2 {
		if got := <-settled; got.Outcome != policy.Hold || got.Reason != policy.ReasonShutdown || got.EventID == 1 {
			t.Errorf("event %d: %s, %s", got.EventID, got.Outcome, got.Reason)
		}
	}
	g.Open()
	s.Wait()
	if got := <-settled; got.EventID != 1 || got.Outcome != policy.Delivered {
		t.Errorf("event %d: %s", got.EventID, got.Outcome)
	}
	if len(attempts) != 1 || attempts[0].Number != 1 || attempts[0].StatusCode != 200 || attempts[0].Class != "live" {
		t.Errorf("attempts: %+v", attempts)
	}
}

// A payload that a claim did not bring is loaded when its turn comes. A suspect is sent alone, and
// counted before.
func TestSendsWithTheDatabase(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "key")
	db.Exec(`UPDATE outbox_delivery SET claim = 9, claimed_by = 1, lease_expires_at = now() + interval '1 hour', rescues = $1 WHERE event_id = 2`, capacity.AloneFrom)
	rc := relaytest.NewReceiver(t, nil)
	s, l, _ := newSenders(t, post.Destination{Name: "default", URL: rc.URL})
	s.DB = db.Pool
	large := newDelivery(1)
	large.Event.Payload = nil
	if v := s.attempt(l, &large); v.Reason != policy.ReasonOK {
		t.Errorf("%+v", v)
	}
	suspect := newDelivery(2)
	suspect.Rescues = capacity.AloneFrom
	if v := s.attempt(l, &suspect); v.Reason != policy.ReasonOK || !suspect.Alone {
		t.Errorf("%+v, alone %t", v, suspect.Alone)
	}
	testkit.Equal(t, "the number of a death that would be known", relaytest.Row[int](db, `SELECT rescues FROM outbox_delivery WHERE event_id = 2`), capacity.AloneFrom+1)
	lost := newDelivery(2)
	lost.Lost, lost.Rescues = true, capacity.SuspectFrom
	if v := s.attempt(l, &lost); v.Reason != policy.ReasonSuspect || relaytest.Row[bool](db, `SELECT claimed_by IS NOT NULL OR next_attempt_at < now() FROM outbox_delivery WHERE event_id = 2`) {
		t.Errorf("a suspect that was lost is not put off: %+v", v)
	}
	gone := newDelivery(3)
	gone.Event.Payload = nil
	if v := s.attempt(l, &gone); v.Reason != policy.ReasonEventMissing {
		t.Errorf("%+v", v)
	}
}

// slowPool is a database during whose statements time passes.
type slowPool struct {
	pg.Pool
	pass func()
}

func (p slowPool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	defer p.pass()
	return p.Pool.Query(ctx, sql, args...)
}

func (p slowPool) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	defer p.pass()
	return p.Pool.Exec(ctx, sql, args...)
}

// What ends while the database is asked for a payload, or counts a suspect, is not sent any more:
// the lease, or what the receiver was promised.
func TestTimeThatTheDatabaseTakesIsCounted(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "key")
	db.Exec(`UPDATE outbox_delivery SET claim = 9, rescues = $1`, capacity.AloneFrom)
	rc := relaytest.NewReceiver(t, nil)
	for name, change := range map[string]func(d *lane.Delivery){
		"payload": func(d *lane.Delivery) { d.Event.Payload = nil },
		"suspect": func(d *lane.Delivery) { d.Rescues = capacity.AloneFrom },
	} {
		for reason, end := range map[policy.Reason]func(d *lane.Delivery){
			policy.ReasonLease:    func(d *lane.Delivery) { d.LeaseEnds = time.Now() },
			policy.ReasonNotAfter: func(d *lane.Delivery) { d.PromiseEnds = time.Now() },
		} {
			s, l, _ := newSenders(t, post.Destination{Name: "default", URL: rc.URL})
			d := newDelivery(1)
			change(&d)
			s.DB = slowPool{db.Pool, func() { end(&d) }}
			if v := s.attempt(l, &d); v.Reason != reason || v.Posted {
				t.Errorf("%s, %s: %+v", name, reason, v)
			}
		}
	}
	if n := rc.Total(); n > 0 {
		t.Errorf("%d requests", n)
	}
	testkit.Equal(t, "requests counted", relaytest.Row[int](db, `SELECT rescues FROM outbox_delivery`), capacity.AloneFrom)
}

// The history has the latency of what was sent once it was due, and none of a replay.
func TestHistoryHasNoLatencyOfReplays(t *testing.T) {
	t.Parallel()
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer receiver.Close()
	for _, replay := range []bool{false, true} {
		s, l, settled := newSenders(t, post.Destination{Name: "default", URL: receiver.URL})
		s.History = history.New()
		d := newDelivery(1)
		d.Replay = replay
		s.sendRun(l, []lane.Delivery{d}, false)
		sum := s.History.Unwritten()[history.Key{}].Sum()
		if outcome := (<-settled).Outcome; outcome != policy.Delivered || sum.Delivered != 1 || sum.Response.P50 == nil || sum.Latency.P50 != nil == replay {
			t.Errorf("replay %t: %s, %+v", replay, outcome, sum)
		}
	}
}

// The history counts as the outcome says: a request that opened the breaker and a probe are both
// held, since neither spent an attempt.
func TestHistoryCountsHeldRequests(t *testing.T) {
	t.Parallel()
	for name, half := range map[string]bool{"closed": false, "half open": true} {
		s, l, settled := newSenders(t, post.Destination{Name: "default", URL: "http://127.0.0.1:1/"})
		s.History = history.New()
		if half {
			l.Change(func(b *policy.Breaker) { b.Try(time.Now(), time.Minute) })
		}
		s.sendRun(l, []lane.Delivery{newDelivery(1)}, false)
		var probes, attempts int64
		for _, counts := range s.History.Unwritten() {
			probes, attempts = probes+counts.Probes, attempts+counts.Attempts()
		}
		if outcome := (<-settled).Outcome; outcome != policy.Hold || attempts == 0 || probes == 0 {
			t.Errorf("%s: %s, %d probes of %d attempts", name, outcome, probes, attempts)
		}
	}
}
