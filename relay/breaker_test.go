package relay

import (
	"testing"
	"time"
)

var (
	refusedConn = result{reason: ReasonConnect, posted: true, unreached: true, message: "connection refused"}
	dialTimeout = result{reason: ReasonTimeout, posted: true, unreached: true, message: "i/o timeout"}
	noAnswer    = result{reason: ReasonTimeout, posted: true, message: "no answer"}
	cutOff      = result{reason: ReasonShutdown, posted: true, unreached: true}
	serverError = result{reason: ReasonServerError, statusCode: 500, posted: true, message: "500"}
	badGateway  = result{reason: ReasonServerError, statusCode: 502, posted: true, message: "502"}
	accepted    = result{reason: ReasonOK, statusCode: 204, posted: true}
	rejected    = result{reason: ReasonRejected, statusCode: 422, posted: true}
	tooMany     = result{reason: ReasonRateLimited, statusCode: 429, posted: true}
)

// steps are results of one event each, a second apart.
type step struct {
	event int64
	result
}

func repeat(n int, v result, events ...int64) (steps []step) {
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
		b := breaker{policy: BreakerPolicy{}.withDefaults()}
		now := time.Unix(1_000_000, 0)
		spent := 0
		for _, s := range c.steps {
			v := s.result
			if !b.recordResult(now, s.event, &v, 64) && outcomeOf(v, circumstances{}) == Retry && v.reason != ReasonRateLimited {
				spent++
			}
			if c.every == 0 {
				c.every = time.Second
			}
			now = now.Add(c.every)
		}
		if b.holding() != c.open || spent != c.spent || c.open != (b.write == writeOpen) {
			t.Errorf("%s: open %t (to write: %d), %d attempts spent; want %t, %d", name, b.holding(), b.write, spent, c.open, c.spent)
		}
	}

	off := breaker{policy: BreakerPolicy{Off: true}.withDefaults()}
	for i := range int64(100) {
		if off.recordResult(time.Unix(i, 0), i, &refusedConn, 64) || off.holding() {
			t.Fatal("a breaker that is off holds")
		}
	}
}

// One, two, four, … in flight; a failure of the first probe costs nothing, nor does one that reached no receiver; one between
// those that pass is spent.
func TestBreakerStartsSlowly(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	open := func() *breaker {
		b := &breaker{policy: BreakerPolicy{}.withDefaults()}
		for i := range int64(5) {
			b.recordResult(now, i, &serverError, 64)
			now = now.Add(time.Second)
		}
		b.opened(now, time.Second)
		b.try(now, time.Minute)
		return b
	}
	b := open()
	for _, want := range []int{1, 2, 4, 8, 16, 32} {
		if trying, allowed := b.trying(); !trying || allowed != want {
			t.Fatalf("trying %t, %d allowed; want %d", trying, allowed, want)
		}
		for range want {
			b.recordResult(now, 1, &accepted, 64)
		}
	}
	if b.state != breakerClosed || b.write != writeClosed {
		t.Errorf("after 63 answers: state %d, to write %d", b.state, b.write)
	}

	b = open()
	if !b.recordResult(now, 1, &serverError, 64) || !b.holding() || b.write != writeOpen || b.accepted {
		t.Errorf("a failed probe: %+v", b)
	}
	b = open()
	for range 3 {
		b.recordResult(now, 1, &accepted, 64)
	}
	if b.recordResult(now, 2, &serverError, 64) || b.allowed != 4 {
		t.Errorf("a failure among answers: %d allowed", b.allowed)
	}
	if b.recordResult(now, 3, &serverError, 64) || b.allowed != 2 {
		t.Errorf("another behind it: %d allowed", b.allowed)
	}
	if !b.recordResult(now, 3, &refusedConn, 64) || b.allowed != 1 {
		t.Errorf("a third: %d allowed", b.allowed)
	}
	if !b.recordResult(now, 4, &refusedConn, 64) || !b.holding() || !b.accepted {
		t.Errorf("the last: %+v", b)
	}

	b = open()
	for i := range int64(500) {
		v := &accepted
		if i%12 == 5 { // as on any other day
			v = &serverError
		}
		b.recordResult(now, i, v, 64)
	}
	if b.state != breakerClosed {
		t.Errorf("one request in twelve fails: state %d, %d allowed after 500", b.state, b.allowed)
	}
}

func TestBreakerHearsTheDatabase(t *testing.T) {
	t.Parallel()
	const self, other = 7, 8
	early, late := time.Unix(1_000_000, 0), time.Unix(1_000_010, 0)
	state := func(breaker string, owner int32) destinationState {
		return destinationState{breaker: breaker, owner: owner, remaining: 3 * time.Second}
	}
	for name, c := range map[string]struct {
		breaker breaker
		said    destinationState
		want    breakerState
	}{
		"another relay has opened it":      {breaker{since: early}, state("open", 0), breakerOpen},
		"another relay tries it":           {breaker{since: early}, state("half_open", other), breakerOpen},
		"it was closed":                    {breaker{state: breakerOpen, since: early}, state("closed", 0), breakerClosed},
		"this relay tries it":              {breaker{state: breakerHalfOpen, since: early}, state("half_open", self), breakerHalfOpen},
		"and another has taken over":       {breaker{state: breakerHalfOpen, since: early}, state("half_open", other), breakerOpen},
		"this relay did, in another life":  {breaker{since: early}, state("half_open", self), breakerOpen},
		"what was said before the change":  {breaker{state: breakerHalfOpen, since: late}, state("open", 0), breakerHalfOpen},
		"what it does not know yet":        {breaker{state: breakerOpen, since: early, write: writeOpen}, state("closed", 0), breakerOpen},
		"that somebody closed it by hand":  {breaker{state: breakerHalfOpen, since: early}, state("closed", 0), breakerClosed},
		"paused, with nothing else wrong":  {breaker{since: early}, destinationState{paused: true, breaker: "closed"}, breakerClosed},
		"that what it has written is true": {breaker{since: early, write: writeNothing}, state("closed", 0), breakerClosed},
	} {
		b := c.breaker
		asked := late.Add(-time.Second)
		b.applyState(asked, late, c.said, self)
		if b.state != c.want {
			t.Errorf("%s: state %d, want %d", name, b.state, c.want)
		}
		if c.breaker.state != breakerOpen && b.state == breakerOpen && !b.tryAt.Equal(late.Add(3*time.Second)) {
			t.Errorf("%s: try at %s", name, b.tryAt)
		}
	}
}

// Whoever was trying a destination alone and is gone, by a crash or by a stop, keeps nobody else from it.
func TestTrialEndsWithItsRelay(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(t *testing.T, db *database, instance int32){
		"crash": func(t *testing.T, db *database, instance int32) {
			dead, _, err := (&store{pool: db.pool}).rescue(t.Context(), instance)
			if err != nil || !dead {
				t.Errorf("not rescued: %v", err)
			}
		},
		"stop": func(t *testing.T, db *database, instance int32) {
			must(t, deregister(t.Context(), db.pool, instance))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			instance := db.dead()
			db.exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_owner)
				VALUES ('default', 'half_open', now(), now() + interval '1 day', $1)`, instance)
			db.insert(10, "key")
			leave(t, db, instance)
			start(t, db.config(to(rc.URL))).settles(t, Delivered, 10)
			becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
		})
	}
}
