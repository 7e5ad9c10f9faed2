package policy

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

var (
	refusedConn = Result{Reason: ReasonConnect, Posted: true, Unreached: true, Message: "connection refused"}
	dialTimeout = Result{Reason: ReasonTimeout, Posted: true, Unreached: true, Message: "i/o timeout"}
	noAnswer    = Result{Reason: ReasonTimeout, Posted: true, Message: "no answer"}
	cutOff      = Result{Reason: ReasonShutdown, Posted: true, Unreached: true}
	serverError = Result{Reason: ReasonServerError, StatusCode: 500, Posted: true, Message: "500"}
	badGateway  = Result{Reason: ReasonServerError, StatusCode: 502, Posted: true, Message: "502"}
	accepted    = Result{Reason: ReasonOK, StatusCode: 204, Posted: true}
	rejected    = Result{Reason: ReasonRejected, StatusCode: 422, Posted: true}
	tooMany     = Result{Reason: ReasonRateLimited, StatusCode: 429, Posted: true}
)

// steps are results of one event each, a second apart.
type step struct {
	event int64
	Result
}

// shared is the result of another event of a batch that failed as well.
func shared(v Result) Result {
	v.Shared = true
	return v
}

func repeat(n int, v Result, events ...int64) (steps []step) {
	for i := range n {
		steps = append(steps, step{events[i%len(events)], v})
	}
	return steps
}

func concat(lists ...[]step) (all []step) {
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}

func TestBreakerOpensOnlyForTheWholeDestination(t *testing.T) {
	t.Parallel()
	many := []int64{1, 2, 3, 4, 5, 6, 7, 8}
	for name, c := range map[string]struct {
		steps []step
		every time.Duration // 0: a second
		open  bool
		spent int // attempts, of those that failed
	}{
		"one refused connection":                 {steps: repeat(1, refusedConn, 1), open: true},
		"one dial that timed out":                {steps: repeat(1, dialTimeout, 1), open: true},
		"one that this relay cut off itself":     {steps: repeat(9, cutOff, 1)},
		"one of a destination that answers":      {steps: concat(repeat(1, accepted, 2), repeat(9, refusedConn, 1)), every: 100 * time.Millisecond},
		"and that does not any more":             {steps: concat(repeat(1, accepted, 2), repeat(11, refusedConn, 1)), every: 100 * time.Millisecond, open: true},
		"one event without an answer":            {steps: repeat(50, noAnswer, 1), spent: 50},
		"one event whose gateway answers for it": {steps: repeat(50, badGateway, 1), spent: 50},
		"one event that is always answered 500":  {steps: repeat(50, serverError, 1), spent: 50},
		"two of them":                            {steps: repeat(50, serverError, 1, 2), spent: 50},
		"three and more":                         {steps: repeat(5, serverError, many...), open: true, spent: 5},
		"three and more of one request":          {steps: concat(repeat(1, serverError, 1), repeat(50, shared(serverError), many...)), spent: 51},
		"three and more of five requests": {
			steps: concat(repeat(1, serverError, 1), repeat(9, shared(serverError), many...), repeat(4, serverError, many...)), open: true, spent: 14,
		},
		"four failures":                          {steps: repeat(4, serverError, many...), spent: 4},
		"answers in between":                     {steps: concat(repeat(4, serverError, many...), repeat(2, accepted, 9), repeat(4, serverError, many...)), spent: 8},
		"rejections are answers":                 {steps: concat(repeat(4, serverError, many...), repeat(2, rejected, 9), repeat(4, serverError, many...)), spent: 8},
		"a 429 is no evidence":                   {steps: concat(repeat(4, serverError, many...), repeat(9, tooMany, 2), repeat(1, serverError, 1)), open: true, spent: 5},
		"a burst after an answer is a suspicion": {steps: concat(repeat(1, accepted, 9), repeat(19, serverError, many...)), every: time.Millisecond, spent: 5},
		"a long burst is certainty":              {steps: concat(repeat(1, accepted, 9), repeat(20, serverError, many...)), every: time.Millisecond, open: true, spent: 5},
		"what was on its way is held":            {steps: concat(repeat(1, accepted, 9), repeat(64, serverError, many...)), every: time.Millisecond, open: true, spent: 5},
		"four of five": {steps: func() (all []step) {
			for range 40 {
				all = concat(all, repeat(4, serverError, many...), repeat(1, accepted, 9))
			}
			return all
		}(), every: time.Millisecond, open: true, spent: 14},
		"every other": {steps: func() (all []step) {
			for range 50 {
				all = concat(all, repeat(1, serverError, many...), repeat(1, accepted, 9))
			}
			return all
		}(), spent: 50},
	} {
		b := Breaker{Policy: BreakerPolicy{}.WithDefaults()}
		now := time.Unix(1_000_000, 0)
		spent := 0
		for _, s := range c.steps {
			v := s.Result
			if !b.RecordResult(now, s.event, &v, 64) && outcomeOf(v, Circumstances{}) == Retry && v.Reason != ReasonRateLimited {
				spent++
			}
			if c.every == 0 {
				c.every = time.Second
			}
			now = now.Add(c.every)
		}
		if b.Holding() != c.open || spent != c.spent || c.open != (b.Write == WriteOpen) {
			t.Errorf("%s: open %t (to write: %d), %d attempts spent; want %t, %d", name, b.Holding(), b.Write, spent, c.open, c.spent)
		}
	}

	off := Breaker{Policy: BreakerPolicy{Disabled: true}.WithDefaults()}
	for i := range int64(100) {
		if off.RecordResult(time.Unix(i, 0), i, &refusedConn, 64) || off.Holding() {
			t.Fatal("a breaker that is off holds")
		}
	}
}

