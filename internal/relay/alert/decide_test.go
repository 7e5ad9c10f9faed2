package alert

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A timeline is what happens to one alert and one channel, second by second, without a database:
// the row changes as the trigger and the store change it.
type timeline struct {
	state State
	open  bool                  // there is a row
	fails func(second int) bool // the channel
	dies  bool                  // the relay, at its first message
	sent  []string
}

var dawn = time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)

func at(second int) time.Time { return dawn.Add(time.Duration(second) * time.Second) }

// happen applies what a step of a table says: begin N, grow N, end, ack, silence SECONDS.
func (l *timeline) happen(second int, what string, n int) {
	s, now := &l.state, at(second)
	switch what {
	case "begin":
		if l.open && !s.ResolvedAt.IsZero() { // as the trigger does
			s.Returned, s.Acknowledged = s.Returned+1, false
		} else if !l.open {
			*s = State{Rule: s.Rule, SilentUntil: s.SilentUntil}
		}
		l.open, s.OpenedAt, s.ResolvedAt, s.Level = true, now, time.Time{}, int64(n)
	case "grow":
		s.Level = int64(n)
	case "end":
		s.ResolvedAt = now
	case "ack":
		s.Acknowledged = true
	case "silence":
		s.SilentUntil = now.Add(time.Duration(n) * time.Second)
	}
}

// decide does what a relay does at its beat.
func (l *timeline) decide(second int, p Policy) {
	if !l.open {
		return
	}
	s, now := &l.state, at(second)
	step := p.Decide(now, *s)
	if step.Over {
		l.open = false
	}
	if !step.Send {
		return
	}
	what := "lasts"
	if !s.ResolvedAt.IsZero() {
		what = "ended"
	}
	if s.flaps() {
		what = "flaps, " + what
	}
	l.sent = append(l.sent, fmt.Sprintf("%s %s %d", time.Duration(second)*time.Second, what, s.Level))
	switch {
	case l.dies:
		l.dies, s.Tried, s.BusyUntil = false, true, now.Add(holdFor)
	case l.fails != nil && l.fails(second):
		l.sent = l.sent[:len(l.sent)-1]
		s.Tried, s.BusyUntil = true, now.Add(Retry)
	case s.ResolvedAt.IsZero():
		s.SentAt, s.SentLevel, s.Tried, s.BusyUntil = now, s.Level, false, time.Time{}
	default:
		s.SentAt, s.Tried, s.BusyUntil = time.Time{}, false, time.Time{}
	}
}

// play returns what the channel gets, as "45s lasts 8".
func (l *timeline) play(p Policy, steps string) string {
	type step struct {
		second int
		what   string
		n      int
	}
	var all []step
	last := 0
	for text := range strings.SplitSeq(steps, "; ") {
		var s step
		_, _ = fmt.Sscanf(text, "%d %s %d", &s.second, &s.what, &s.n)
		all, last = append(all, s), max(last, s.second)
	}
	for second := 0; second <= last+600; second++ {
		for _, s := range all {
			if s.second == second {
				l.happen(second, s.what, s.n)
			}
		}
		l.decide(second, p)
	}
	return strings.Join(l.sent, ", ")
}

