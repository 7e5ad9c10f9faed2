package agenda

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestPaceOfAnIdlingRelay(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Second}

	if armed, changed := p.Declaration(now); !armed || !changed {
		t.Fatal("a relay that never saw work is armed, and has to say so")
	}
	p.Declared(now, true)
	if !p.BecomeIdle(now) || p.BecomeIdle(now) {
		t.Fatal("a relay that never saw work becomes idle, once")
	}
	if !isDue(&p, now) {
		t.Fatal("a relay that becomes idle polls once more: a transaction that began before does not notify")
	}
	var waits []time.Duration
	for range 8 {
		p.Polled(now, 0, 0)
		wait := waitOf(&p, now)
		waits = append(waits, wait)
		if wait < 0 {
			break
		}
		now = now.Add(wait)
		if !isDue(&p, now) {
			t.Fatalf("no poll after %v", waits)
		}
	}
	want := []time.Duration{50, 100, 200, 400, -1}
	for i, w := range want {
		if w > 0 {
			w *= time.Millisecond
		}
		if i >= len(waits) || waits[i] != w {
			t.Fatalf("waits %v, want %v (ms)", waits, want)
		}
	}

	p.Polled(now, 0, 0) // at the safety tick
	if waitOf(&p, now) != -1 {
		t.Error("after a tick that found nothing, a tick is waited for again")
	}

	p.Notified(now, 1)
	if p.Idle || !isDue(&p, now) {
		t.Error("a notification ends idleness, and is answered at once")
	}
	p.Polled(now, 3, 0)
	if wait := waitOf(&p, now); wait != quietBeforeIdle {
		t.Errorf("waits %s, until it is idle or woken", wait)
	}
	if armed, changed := p.Declaration(now); !armed || changed {
		t.Error("a relay with little to do is not armed any more")
	}
	if p.BecomeIdle(now.Add(quietBeforeIdle - 1)) {
		t.Error("idle too early")
	}
	if !p.BecomeIdle(now.Add(quietBeforeIdle)) || !isDue(&p, now) {
		t.Error("not idle after the quiet time, or without a poll")
	}
}

// An event to an armed relay every second costs one poll besides its own, not a series of them.
func TestIdlenessOfARelayThatHasBeenArmedForLong(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	polls := func(p *Pace) (n int) { // from one event to the next poll that nothing but a notification asks for
		p.Notified(now, 1)
		p.Polled(now, 1, 0)
		now = now.Add(quietBeforeIdle)
		p.BecomeIdle(now)
		for ; isDue(p, now) && n < 100; n++ {
			p.Polled(now, 0, 0)
			if wait := waitOf(p, now); wait >= 0 {
				now = now.Add(wait)
			}
		}
		return n
	}
	p := &Pace{Poll: 5 * time.Second}
	p.Declared(now, true)
	if n := polls(p); n < 5 {
		t.Errorf("%d polls of a relay that was armed just before, want one soon and others ever later", n)
	}
	now = now.Add(p.Poll)
	testkit.Equal(t, "polls of a relay that was armed long before", polls(p), 1)
	p.NotifyGap(now)
	if n := polls(p); n < 5 {
		t.Errorf("%d polls after producers did not notify for a while, want one soon and others ever later", n)
	}
}

// A relay is armed at a low load and polls at a high one, for as long as that lasts.
func TestPaceFollowsTheLoad(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Second}
	p.Declared(now, true)
	commits := func(n int, every time.Duration) (armed bool) {
		for range n {
			now = now.Add(every)
			if p.Armed {
				p.Notified(now, 1)
			}
			if isDue(&p, now) {
				p.Polled(now, 1, 0)
			}
			if armed, changed := p.Declaration(now); changed {
				p.Declared(now, armed)
			}
		}
		return p.Armed
	}
	if !commits(1000, 10*time.Millisecond) {
		t.Error("100 commits a second disarm it")
	}
	if commits(1000, time.Millisecond) {
		t.Error("1,000 commits a second leave it armed")
	}
	if wait := waitOf(&p, now); wait > fastPoll {
		t.Errorf("a relay that finds something at each poll waits %s", wait)
	}
	p.Polled(now, 1, 40*time.Millisecond)
	if wait := waitOf(&p, now); wait > fastPoll {
		t.Errorf("a relay of which a single poll was held up waits %s", wait)
	}
	p.Polled(now, 1, 7*time.Millisecond)
	if wait := waitOf(&p, now); wait != 7*time.Millisecond-fastPoll {
		t.Errorf("a relay whose polls take 7 ms waits %s between them", wait)
	}
	for range 40 { // the load ends
		p.Polled(now, 0, 0)
		if wait := waitOf(&p, now); wait > slowPoll {
			t.Errorf("waits %s and is not armed", wait)
		}
		now = now.Add(waitOf(&p, now))
	}
	if armed, _ := p.Declaration(now); !armed {
		t.Error("not armed when the load has ended")
	}
}

