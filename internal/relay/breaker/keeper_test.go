package breaker

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A side is one relay's lane of the destination "default", and the keeper of that relay.
type side struct {
	*relaytest.Database
	keeper  Keeper
	relayID int32
	view    View
	now     time.Time
	walks   []bool // the argument of each call of Walk
	due     int    // how often alerts were due
}

func newSide(db *relaytest.Database, relayID int32) *side {
	s := &side{Database: db, relayID: relayID, now: time.Now()}
	s.view = View{Destination: "default", Hold: time.Minute, Breaker: policy.Breaker{Policy: policy.BreakerPolicy{}.WithDefaults()}}
	s.keeper = Keeper{DB: db.Pool, Log: zerolog.Nop(), Poll: time.Second, Due: func() { s.due++ }}
	return s
}

func (s *side) View(time.Time) View                 { return s.view }
func (s *side) Change(change func(*policy.Breaker)) { change(&s.view.Breaker) }
func (s *side) Rescan(probe bool)                   { s.walks = append(s.walks, probe) }

// tend writes what the breaker of this side has decided, an hour after the last time: all that it
// waits for has come.
func (s *side) tend() (look bool) {
	s.Helper()
	s.now = s.now.Add(time.Hour)
	_, look, err := s.keeper.Tend(s.Context(), s, s.now, s.relayID)
	relaytest.Must(s, err)
	return look
}

// fail gives the breaker n results without a connection, or with a failure of the receiver.
func (s *side) fail(reason policy.Reason, n int) {
	for i := range n {
		s.view.Breaker.RecordResult(time.Now(), int64(i), &policy.Result{Reason: reason, Posted: true, Message: "why"}, 8)
	}
}

// want compares the row of the destination.
func (s *side) want(row string) {
	s.Helper()
	got := relaytest.Row[string](s.Database, `SELECT concat_ws(' ', breaker, 'owner', coalesce(breaker_relay_id, 0), 'probes', breaker_probes, 'failures', breaker_failures)
		FROM outbox_destination WHERE destination = 'default'`)
	if got != row {
		s.Errorf("the destination is %q, want %q", got, row)
	}
}

// alerts returns how many alerts of the breaker are open.
func (s *side) alerts() int {
	return relaytest.Row[int](s.Database, `SELECT count(*) FROM outbox_alert WHERE rule = 'breaker_open' AND resolved_at IS NULL`)
}

// pass makes the time that the database has for the breaker pass.
func (s *side) pass() {
	s.Exec(`UPDATE outbox_destination SET breaker_until = now() - interval '1 second'`)
}

// What two relays found adds up, and an answer to one takes back what the other found.
func TestEvidenceIsShared(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	one, other := newSide(db, 1), newSide(db, 2)
	one.fail(policy.ReasonServerError, 2)
	one.view.Breaker.Answered = time.Now()
	one.tend()
	one.want("closed owner 0 probes 0 failures 2")
	other.fail(policy.ReasonServerError, 3)
	other.tend()
	other.want("closed owner 0 probes 0 failures 5")
	if b := other.view.Breaker; b.Recorded != 5 || b.Unwritten != 0 || len(b.Events) != policy.BreakerEvents {
		t.Errorf("the second relay knows %+v", b)
	}
	other.view.Breaker.RecordResult(time.Now(), 9, &policy.Result{Reason: policy.ReasonOK, Posted: true}, 8)
	other.tend()
	other.want("closed owner 0 probes 0 failures 2")
	one.view.Breaker.Unwritten = -9
	one.tend()
	one.want("closed owner 0 probes 0 failures 0")
}

// A destination that only answers is never written about, and one that failed once or twice only
// when it does.
func TestAnswersAreNotWritten(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s := newSide(db, 1)
	s.keeper.DB = nil // which would panic
	for i := range 500 {
		s.view.Breaker.RecordResult(time.Now(), int64(i), &policy.Result{Reason: policy.ReasonOK, Posted: true}, 8)
		s.tend()
	}
	s.keeper.DB = db.Pool
	s.fail(policy.ReasonServerError, 2)
	s.tend()
	s.want("closed owner 0 probes 0 failures 2")
	s.keeper.DB = nil
	s.tend()
}

