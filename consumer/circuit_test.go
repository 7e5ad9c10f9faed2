package consumer

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
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
	var out pass
	proof := map[rune]health{'+': healthUp, '-': healthDown, '?': healthUnknown, 'P': healthUp, 'M': healthDown, 'Q': healthUnknown}
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
		state  BreakerState
	}{
		"two failures":                          {"--", BreakerClosed},
		"three":                                 {"---x", BreakerOpen},
		"three, but not in a row":               {"--+--", BreakerClosed},
		"what proves nothing is not in between": {"--??-x", BreakerOpen},
		"open until the wait is over":           {"---x.xxx.x", BreakerOpen},
		"then one probe at a time":              {"---...pxxx", BreakerHalfOpen},
		"a probe that succeeds is not enough":   {"---...+", BreakerHalfOpen},
		"as many as asked for are":              {"---...++++++", BreakerClosed},
		"a closed one starts counting anew":     {"---...++--", BreakerClosed},
		"a probe that proves nothing":           {"---...?+?+++", BreakerClosed},
		"a probe that fails doubles the wait":   {"---...-x...x...-x", BreakerOpen},
		"again, up to the most":                 {"---...-......-x.........x.-x.........x.p", BreakerHalfOpen},
		"successes before it do not count":      {"---...+-......+", BreakerHalfOpen},
		"a new opening waits as at first":       {"---...-......++---...p", BreakerHalfOpen},
		"a probe that stays out":                {"---...px.x.x.+", BreakerHalfOpen},
		"and fails in the end":                  {"---...p...+M", BreakerOpen},
		"and succeeds in the end":               {"---...p...+P", BreakerClosed},
		"and comes back too late":               {"---...p...++M", BreakerClosed},
		"or in time":                            {"---...p..P+", BreakerClosed},
		"what began before it opened":           {"p---M...+P", BreakerHalfOpen},
		"or before it closed again":             {"p---...++MMM", BreakerClosed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := NewBreaker(BreakerConfig{Failures: 3, OpenFor: 3 * time.Second, OpenMax: 10 * time.Second, Successes: 2})
			runScript(t, &b.circuit, c.script)
			if got := b.State(); got != c.state {
				t.Errorf("%s: %s, want %s", c.script, got, c.state)
			}
		})
	}
}

// Where every handler takes longer than the wait, each probe is followed by another before it is back.
func TestCircuitClosesWhereHandlersAreSlow(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	c := NewBreaker(BreakerConfig{Failures: 1, OpenFor: 5 * time.Second}).circuit
	p, _, _ := c.enter(now)
	c.leave(p, now, healthDown)
	first, _, ok := c.enter(now.Add(5 * time.Second))
	second, _, again := c.enter(now.Add(10 * time.Second))
	if !ok || !again {
		t.Fatalf("probes: %v, %v", ok, again)
	}
	c.leave(first, now.Add(11*time.Second), healthUnknown)
	if _, _, ok := c.enter(now.Add(12 * time.Second)); ok {
		t.Error("a third probe, while the second is out")
	}
	c.leave(second, now.Add(16*time.Second), healthUp)
	if c.state != BreakerClosed {
		t.Errorf("the breaker is %s", c.state)
	}
	if c.leave(first, now.Add(17*time.Second), healthDown); c.state != BreakerClosed {
		t.Errorf("what began before it closed made it %s", c.state)
	}

	p, _, _ = c.enter(now.Add(20 * time.Second))
	c.leave(p, now.Add(20*time.Second), healthDown)
	first, _, _ = c.enter(now.Add(25 * time.Second))
	second, _, _ = c.enter(now.Add(30 * time.Second))
	c.leave(first, now.Add(31*time.Second), healthUp)
	if c.state != BreakerClosed {
		t.Errorf("after the success of a probe that was out for long the breaker is %s", c.state)
	}
	if c.leave(second, now.Add(36*time.Second), healthDown); c.state != BreakerClosed {
		t.Errorf("what began before it closed made it %s", c.state)
	}
}