// Where a commit takes long, producers that notify wait for each other, and are never many in a
// second. An armed relay disarms then, is armed again for short whiles alone, and asks seldom.
func TestPaceOfProducersThatWaitForEachOther(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Second}
	p.Declared(now, true)
	var armed time.Duration
	asked := 0
	for end := now.Add(20 * time.Second); now.Before(end); now = now.Add(12 * time.Millisecond) { // a commit each
		if p.Armed {
			armed += 12 * time.Millisecond
			p.Notified(now, 1)
		}
		if isDue(&p, now) {
			p.Polled(now, 1, 0)
		}
		if p.MustCheckQueue(now) {
			asked++
			p.QueueChecked(now, true)
		}
		if declare, changed := p.Declaration(now); changed {
			p.Declared(now, declare)
		}
	}
	if armed > 6*time.Second || asked == 0 || asked > 40 {
		t.Errorf("armed for %s of 20 s, asked %d times whether producers wait", armed, asked)
	}
	p = Pace{Poll: time.Second, Armed: true}
	for range 10 {
		p.Notified(now, 0) // a sweep
		if p.MustCheckQueue(now) {
			t.Fatal("asks although no producer has notified")
		}
		now = now.Add(time.Second)
	}
	asked = 0
	for range 1000 {
		p.Notified(now, 1)
		if p.MustCheckQueue(now) {
			asked++
			p.QueueChecked(now, false)
		}
		now = now.Add(time.Millisecond)
	}
	if armed, _ := p.Declaration(now); armed || asked > 10 {
		t.Errorf("armed: %v at a high load; asked %d times in a second", armed, asked)
	}
	p = Pace{Poll: time.Second, Armed: true}
	for n := range 100 { // half of the checks meet one who waits for a short commit
		p.Notified(now, 1)
		p.QueueChecked(now, n%2 == 0)
		now = now.Add(queueStep)
	}
	if armed, _ := p.Declaration(now); !armed {
		t.Error("disarmed by short waits")
	}
}

// At hundreds of events a second pauses of some milliseconds are usual. What comes after one waits
// for a fraction of it, in any lane.
func TestPolledWorkDoesNotWaitAsLongAsThePauseBeforeIt(t *testing.T) {
	t.Parallel()
	start := time.Unix(1_000_000, 0)
	for _, most := range []struct{ pause, wait time.Duration }{
		{10 * time.Millisecond, busyPoll}, {15 * time.Millisecond, busyPoll}, {40 * time.Millisecond, 6 * time.Millisecond}, {80 * time.Millisecond, 12 * time.Millisecond},
	} {
		for pause := time.Millisecond; pause <= most.pause; pause += 100 * time.Microsecond {
			p := Pace{Poll: time.Second}
			p.Polled(start, 1, 0)
			now, polls := start.Add(waitOf(&p, start)), 1
			for ; now.Before(start.Add(pause)); now = now.Add(waitOf(&p, now)) {
				p.Polled(now, 0, 0)
				polls++
			}
			if wait := now.Sub(start.Add(pause)); wait > most.wait || polls > 4+int(pause/busyPoll) {
				t.Fatalf("after a pause of %s work waits %s; %d polls meanwhile", pause, wait, polls)
			}
		}
	}
}

// A lane that drains its backlog keeps the relay from being idle. Meanwhile it polls for the others
// as often as if it became so: not every producer notifies.
func TestArmedRelayPollsBesideABacklog(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Hour}
	p.Declared(now, true)
	for range 30 { // as many notifications make a poll without one rare
		p.Notified(now, 1)
		p.Polled(now, 1, 0)
	}
	for range 3 {
		end := now.Add(quietBeforeIdle)
		for ; now.Before(end); now = now.Add(10 * time.Millisecond) {
			p.Worked(now)
			if p.BecomeIdle(now) {
				t.Fatal("idle while it works")
			}
		}
		if !isDue(&p, now) {
			t.Fatalf("does not poll for %s", p.NextPoll.Sub(now))
		}
		p.Polled(now, 0, 0)
	}
}

// A relay that cannot listen is never armed, polls, and becomes idle.
func TestPaceOfARelayThatCannotListen(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Second, CannotListen: true}
	p.Polled(now, 1, 0)
	if armed, changed := p.Declaration(now); armed || changed {
		t.Error("armed")
	}
	testkit.Equal(t, "waits", waitOf(&p, now), fastPoll)
	if now = now.Add(quietBeforeIdle); !p.BecomeIdle(now) {
		t.Error("not idle")
	}
	p = Pace{Poll: time.Second, Armed: true, CannotListen: true} // its session has stopped to listen
	if armed, changed := p.Declaration(now); armed || !changed {
		t.Error("still armed")
	}
}