// An outage from its first failure to its end: one relay opens, one alone tries, failed probes are
// counted, and the end is written once.
func TestOneRelayTries(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "held")
	one, other := newSide(db, 1), newSide(db, 2)

	one.fail(policy.ReasonConnect, 1)
	other.fail(policy.ReasonConnect, 1)
	one.tend()
	one.want("open owner 0 probes 0 failures 0")
	other.tend() // another relay has opened it before
	other.want("open owner 0 probes 0 failures 0")
	if one.alerts() != 1 || one.due == 0 {
		t.Errorf("%d alerts, sent %d times", one.alerts(), one.due)
	}
	if look := one.tend(); look {
		t.Error("tried before the database allows it")
	}
	one.want("open owner 0 probes 0 failures 0")

	for range 4 {
		one.pass()
		if look := one.tend(); !look {
			t.Fatal("claims do not look for a probe")
		}
		if look := other.tend(); look {
			t.Fatal("two relays try at once")
		}
		one.fail(policy.ReasonConnect, 1)
		one.tend()
	}
	one.want("open owner 0 probes 4 failures 0")

	one.pass()
	one.tend()
	one.want("half_open owner 1 probes 4 failures 0")
	one.view.Breaker.Close(time.Now())
	if look := one.tend(); !look {
		t.Error("claims do not look for what was held")
	}
	one.want("closed owner 0 probes 0 failures 0")
	if last := len(one.walks) - 1; one.walks[last] || one.alerts() != 0 {
		t.Errorf("walks %v, %d alerts", one.walks, one.alerts())
	}
}

// The wait for the next probe doubles with each that fails, up to a bound, and begins again after
// one that passed.
func TestProbesWaitLonger(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "held")
	s := newSide(db, 1)
	s.fail(policy.ReasonConnect, 1)
	opened := func(want time.Duration) {
		t.Helper()
		wait, _, err := store{db.Pool}.openBreaker(t.Context(), "default", 1, s.view.Breaker)
		if err != nil || wait != want {
			t.Errorf("waits %s, %v; want %s", wait, err, want)
		}
		s.pass()
		_, _, err = store{db.Pool}.tryBreaker(t.Context(), "default", 1, time.Minute, time.Hour)
		relaytest.Must(t, err)
	}
	for _, want := range []time.Duration{1, 2, 4, 5, 5} {
		opened(want * time.Second)
	}
	s.view.Breaker.Accepted = true
	opened(time.Second)
}

// A trial that was taken away, since its time was over, ends without a word; the breaker of the
// other relay stays.
func TestLostTrial(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "held")
	one, other := newSide(db, 1), newSide(db, 2)
	one.fail(policy.ReasonConnect, 1)
	other.fail(policy.ReasonConnect, 1)
	one.tend()
	other.tend()
	one.pass()
	one.tend()
	one.view.Busy = true
	one.tend() // renews
	one.want("half_open owner 1 probes 0 failures 0")
	one.pass()
	other.tend()
	other.want("half_open owner 2 probes 0 failures 0")
	one.tend()
	testkit.Equal(t, "the relay that lost its trial", one.view.Breaker.State, policy.BreakerOpen)
	one.view.Breaker.Close(time.Now())
	one.tend()
	other.want("half_open owner 2 probes 0 failures 0")
}