// While a probe is out, what is refused is told to come back soon, and not after a wait that has doubled ten times.
func TestCircuitWaits(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	c := NewBreaker(BreakerConfig{Failures: 1}).circuit
	p, _, _ := c.enter(now)
	c.leave(p, now, healthDown)
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
		to    BreakerState
		cause string
	}
	var told []change
	log := &strings.Builder{}
	var b *Breaker
	b = NewBreaker(BreakerConfig{Failures: 1, OpenFor: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)), OnChange: func(to BreakerState, cause error) {
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
	for i, h := range []health{healthUp, healthDown, healthDown, healthUp, healthUp} {
		now = now.Add(time.Minute)
		p, _, ok := b.enter(now)
		if !ok {
			t.Fatalf("step %d is refused", i)
		}
		b.leave(p, now, h, errors.New("bank is down"))
	}
	want := []change{{BreakerOpen, "bank is down"}, {to: BreakerHalfOpen}, {BreakerOpen, "bank is down"}, {to: BreakerHalfOpen}, {to: BreakerClosed}}
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

// Another change may come while OnChange is being called: neither of the two requests may wait for the other.
func TestBreakerChangesWhileItTells(t *testing.T) {
	t.Parallel()
	var told []BreakerState
	var b *Breaker
	now := time.Unix(1_700_000_000, 0)
	b = NewBreaker(BreakerConfig{Failures: 1, OpenFor: time.Second, Logger: slog.New(slog.DiscardHandler), OnChange: func(to BreakerState, _ error) {
		told = append(told, to)
		if len(told) > 1 {
			return
		}
		var other sync.WaitGroup
		other.Go(func() {
			p, _, ok := b.enter(now.Add(time.Second))
			if !ok {
				t.Error("the probe is refused")
			}
			b.leave(p, now.Add(time.Second), healthUp, nil)
		})
		other.Wait()
		if got := b.State(); got != BreakerClosed {
			t.Errorf("the state is %s", got)
		}
	}})
	p, _, _ := b.enter(now)
	b.leave(p, now, healthDown, errors.New("bank is down"))
	if want := []BreakerState{BreakerOpen, BreakerHalfOpen, BreakerClosed}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}

// A panic of OnChange would end a process on the goroutines of an inbox. It keeps neither work nor later changes from it.
func TestBreakerSurvivesWhoeverItTells(t *testing.T) {
	t.Parallel()
	told := 0
	log := &strings.Builder{}
	b := NewBreaker(BreakerConfig{Failures: 1, OpenFor: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil)), OnChange: func(BreakerState, error) {
		told++
		panic("nobody wants to know")
	}})
	now := time.Unix(1_700_000_000, 0)
	p, _, _ := b.enter(now)
	b.leave(p, now, healthDown, errors.New("bank is down"))
	p, _, ok := b.enter(now.Add(time.Second))
	if !ok {
		t.Error("the probe is refused")
	}
	b.leave(p, now.Add(time.Second), healthUp, nil)
	if b.State() != BreakerClosed || told != 3 {
		t.Errorf("the state is %s, told %d times", b.State(), told)
	}
	if strings.Count(log.String(), "OnChange panicked") != 3 || !strings.Contains(log.String(), "stack=") || !strings.Contains(log.String(), "nobody wants to know") {
		t.Errorf("logged %s", log)
	}
}

func TestNilBreakerLetsEverythingPass(t *testing.T) {
	t.Parallel()
	var b *Breaker
	for range 10 {
		p, wait, ok := b.enter(time.Time{})
		if !ok || wait != 0 {
			t.Fatal("refused")
		}
		b.leave(p, time.Time{}, healthDown, nil)
	}
}