// One, two, four, … in flight; a failure of the first probe costs nothing, nor does one that
// reached no receiver; one between those that pass is spent.
func TestBreakerStartsSlowly(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	open := func() *Breaker {
		b := &Breaker{Policy: BreakerPolicy{}.WithDefaults()}
		for i := range int64(5) {
			b.RecordResult(now, i, &serverError, 64)
			now = now.Add(time.Second)
		}
		b.Opened(now, time.Second)
		b.Try(now, time.Minute)
		return b
	}
	b := open()
	for _, want := range []int{1, 2, 4, 8, 16, 32} {
		if trying, allowed := b.Trying(); !trying || allowed != want {
			t.Fatalf("trying %t, %d allowed; want %d", trying, allowed, want)
		}
		for range want {
			b.RecordResult(now, 1, &accepted, 64)
		}
	}
	if b.State != BreakerClosed || b.Write != WriteClosed {
		t.Errorf("after 63 answers: state %d, to write %d", b.State, b.Write)
	}

	b = open()
	if !b.RecordResult(now, 1, &serverError, 64) || !b.Holding() || b.Write != WriteOpen || b.Accepted {
		t.Errorf("a failed probe: %+v", b)
	}
	b = open()
	for range 3 {
		b.RecordResult(now, 1, &accepted, 64)
	}
	if b.RecordResult(now, 2, &serverError, 64) || b.allowed != 4 {
		t.Errorf("a failure among answers: %d allowed", b.allowed)
	}
	if b.RecordResult(now, 3, &serverError, 64) || b.allowed != 2 {
		t.Errorf("another behind it: %d allowed", b.allowed)
	}
	if !b.RecordResult(now, 3, &refusedConn, 64) || b.allowed != 1 {
		t.Errorf("a third: %d allowed", b.allowed)
	}
	if !b.RecordResult(now, 4, &refusedConn, 64) || !b.Holding() || !b.Accepted {
		t.Errorf("the last: %+v", b)
	}

	b = open()
	for i := range int64(500) {
		v := &accepted
		if i%12 == 5 { // as on any other day
			v = &serverError
		}
		b.RecordResult(now, i, v, 64)
	}
	if b.State != BreakerClosed {
		t.Errorf("one request in twelve fails: state %d, %d allowed after 500", b.State, b.allowed)
	}
}

// A relay that was refused alone and is then answered with an error of the destination is no longer
// refused: the error counts as one that any relay may get.
func TestErrorOfTheDestinationEndsARefusal(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	b := Breaker{Policy: BreakerPolicy{}.WithDefaults()}
	for event := range int64(20) {
		b.RecordResult(now.Add(time.Duration(event)*time.Second), event, &refusedConn, 8)
	}
	if b.State != BreakerOpen || !b.MayBeAlone() {
		t.Fatalf("%+v", b)
	}
	b.HoldAlone(now)
	b.TryAlone(now)
	b.RecordResult(now, 20, &serverError, 8)
	if b.State != BreakerClosed || b.Write != WriteClosed || b.MayBeAlone() || b.Unwritten != 1 {
		t.Errorf("%+v", b)
	}
	b.ClosedAlone(now)
	testkit.Equal(t, "alone", b.Alone, false)
}

func TestBreakerHearsTheDatabase(t *testing.T) {
	t.Parallel()
	const self, other = 7, 8
	early, late := time.Unix(1_000_000, 0), time.Unix(1_000_010, 0)
	state := func(breaker string, owner int32) DestinationState {
		return DestinationState{Breaker: breaker, Owner: owner, Remaining: 3 * time.Second}
	}
	for name, c := range map[string]struct {
		breaker Breaker
		said    DestinationState
		want    BreakerState
	}{
		"another relay has opened it":      {Breaker{Since: early}, state("open", 0), BreakerOpen},
		"another relay tries it":           {Breaker{Since: early}, state("half_open", other), BreakerOpen},
		"it was closed":                    {Breaker{State: BreakerOpen, Since: early}, state("closed", 0), BreakerClosed},
		"this relay tries it":              {Breaker{State: BreakerHalfOpen, Since: early}, state("half_open", self), BreakerHalfOpen},
		"and another has taken over":       {Breaker{State: BreakerHalfOpen, Since: early}, state("half_open", other), BreakerOpen},
		"this relay did, in another life":  {Breaker{Since: early}, state("half_open", self), BreakerOpen},
		"what was said before the change":  {Breaker{State: BreakerHalfOpen, Since: late}, state("open", 0), BreakerHalfOpen},
		"what it does not know yet":        {Breaker{State: BreakerOpen, Since: early, Write: WriteOpen}, state("closed", 0), BreakerOpen},
		"that it was closed by hand":       {Breaker{State: BreakerHalfOpen, Since: early}, state("closed", 0), BreakerClosed},
		"paused, with nothing else wrong":  {Breaker{Since: early}, DestinationState{Breaker: "closed"}, BreakerClosed},
		"that what it has written is true": {Breaker{Since: early, Write: WriteNothing}, state("closed", 0), BreakerClosed},
	} {
		b := c.breaker
		asked := late.Add(-time.Second)
		b.ApplyState(asked, late, c.said, self)
		testkit.Equal(t, name+": state", b.State, c.want)
		if c.breaker.State != BreakerOpen && b.State == BreakerOpen && !b.TryAt.Equal(late.Add(3*time.Second)) {
			t.Errorf("%s: try at %s", name, b.TryAt)
		}
	}
}