// A trial whose acknowledgement was lost is this relay's. It makes it, and holds up no relay until
// the time of the trial is over.
func TestTrialWithoutAcknowledgement(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "held")
	one := newSide(db, 1)
	one.fail(policy.ReasonConnect, 1)
	one.tend()
	one.pass()
	_, _, err := store{db.Pool}.tryBreaker(t.Context(), "default", one.relayID, time.Minute, time.Hour)
	relaytest.Must(t, err)
	b := &one.view.Breaker
	b.ApplyState(time.Now(), time.Now(), policy.DestinationState{Breaker: "half_open", Owner: one.relayID, Remaining: time.Minute}, one.relayID)
	if wait := time.Until(b.TryAt); wait > 0 {
		t.Errorf("it waits for itself, for %s", wait)
	}
	if look := one.tend(); !look || b.State != policy.BreakerHalfOpen {
		t.Errorf("claims look for a probe: %t; %s", look, b.State)
	}
	one.want("half_open owner 1 probes 0 failures 0")
}

// No trial begins while nothing that waits is due or an operator has paused the destination; one
// that finds nothing to send closes the breaker.
func TestTrialNeedsADelivery(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "held")
	s := newSide(db, 1)
	s.fail(policy.ReasonConnect, 1)
	s.tend()
	s.pass()
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour'`)
	s.tend()
	s.want("open owner 0 probes 0 failures 0")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	db.Exec(`UPDATE outbox_destination SET paused = true, paused_at = now()`)
	s.tend()
	s.want("open owner 0 probes 0 failures 0")
	db.Exec(`UPDATE outbox_destination SET paused = false, paused_at = NULL`)
	s.tend()
	s.want("half_open owner 1 probes 0 failures 0")
	s.view.Scanned = true
	if look := s.tend(); !look {
		t.Error("claims do not look after a trial without anything to send")
	}
	s.want("closed owner 0 probes 0 failures 0")
	testkit.Equal(t, "alerts open", s.alerts(), 0)
}

// A relay that was asked to wait leaves its trial to the others, which may not have been.
func TestTrialIsLeftToOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "held")
	s, other := newSide(db, 1), newSide(db, 2)
	s.fail(policy.ReasonConnect, 1)
	s.tend()
	s.pass()
	s.tend()
	s.want("half_open owner 1 probes 0 failures 0")
	s.view.UntilTurn, s.view.Asked, s.view.Busy = time.Minute, yield, true // the rate alone leaves no trial whose request is under way
	s.tend()
	s.want("half_open owner 1 probes 0 failures 0")
	s.view.Asked++
	s.tend()
	s.want("open owner 0 probes 0 failures 0")
	other.view.Breaker.Enter(other.now, policy.BreakerOpen)
	other.tend()
	s.want("half_open owner 2 probes 0 failures 0")
	s.tend()
	s.want("half_open owner 2 probes 0 failures 0")
	testkit.Equal(t, "state", s.view.Breaker.State, policy.BreakerOpen)
}

// What the database did not take is written when it can be.
func TestBreakerIsWrittenLater(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "held")
	s := newSide(db, 1)
	s.fail(policy.ReasonConnect, 1)
	db.Exec(`ALTER TABLE outbox_destination RENAME TO away`)
	if _, _, err := s.keeper.Tend(t.Context(), s, time.Now(), s.relayID); err == nil {
		t.Fatal("no error without the table")
	}
	db.Exec(`ALTER TABLE away RENAME TO outbox_destination`)
	s.tend()
	s.want("open owner 0 probes 0 failures 0")
}

// The alert of a destination that is held again soon after an operator has reset its breaker
// continues. The hold is a new one.
func TestResetBeginsNoNewAlert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "held")
	s := newSide(db, 1)
	s.fail(policy.ReasonConnect, 1)
	s.tend()
	s.Exec(`UPDATE outbox_destination SET breaker_opened_at = now() - interval '1 hour'; UPDATE outbox_alert SET opened_at = now() - interval '1 hour'`)
	_, err := ops.New(db.Pool).ResetBreaker(t.Context(), "default")
	relaytest.Must(t, err)
	s.want("closed owner 0 probes 0 failures 0")
	s.view.Breaker = policy.Breaker{Policy: s.view.Breaker.Policy}
	s.Exec(`UPDATE outbox_alert SET last_at = now() - interval '1 hour'`) // the reset's
	s.fail(policy.ReasonConnect, 1)
	s.tend()
	const ages = `SELECT extract(epoch FROM now() - breaker_opened_at) < 60 AND extract(epoch FROM now() - opened_at) > 3590
		AND extract(epoch FROM now() - last_at) < 60 AND count = 1 FROM outbox_destination, outbox_alert`
	if !relaytest.Row[bool](db, ages) || s.alerts() != 1 {
		t.Errorf("the hold or the alert has another age; %d alerts", s.alerts())
	}
}