func TestHealthOfARequest(t *testing.T) {
	t.Parallel()
	state := func(code string) error { return &pgconn.PgError{Code: code} }
	failed := func(status int, err error) Report { return Report{Result: ResultFailed, Status: status, Err: err} }
	for name, c := range map[string]struct {
		report Report
		ended  error
		took   time.Duration
		want   health
	}{
		"committed":                       {report: Report{Result: ResultProcessed}, want: healthUp},
		"committed after the deadline":    {report: Report{Result: ResultProcessed}, ended: context.DeadlineExceeded, want: healthUp},
		"ignored":                         {report: Report{Result: ResultIgnored}, want: healthUp},
		"duplicate":                       {report: Report{Result: ResultDuplicate}},
		"in flight":                       {report: Report{Result: ResultInFlight}},
		"no database":                     {report: Report{Result: ResultUnavailable, Err: errors.New("refused")}, want: healthDown},
		"client gone":                     {report: Report{Result: ResultUnavailable, Err: context.Canceled}, ended: context.Canceled},
		"client gone after long":          {report: Report{Result: ResultUnavailable, Err: context.Canceled}, ended: context.Canceled, took: time.Second, want: healthDown},
		"conflict at the start":           {report: Report{Result: ResultUnavailable, Err: state("40001")}},
		"refused by the handler":          {report: failed(404, nil), want: healthUp},
		"500":                             {report: failed(500, nil)},
		"panic":                           {report: failed(500, &panicError{cause: 1})},
		"aborted":                         {report: failed(0, http.ErrAbortHandler)},
		"502":                             {report: failed(502, nil), want: healthDown},
		"503":                             {report: failed(503, nil), want: healthDown},
		"504":                             {report: failed(504, nil), want: healthDown},
		"503 without the client":          {report: failed(503, nil), ended: context.Canceled},
		"503 after the client left late":  {report: failed(503, nil), ended: context.Canceled, took: time.Second, want: healthDown},
		"503 for a conflict":              {report: failed(503, state("40P01"))},
		"500 at the deadline":             {report: failed(500, nil), ended: context.DeadlineExceeded, want: healthDown},
		"500 without the client":          {report: failed(500, nil), ended: context.Canceled},
		"commit: constraint":              {report: Report{Result: ResultCommitFailed, Err: state("23503")}},
		"commit: conflict":                {report: Report{Result: ResultCommitFailed, Err: state("40001")}},
		"commit: disk full":               {report: Report{Result: ResultCommitFailed, Err: state("53100")}, want: healthDown},
		"commit: shutdown":                {report: Report{Result: ResultCommitFailed, Err: state("57P01")}, want: healthDown},
		"commit: statement timeout":       {report: Report{Result: ResultCommitFailed, Err: state("57014")}},
		"commit: connection lost":         {report: Report{Result: ResultCommitFailed, Err: errors.New("EOF")}, want: healthDown},
		"commit: the handler's own fault": {report: Report{Result: ResultCommitFailed, Err: errAborted}},
		"commit: ended by the handler":    {report: Report{Result: ResultCommitFailed, Err: errEnded}},
		"commit: a name in its place":     {report: Report{Result: ResultCommitFailed, Err: errNotCommit}},
	} {
		got, cause := healthOf(c.report, c.ended, c.took)
		if got != c.want || (cause != nil) != (got == healthDown) {
			t.Errorf("%s: %v because of %v, want %v", name, got, cause, c.want)
		}
	}
}

func TestErrorsThatTellOfADependency(t *testing.T) {
	t.Parallel()
	down := errors.New("bank is down")
	for name, c := range map[string]struct {
		err  error
		down bool
	}{
		"none": {nil, false}, "any": {down, false}, "marked": {DependencyDown(down), true}, "later": {RetryAfter(down, time.Second), true},
		"permanent": {Permanent(down), false}, "outermost": {Permanent(DependencyDown(down)), false}, "ignored": {Ignore("x"), false},
	} {
		if got := judge(c.err); got.down != c.down {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if err := DependencyDown(down); !errors.Is(err, down) || err.Error() != down.Error() || DependencyDown(nil) != nil {
		t.Errorf("error %v", err)
	}
}