// When an alert is sent, and with which numbers, in every course that a condition may take.
func TestTimelines(t *testing.T) {
	t.Parallel()
	always := func(int) bool { return true }
	blips := func(n, every, lasting int) string {
		var steps []string
		for i := range n {
			steps = append(steps, fmt.Sprintf("%d begin 1; %d end", i*every, i*every+lasting))
		}
		return strings.Join(steps, "; ")
	}
	table := "| course | what happens | what is sent |\n|---|---|---|\n"
	for _, c := range []struct {
		name  string
		rule  string // breaker_open without one
		steps string
		fails func(int) bool
		dies  bool
		never bool // Repeat
		want  string
	}{
		{name: "a deploy of two seconds wakes no one", steps: "0 begin 8; 2 end", want: ""},
		{name: "nor does a blip of forty", steps: "0 begin 8; 40 end", want: ""},
		{name: "nor two blips", steps: blips(2, 60, 20), want: ""},
		{name: "an outage is sent once it has lasted", steps: "0 begin 8; 600 end", want: "45s lasts 8, 10m0s ended 8"},
		{name: "with the number of that moment", steps: "0 begin 8; 40 grow 1483; 600 end", want: "45s lasts 1483, 10m0s ended 1483"},
		{name: "its end is sent at once", steps: "0 begin 8; 46 end", want: "45s lasts 8, 46s ended 8"},
		{name: "an outage minutes after a blip", steps: "0 begin 1; 2 end; 420 begin 9; 900 end", want: "7m45s lasts 9, 15m0s ended 9"},
		{name: "an outage right after a recovery", steps: "0 begin 1; 60 end; 70 begin 9; 200 end", want: "45s lasts 1, 1m0s ended 1, 1m55s lasts 9, 3m20s ended 9"},
		{name: "one that lasts is repeated, as it is", steps: "0 begin 100; 3000 grow 150; 4000 end", want: "45s lasts 100, 1h0m45s lasts 150, 1h6m40s ended 150"},
		{name: "one that is twice as bad is, sooner", steps: "0 begin 8; 60 grow 1483; 1800 end", want: "45s lasts 8, 15m45s lasts 1483, 30m0s ended 1483"},
		{name: "one that becomes so later is within a minute", steps: "0 begin 8; 1210 grow 20; 1800 end", want: "45s lasts 8, 20m10s lasts 20, 30m0s ended 20"},
		{name: "nothing is repeated if no one wants it", steps: "0 begin 8; 60 grow 1483; 9000 end", never: true, want: "45s lasts 8, 2h30m0s ended 1483"},
		{name: "blips that flap are one alert", steps: blips(8, 60, 20), want: "3m0s flaps, lasts 1, 12m20s flaps, ended 1"},
		{name: "outages that flap are one from the fourth on", steps: blips(7, 120, 60), want: "45s lasts 1, 1m0s ended 1, 2m45s lasts 1, 3m0s ended 1, 4m45s lasts 1, 5m0s ended 1, 6m0s flaps, lasts 1, 18m0s flaps, ended 1"},
		{name: "blips far apart do not flap", steps: blips(5, 400, 20), want: ""},
		{name: "an outage after a flap that was over", steps: blips(4, 60, 20) + "; 1000 begin 7; 1100 end", want: "3m0s flaps, lasts 1, 8m20s flaps, ended 1, 17m25s lasts 7, 18m20s ended 7"},
		{name: "a relay that dies while it sends", steps: "0 begin 8; 60 grow 12; 600 end", dies: true, want: "45s lasts 8, 1m30s lasts 12, 10m0s ended 12"},
		{name: "one that dies, and the end comes first", steps: "0 begin 8; 60 end", dies: true, want: "45s lasts 8, 1m30s ended 8"},
		{name: "a channel that is down gets it when it is up", steps: "0 begin 8; 70 grow 500; 600 end", fails: func(s int) bool { return s < 100 }, want: "1m45s lasts 500, 10m0s ended 500"},
		{name: "one that was down all the time hears the end", steps: "0 begin 8; 90 end", fails: func(s int) bool { return s < 120 }, want: "2m15s ended 8"},
		{name: "one that is never up", steps: "0 begin 8; 90 end", fails: always, want: ""},
		{name: "who knows it already is not told", steps: "0 begin 8; 10 ack; 9000 end", want: ""},
		{name: "who knows it is not reminded, but told its end", steps: "0 begin 8; 60 ack; 60 grow 1483; 9000 end", want: "45s lasts 8, 2h30m0s ended 1483"},
		{name: "what returns is not known", steps: "0 begin 8; 60 ack; 100 end; 130 begin 9; 300 end", want: "45s lasts 8, 1m40s ended 8, 2m55s lasts 9, 5m0s ended 9"},
		{name: "a silence hides what ends within it", steps: "0 silence 900; 10 begin 8; 600 end", want: ""},
		{name: "and not what outlasts it", steps: "0 silence 900; 10 begin 8; 500 grow 99; 1000 end", want: "15m0s lasts 99, 16m40s ended 99"},
		{name: "an end is told within a silence", steps: "0 begin 8; 60 silence 900; 300 end", want: "45s lasts 8, 5m0s ended 8"},
		{name: "failures gather for some seconds", rule: RuleFailed, steps: "0 begin 1; 3 grow 501; 300 end", want: "5s lasts 501, 5m0s ended 501"},
		{name: "what took minutes to measure waits no longer", rule: RuleLag, steps: "0 begin 10; 60 end", want: "0s lasts 10, 1m0s ended 10"},
		{name: "relays differ during a deploy", rule: RuleRelaysDiffer, steps: "0 begin 2; 240 end", want: ""},
		{name: "a rule with its own wait", rule: RuleParked, steps: "0 begin 2; 240 end", want: "2m0s lasts 2, 4m0s ended 2"},
	} {
		p := Config{AfterByRule: map[string]time.Duration{RuleParked: 2 * time.Minute}}.WithDefaults().Policy()
		if c.never {
			p.Repeat = -1
		}
		l := timeline{fails: c.fails, dies: c.dies}
		if l.state.Rule = c.rule; c.rule == "" {
			l.state.Rule = RuleBreakerOpen
		}
		if got := l.play(p, c.steps); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", c.name, got, c.want)
		} else {
			table += fmt.Sprintf("| %s | %s | %s |\n", c.name, inWords(c.steps, c.dies, c.fails), cmp.Or(got, "nothing"))
		}
		if last := l.state.ResolvedAt; !l.open || c.fails != nil && c.fails(1<<30) {
			continue
		} else if !last.IsZero() {
			t.Errorf("%s: the alert is kept", c.name)
		}
	}
	// The decision shows the table to people: what it says is what was just played.
	decision, err := os.ReadFile("../../../docs/decisions/0015-alerts.md")
	testkit.Must(t, err)
	if !strings.Contains(string(decision), table) {
		t.Errorf("docs/decisions/0015-alerts.md lacks the table as it was played:\n%s", table)
	}
}