// A relay that ends an alert after a reset may do so while another one opens the hold again.
func TestHoldMeetsTheEndOfItsAlert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "held")
	s := newSide(db, 1)
	s.Exec(`INSERT INTO outbox_alert (rule, subject, first_error) VALUES ('breaker_open', 'default', 'earlier')`)
	ends := db.Begin()
	_, err := ends.Exec(t.Context(), `UPDATE outbox_alert SET resolved_at = now()`)
	relaytest.Must(t, err)
	s.fail(policy.ReasonConnect, 1)
	var held sync.WaitGroup
	held.Go(func() { s.tend() })
	relaytest.Becomes(db, true, `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
	relaytest.Must(t, ends.Commit(t.Context()))
	held.Wait()
	s.want("open owner 0 probes 0 failures 0")
	testkit.Equal(t, "alerts of the hold", s.alerts(), 1)
}

// One trouble is one alert: a destination that is held for a status that an open alert names opens
// no other, and one that then fails in another way does.
func TestHoldForWhatIsToldOpensNoAlert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "held")
	s := newSide(db, 1)
	s.Exec(`INSERT INTO outbox_alert (rule, subject, first_error) VALUES ('misconfigured', 'default', '401 Unauthorized: who?')`)
	s.fail(policy.ReasonConnect, 1)
	s.view.Breaker.Cause = "401 Unauthorized: no"
	s.tend()
	s.want("open owner 0 probes 0 failures 0")
	testkit.Equal(t, "alerts of the hold", s.alerts(), 0)
	s.pass()
	s.tend()
	s.fail(policy.ReasonConnect, 1)
	s.tend()
	s.want("open owner 0 probes 1 failures 0")
	testkit.Equal(t, "alerts of another fault", s.alerts(), 1)
}

// A held destination of which nothing is due is probed when its next delivery is, not up to a poll
// later; status says the same.
func TestProbeWaitsForWhatIsDueNext(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "retried")
	db.Serve("default")
	s := newSide(db, 1)
	s.fail(policy.ReasonConnect, 1)
	s.tend()
	s.pass()
	s.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour', attempts = 1`)
	s.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '500 milliseconds' WHERE event_id = 2`)
	s.now = s.now.Add(time.Hour)
	next, scan, err := s.keeper.Tend(t.Context(), s, s.now, 1)
	relaytest.Must(t, err)
	if wait := next.Sub(s.now); scan || wait <= 0 || wait > 500*time.Millisecond {
		t.Errorf("the next probe is tried after %s, scan %v", wait, scan)
	}
	s.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour'`)
	status, err := ops.New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	if got := status.Destinations[0].BreakerSeconds; got < 3000 || got > 3600 {
		t.Errorf("status says that the next probe comes in %g s", got)
	}
}

// A relay that is refused before another one has tried does not know whether it is refused alone.
func TestFirstRefusalIsNotCalledTheOnlyOne(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (id, name, version) OVERRIDING SYSTEM VALUE VALUES (1, 'a', ''), (2, 'b', '');
		INSERT INTO outbox_relay_destination (relay_id, destination) VALUES (1, 'default'), (2, 'default')`)
	var log strings.Builder
	s := newSide(db, 1)
	s.keeper.Log = zerolog.New(&log)
	s.fail(policy.ReasonConnect, 5)
	s.tend()
	if said := log.String(); !strings.Contains(said, "this relay is refused, and leaves the destination to relays that may be accepted") || strings.Contains(said, "only") {
		t.Errorf("the log says %q", said)
	}
}
