package breaker

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A script is what happens to a circuit, one letter each:
//
//   - - ?  work is let in and proves that things are up, down, or nothing
//     p      work is let in and stays out, until one of P M Q says what it proved: up, down, nothing
//     x      work is refused
//     .      a second goes by
func runScript(t *testing.T, c *circuit, script string) {
	t.Helper()
	now := time.Unix(1_700_000_000, 0)
	var out Pass
	proof := map[rune]Health{'+': Up, '-': Down, '?': Unknown, 'P': Up, 'M': Down, 'Q': Unknown}
	for i, step := range script {
		switch step {
		case '.':
			now = now.Add(time.Second)
		case 'P', 'M', 'Q':
			c.leave(out, now, proof[step])
		default:
			p, wait, ok := c.enter(now)
			if ok != (step != 'x') || ok != (wait == 0) {
				t.Fatalf("step %d of %s, %c: let in %v, wait %v", i, script, step, ok, wait)
			}
			switch {
			case step == 'p':
				out = p
			case ok:
				c.leave(p, now, proof[step])
			}
		}
	}
}

func TestCircuit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script string
		state  State
	}{
		"two failures":                          {"--", Closed},
		"three":                                 {"---x", Open},
		"three, but not in a row":               {"--+--", Closed},
		"what proves nothing is not in between": {"--??-x", Open},
		"open until the wait is over":           {"---x.xxx.x", Open},
		"then one probe at a time":              {"---...pxxx", HalfOpen},
		"a probe that succeeds is not enough":   {"---...+", HalfOpen},
		"as many as asked for are":              {"---...++++++", Closed},
		"a closed one starts counting again":    {"---...++--", Closed},
		"a probe that proves nothing":           {"---...?+?+++", Closed},
		"a probe that fails doubles the wait":   {"---...-x...x...-x", Open},
		"again, up to the most":                 {"---...-......-x.........x.-x.........x.p", HalfOpen},
		"successes before it do not count":      {"---...+-......+", HalfOpen},
		"a new opening waits as at first":       {"---...-......++---...p", HalfOpen},
		"a probe that stays out":                {"---...px.x.x.+", HalfOpen},
		"and fails in the end":                  {"---...p...+M", Open},
		"and succeeds in the end":               {"---...p...+P", Closed},
		"and comes back too late":               {"---...p...++M", Closed},
		"or in time":                            {"---...p..P+", Closed},
		"what began before it opened":           {"p---M...+P", HalfOpen},
		"or before it closed again":             {"p---...++MMM", Closed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBreaker(t, Config{Failures: 3, OpenFor: 3 * time.Second, OpenMax: 10 * time.Second, Successes: 2})
			runScript(t, &b.circuit, c.script)
			if got := b.State(); got != c.state {
				t.Errorf("%s: %s, want %s", c.script, got, c.state)
			}
		})
	}
}

// Where every handler takes longer than the wait, each probe is followed by another before it is
// back.
func TestCircuitClosesWhereHandlersAreSlow(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	c := newBreaker(t, Config{Failures: 1, OpenFor: 5 * time.Second}).circuit
	p, _, _ := c.enter(now)
	c.leave(p, now, Down)
	first, _, ok := c.enter(now.Add(5 * time.Second))
	second, _, again := c.enter(now.Add(10 * time.Second))
	if !ok || !again {
		t.Fatalf("probes: %v, %v", ok, again)
	}
	c.leave(first, now.Add(11*time.Second), Unknown)
	if _, _, ok := c.enter(now.Add(12 * time.Second)); ok {
		t.Error("a third probe, while the second is out")
	}
	c.leave(second, now.Add(16*time.Second), Up)
	testkit.Equal(t, "the breaker", c.state, Closed)
	if c.leave(first, now.Add(17*time.Second), Down); c.state != Closed {
		t.Errorf("what began before it closed made it %s", c.state)
	}

	p, _, _ = c.enter(now.Add(20 * time.Second))
	c.leave(p, now.Add(20*time.Second), Down)
	first, _, _ = c.enter(now.Add(25 * time.Second))
	second, _, _ = c.enter(now.Add(30 * time.Second))
	c.leave(first, now.Add(31*time.Second), Up)
	testkit.Equal(t, "after the success of a probe that was out for long the breaker", c.state, Closed)
	if c.leave(second, now.Add(36*time.Second), Down); c.state != Closed {
		t.Errorf("what began before it closed made it %s", c.state)
	}
}

// While a probe runs, Enter returns a short wait for what it refuses, even when the wait has
// doubled ten times before.
func TestCircuitWaits(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	c := newBreaker(t, Config{Failures: 1}).circuit
	p, _, _ := c.enter(now)
	c.leave(p, now, Down)
	if _, wait, ok := c.enter(now.Add(2 * time.Second)); ok || wait != 3*time.Second {
		t.Errorf("open: %v, %v", wait, ok)
	}
	if p, wait, ok := c.enter(now.Add(5 * time.Second)); !ok || !p.probe || wait != 0 {
		t.Errorf("due: %+v, %v, %v", p, wait, ok)
	}
	if _, wait, ok := c.enter(now.Add(5 * time.Second)); ok || wait != time.Second {
		t.Errorf("half-open: %v, %v", wait, ok)
	}
}