// Two relays hear every notification. One that leaves the work to others must not arm the busy
// producers again and again.
func TestArmingInVainBecomesRarer(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: 5 * time.Second}
	for _, want := range []time.Duration{250, 500, 1000, 2000, 4000, 4000, 4000} {
		want *= time.Millisecond
		p.Declared(now, true)
		p.Notified(now, 1000)
		if armed, changed := p.Declaration(now); armed || !changed {
			t.Fatal("1,000 notifications at once leave it armed")
		}
		p.Declared(now, false)
		if armed, _ := p.Declaration(now.Add(want - 1)); armed {
			t.Fatalf("armed before %s", want)
		}
		now = now.Add(want)
		if armed, _ := p.Declaration(now); !armed {
			t.Fatalf("not armed after %s", want)
		}
	}
	p.Declared(now, true)
	now = now.Add(2 * shortlyArmed)
	p.Notified(now, 1000)
	p.Declaration(now)
	p.Declared(now, false)
	if armed, _ := p.Declaration(now.Add(quietBeforeIdle)); !armed {
		t.Error("an arming that lasted does not reset the waiting")
	}
}

// Whatever happens in whatever order, over days and years, the relay keeps polling: a wait is
// short, or it is left to the tick, and then producers notify, or notifications are never heard.
func TestPaceAlwaysComesBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := Pace{Poll: time.Duration(rapid.Int64Range(int64(time.Second), int64(24*time.Hour)).Draw(t, "poll"))}
		p.CannotListen = rapid.Bool().Draw(t, "deaf")
		now := time.Unix(1_800_000_000, 0)
		var work time.Time
		for range rapid.IntRange(1, 300).Draw(t, "events") {
			switch rapid.SampledFrom([]string{"turn", "found", "notify", "many", "tick", "days", "years"}).Draw(t, "event") {
			case "turn":
				if armed, changed := p.Declaration(now); changed {
					p.Declared(now, armed)
					if armed && !isDue(&p, now) {
						t.Fatal("no poll after the declaration")
					}
				}
				if p.BecomeIdle(now) && (now.Sub(work) < quietBeforeIdle || !isDue(&p, now)) {
					t.Fatalf("idle %s after work, poll due: %t", now.Sub(work), isDue(&p, now))
				}
				if isDue(&p, now) {
					p.Polled(now, 0, time.Millisecond)
				}
			case "found":
				p.Polled(now, 1, time.Millisecond)
				work = now
			case "notify":
				p.Notified(now, 1)
				work = now
			case "many":
				p.Notified(now, 1000)
				work = now
			case "tick":
				p.Polled(now, 0, time.Millisecond)
			case "days":
				now = now.Add(time.Duration(rapid.IntRange(1, 30).Draw(t, "days")) * 24 * time.Hour)
			case "years":
				now = now.Add(200 * 365 * 24 * time.Hour)
			}
			wait := waitOf(&p, now)
			switch {
			case p.notified && (wait < 0 || wait > maxEmptyBackoff):
				t.Fatalf("a notification waits %s", wait)
			case wait < 0 && !p.Armed && !p.CannotListen:
				t.Fatal("a relay that is not armed waits for a notification that is not sent")
			case wait > max(p.Poll, maxQuietBeforeArm/16, quietBeforeIdle):
				t.Fatalf("waits %s, longer than %s", wait, p.Poll)
			case p.Interval < 0 || p.Interval > 2*p.Poll || p.quiet > maxQuietBeforeArm || p.emptyBackoff > maxEmptyBackoff:
				t.Fatalf("interval %s, quiet %s, vain %s", p.Interval, p.quiet, p.emptyBackoff)
			}
			if wait > 0 {
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(wait)).Draw(t, "passes")))
			}
		}
	})
}

// Producers that are active for a destination that is held, or for other relays, keep waking a
// relay, which finds nothing.
func TestEmptyPollsBecomeRarer(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: 5 * time.Second}
	p.Declared(now, true)
	p.Polled(now, 0, 0)
	polls := 0
	for range 1000 { // notifications in two seconds
		p.Notified(now, 1)
		if now = now.Add(2 * time.Millisecond); isDue(&p, now) {
			p.Polled(now, 0, 0)
			polls++
		}
	}
	if most := int(2*time.Second/maxEmptyBackoff) + 10; polls == 0 || polls > most {
		t.Errorf("%d polls found nothing, at most %d are expected", polls, most)
	}
	now = now.Add(maxEmptyBackoff)
	if p.Notified(now, 1); !isDue(&p, now) {
		t.Error("long after a poll that found nothing a notification waits")
	}
	p.Polled(now, 1, 0)
	if p.Notified(now, 1); !isDue(&p, now) {
		t.Error("when there is work again, a notification waits")
	}
}

// waitOf returns how long a relay that has nothing else to do waits; negative: for the safety tick.
func waitOf(p *Pace, now time.Time) time.Duration {
	var a Agenda
	p.Plan(&a, now)
	wait, next := a.Next(now)
	if next == 0 {
		return -1
	}
	return wait
}

// isDue reports whether it is time to poll.
func isDue(p *Pace, now time.Time) bool {
	var a Agenda
	p.Plan(&a, now)
	return a.Take(now).Has(CausePoll)
}
