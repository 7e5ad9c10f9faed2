package agenda

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestAgenda(t *testing.T) {
	t.Parallel()
	const ms = time.Millisecond
	type entry struct {
		cause Cause
		in    time.Duration
	}
	now := time.Unix(1_000_000, 0)
	for name, c := range map[string]struct {
		entries []entry
		after   time.Duration
		due     Cause
		wait    time.Duration // afterwards
		next    Cause
	}{
		"nothing":                                 {},
		"nothing is due yet":                      {entries: []entry{{CauseRetry, 50 * ms}, {CauseTick, 70 * ms}}, after: 49 * ms, wait: TurnGap, next: CauseRetry},
		"what is due is removed":                  {entries: []entry{{CauseRetry, 50 * ms}, {CauseTick, 70 * ms}}, after: 50 * ms, due: CauseRetry, wait: 20 * ms, next: CauseTick},
		"several at once":                         {entries: []entry{{CauseRetry, 1 * ms}, {CausePoll, 2 * ms}, {CauseIdle, 9 * ms}}, after: 5 * ms, due: CausePoll | CauseRetry, wait: 4 * ms, next: CauseIdle},
		"the earlier time of a cause counts":      {entries: []entry{{CauseBreaker, 50 * ms}, {CauseBreaker, 30 * ms}, {CauseBreaker, 40 * ms}}, wait: 30 * ms, next: CauseBreaker},
		"an urgent cause may follow at once":      {entries: []entry{{CauseBreaker, -ms}, {CauseCutRange, -ms}}, after: -2 * ms, wait: ms, next: CauseCutRange},
		"another one leaves a gap":                {entries: []entry{{CauseBreaker, 1 * ms}, {CauseTick, 21 * ms}}, wait: TurnGap, next: CauseBreaker},
		"but is done with a turn that comes soon": {entries: []entry{{CauseBreaker, 1 * ms}, {CausePoll, 2 * ms}}, after: 2 * ms, due: CauseBreaker | CausePoll},
	} {
		var a Agenda
		for _, e := range c.entries {
			a.At(e.cause, now.Add(e.in))
		}
		testkit.Equal(t, name+": due", a.Take(now.Add(c.after)), c.due)
		if wait, next := a.Next(now.Add(c.after)); wait != c.wait || next != c.next {
			t.Errorf("%s: next %s in %s, want %s in %s", name, next, wait, c.next, c.wait)
		}
	}
}

// A turn that fails is repeated with all that was due. What was registered meanwhile stays.
func TestAgendaTakesBackWhatWasDue(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	var a Agenda
	a.At(CauseEntry|CauseTick, now)
	due := a.Take(now)
	a.At(CauseTick, now.Add(time.Hour))
	a.At(CauseScan, now)
	a.At(due, now)
	if due := a.Take(now); due != CauseEntry|CauseTick|CauseScan {
		t.Errorf("%s is due", due)
	}
	if _, next := a.Next(now); next != 0 {
		t.Errorf("%s is left", next)
	}
	if last := CauseDamage; last != 1<<(len(causeNames)-1) || last.String() != "damage" {
		t.Errorf("%d names; the last cause is %q", len(causeNames), last)
	}
}