// inWords returns the steps of a timeline for people.
func inWords(steps string, dies bool, fails func(int) bool) string {
	var all []string
	if dies {
		all = append(all, "the relay dies at its first message")
	}
	if fails != nil {
		up := 0
		for up < 3600 && fails(up) {
			up++
		}
		if all = append(all, "the channel is down"); up < 3600 {
			all[len(all)-1] += " until " + (time.Duration(up) * time.Second).String()
		}
	}
	for text := range strings.SplitSeq(steps, "; ") {
		var second, n int
		var what string
		_, _ = fmt.Sscanf(text, "%d %s %d", &second, &what, &n)
		words := map[string]string{
			"begin": fmt.Sprintf("begins with %d", n), "grow": fmt.Sprintf("becomes %d", n), "end": "ends", "ack": "is acknowledged",
			"silence": "is silenced for " + (time.Duration(n) * time.Second).String(),
		}
		all = append(all, (time.Duration(second)*time.Second).String()+" "+words[what])
	}
	return strings.Join(all, ", ")
}

// Whatever the state, a decision names the next moment at which it may come out otherwise: what is
// looked at then and not before is sent at the same moment as what is looked at every second.
func TestNothingIsMissedBetweenDecisions(t *testing.T) {
	t.Parallel()
	p := Config{}.WithDefaults().Policy()
	for returned := range 5 {
		for _, resolved := range []time.Time{{}, at(90)} {
			for _, sent := range []time.Time{{}, at(45)} {
				for _, silent := range []time.Time{{}, at(400)} {
					for _, busy := range []time.Time{{}, at(200)} {
						s := State{
							Rule: RuleBreakerOpen, OpenedAt: at(0), ResolvedAt: resolved, Returned: returned, Level: 1, SilentUntil: silent,
							SentAt: sent, SentLevel: 1, Tried: !busy.IsZero(), BusyUntil: busy,
						}
						first := func(next func(now time.Time, step Step) time.Time) string {
							for now := at(100); now.Before(at(8000)); {
								step := p.Decide(now, s)
								if step.Send || step.Over {
									return fmt.Sprint(now.Sub(dawn), step.Send, step.Over)
								}
								if now = next(now, step); now.IsZero() {
									return "never"
								}
							}
							return "never"
						}
						hops := first(func(_ time.Time, step Step) time.Time { return step.Next })
						seconds := first(func(now time.Time, _ Step) time.Time { return now.Add(time.Second) })
						if hops != seconds {
							t.Errorf("%+v: %s by its own word, %s by looking", s, hops, seconds)
						}
					}
				}
			}
		}
	}
}

// Two destinations are two alerts: the one's state is no part of the other's decision, so their
// order does not matter.
func TestDestinationsAreDecidedApart(t *testing.T) {
	t.Parallel()
	p := Config{}.WithDefaults().Policy()
	play := func(steps string) string {
		l := timeline{state: State{Rule: RuleBreakerOpen}}
		return l.play(p, steps)
	}
	got := []string{play("0 begin 1; 600 end"), play("30 begin 5; 50 end; 60 begin 7; 600 end")}
	if want := []string{"45s lasts 1, 10m0s ended 1", "1m45s lasts 7, 10m0s ended 7"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}