func TestBreakerTellsOfChanges(t *testing.T) {
	t.Parallel()
	type change struct {
		to    State
		cause string
	}
	var told []change
	log := &strings.Builder{}
	var b *Breaker
	b = newBreaker(t, Config{Failures: 1, OpenFor: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)), OnChange: func(to State, cause error) {
		if got := b.State(); got != to {
			t.Errorf("told of %s in state %s", to, got)
		}
		if cause == nil {
			told = append(told, change{to: to})
		} else {
			told = append(told, change{to, cause.Error()})
		}
	}})
	now := time.Unix(1_700_000_000, 0)
	for i, h := range []Health{Up, Down, Down, Up, Up} {
		now = now.Add(time.Minute)
		p, _, ok := b.Enter(now)
		if !ok {
			t.Fatalf("step %d is refused", i)
		}
		b.Leave(p, now, h, errors.New("bank is down"))
	}
	want := []change{{Open, "bank is down"}, {to: HalfOpen}, {Open, "bank is down"}, {to: HalfOpen}, {to: Closed}}
	if len(told) != len(want) {
		t.Fatalf("told %v, want %v", told, want)
	}
	for i := range want {
		if told[i] != want[i] {
			t.Errorf("told %v, want %v", told, want)
		}
	}
	if opened := strings.Count(log.String(), "level=WARN"); opened != 2 || strings.Count(log.String(), "level=INFO") != 1 || !strings.Contains(log.String(), "bank is down") {
		t.Errorf("logged %s", log)
	}
}

// Another change may come while OnChange is being called: neither of the two requests may wait for
// the other.
func TestBreakerChangesWhileItTells(t *testing.T) {
	t.Parallel()
	var told []State
	var b *Breaker
	now := time.Unix(1_700_000_000, 0)
	b = newBreaker(t, Config{Failures: 1, OpenFor: time.Second, Logger: slog.New(slog.DiscardHandler), OnChange: func(to State, _ error) {
		told = append(told, to)
		if len(told) > 1 {
			return
		}
		var other sync.WaitGroup
		other.Go(func() {
			p, _, ok := b.Enter(now.Add(time.Second))
			if !ok {
				t.Error("the probe is refused")
			}
			b.Leave(p, now.Add(time.Second), Up, nil)
		})
		other.Wait()
		testkit.Equal(t, "the state", b.State(), Closed)
	}})
	p, _, _ := b.Enter(now)
	b.Leave(p, now, Down, errors.New("bank is down"))
	if want := []State{Open, HalfOpen, Closed}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}

// A panic of OnChange would end a process on the goroutines of an inbox. It keeps neither work nor
// later changes from it.
func TestBreakerSurvivesWhoeverItTells(t *testing.T) {
	t.Parallel()
	told := 0
	log := &strings.Builder{}
	b := newBreaker(t, Config{Failures: 1, OpenFor: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)), OnChange: func(State, error) {
		told++
		panic("OnChange is broken")
	}})
	now := time.Unix(1_700_000_000, 0)
	p, _, _ := b.Enter(now)
	b.Leave(p, now, Down, errors.New("bank is down"))
	p, _, ok := b.Enter(now.Add(time.Second))
	if !ok {
		t.Error("the probe is refused")
	}
	b.Leave(p, now.Add(time.Second), Up, nil)
	if b.State() != Closed || told != 3 {
		t.Errorf("the state is %s, told %d times", b.State(), told)
	}
	if strings.Count(log.String(), "OnChange panicked") != 3 || !strings.Contains(log.String(), "stack=") || !strings.Contains(log.String(), "OnChange is broken") {
		t.Errorf("logged %s", log)
	}
}

func TestNilBreakerLetsEverythingPass(t *testing.T) {
	t.Parallel()
	var b *Breaker
	for range 10 {
		p, wait, ok := b.Enter(time.Time{})
		if !ok || wait != 0 {
			t.Fatal("refused")
		}
		b.Leave(p, time.Time{}, Down, nil)
	}
	testkit.Equal(t, "the state", b.State(), Closed)
}

func TestConfigThatCannotWorkPanics(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]Config{
		"negative value: Failures -1":      {Failures: -1},
		"OpenFor -1ns":                     {OpenFor: -1},
		"OpenMax -1ns":                     {OpenMax: -1},
		"Successes -1":                     {Successes: -1},
		"OpenMax is 1s, less than OpenFor": {OpenFor: time.Minute, OpenMax: time.Second},
	} {
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: failed with %v", want, err)
		}
	}
}

func newBreaker(t *testing.T, cfg Config) *Breaker {
	t.Helper()
	b, err := New(cfg)
	testkit.Must(t, err)
	return b
}
