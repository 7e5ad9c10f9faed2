package policy

import (
	"testing"
	"time"

	"pgregory.net/rapid"
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
	if !p.Looking(now) {
		t.Fatal("a relay that becomes idle looks once more: a transaction that began before does not notify")
	}
	var waits []time.Duration
	for range 8 {
		p.Claimed(now, 0, 0)
		wait := p.Wait(now)
		waits = append(waits, wait)
		if wait < 0 {
			break
		}
		now = now.Add(wait)
		if !p.Looking(now) {
			t.Fatalf("not looking after %v", waits)
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

	p.Look() // the safety tick
	if !p.Looking(now) {
		t.Error("the tick does not make it look")
	}
	p.Claimed(now, 0, 0)
	if p.Wait(now) != -1 {
		t.Error("after a tick that found nothing, a tick is waited for again")
	}

	p.Notified(now, 1)
	if p.Idle || !p.Looking(now) {
		t.Error("a notification ends idleness, and is answered at once")
	}
	p.Claimed(now, 3, 0)
	if wait := p.Wait(now); wait != quietBeforeIdle {
		t.Errorf("waits %s, until it is idle or woken", wait)
	}
	if armed, changed := p.Declaration(now); !armed || changed {
		t.Error("a relay with little to do is not armed any more")
	}
	if p.BecomeIdle(now.Add(quietBeforeIdle - 1)) {
		t.Error("idle too early")
	}
	if !p.BecomeIdle(now.Add(quietBeforeIdle)) || !p.Looking(now) {
		t.Error("not idle after the quiet time, or without a look")
	}
}

// A relay is armed at a low load and polls at a high one, for as long as that lasts.
// An event to an armed relay every second costs one look besides its own, not a series of them.
func TestIdlenessOfARelayThatHasBeenArmedForLong(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	looks := func(p *Pace) (n int) { // from one event to the next look that nothing but a notification asks for
		p.Notified(now, 1)
		p.Claimed(now, 1, 0)
		now = now.Add(quietBeforeIdle)
		p.BecomeIdle(now)
		for ; p.Looking(now) && n < 100; n++ {
			p.Claimed(now, 0, 0)
			if wait := p.Wait(now); wait >= 0 {
				now = now.Add(wait)
			}
		}
		return n
	}
	p := &Pace{Poll: 5 * time.Second}
	p.Declared(now, true)
	if n := looks(p); n < 5 {
		t.Errorf("%d looks of a relay that was armed just before, want one soon and others ever later", n)
	}
	now = now.Add(p.Poll)
	if n := looks(p); n != 1 {
		t.Errorf("%d looks of a relay that was armed long before, want 1", n)
	}
	p.Lapsed(now)
	if n := looks(p); n < 5 {
		t.Errorf("%d looks after producers did not notify for a while, want one soon and others ever later", n)
	}
}

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
			if p.Looking(now) {
				p.Claimed(now, 1, 0)
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
	if wait := p.Wait(now); wait > fastPoll {
		t.Errorf("a relay that finds something at each look waits %s", wait)
	}
	p.Claimed(now, 1, 40*time.Millisecond)
	if wait := p.Wait(now); wait > fastPoll {
		t.Errorf("a relay of which a single look was held up waits %s", wait)
	}
	p.Claimed(now, 1, 7*time.Millisecond)
	if wait := p.Wait(now); wait != 7*time.Millisecond-fastPoll {
		t.Errorf("a relay whose looks take 7 ms waits %s between them", wait)
	}
	for range 20 { // the load ends
		p.Claimed(now, 0, 0)
		if wait := p.Wait(now); wait > slowPoll {
			t.Errorf("waits %s and is not armed", wait)
		}
		now = now.Add(p.Wait(now))
	}
	if armed, _ := p.Declaration(now); !armed {
		t.Error("not armed when the load has ended")
	}
}

// A lane that drains its backlog keeps the relay from being idle. Meanwhile the others are looked at as often as if it became so:
// not every producer notifies.
func TestArmedRelayLooksBesideABacklog(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Hour}
	p.Declared(now, true)
	for range 30 { // as many notifications make a look without one rare
		p.Notified(now, 1)
		p.Claimed(now, 1, 0)
	}
	for range 3 {
		end := now.Add(quietBeforeIdle)
		for ; now.Before(end); now = now.Add(10 * time.Millisecond) {
			p.Worked(now)
			if p.BecomeIdle(now) {
				t.Fatal("idle while it works")
			}
		}
		if !p.Looking(now) {
			t.Fatalf("does not look for %s", p.NextLook.Sub(now))
		}
		p.Claimed(now, 0, 0)
	}
}

// A relay that hears no notifications is never armed, polls, and becomes idle.
func TestPaceOfADeafRelay(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: time.Second, Deaf: true}
	p.Claimed(now, 1, 0)
	if armed, changed := p.Declaration(now); armed || changed {
		t.Error("armed")
	}
	if wait := p.Wait(now); wait != fastPoll {
		t.Errorf("waits %s", wait)
	}
	if now = now.Add(quietBeforeIdle); !p.BecomeIdle(now) {
		t.Error("not idle")
	}
	p = Pace{Poll: time.Second, Armed: true, Deaf: true} // its session has stopped to listen
	if armed, changed := p.Declaration(now); armed || !changed {
		t.Error("still armed")
	}
}

// Two relays hear every notification. One that leaves the work to others must not arm the busy producers again and again.
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

// Whatever happens in whatever order, over days and years, the relay keeps looking: a wait is short, or it is left to
// the tick, and then producers notify, or notifications are never heard.
func TestPaceAlwaysComesBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := Pace{Poll: time.Duration(rapid.Int64Range(int64(time.Second), int64(24*time.Hour)).Draw(t, "poll"))}
		p.Deaf = rapid.Bool().Draw(t, "deaf")
		now := time.Unix(1_800_000_000, 0)
		var work time.Time
		for range rapid.IntRange(1, 300).Draw(t, "events") {
			switch rapid.SampledFrom([]string{"turn", "found", "notify", "many", "tick", "days", "years"}).Draw(t, "event") {
			case "turn":
				if armed, changed := p.Declaration(now); changed {
					p.Declared(now, armed)
					if armed && !p.Looking(now) {
						t.Fatal("no look after the declaration")
					}
				}
				if p.BecomeIdle(now) && (now.Sub(work) < quietBeforeIdle || !p.Looking(now)) {
					t.Fatalf("idle %s after work, looking: %t", now.Sub(work), p.Looking(now))
				}
				if p.Looking(now) {
					p.Claimed(now, 0, time.Millisecond)
				}
			case "found":
				p.Claimed(now, 1, time.Millisecond)
				work = now
			case "notify":
				p.Notified(now, 1)
				work = now
			case "many":
				p.Notified(now, 1000)
				work = now
			case "tick":
				p.Look()
			case "days":
				now = now.Add(time.Duration(rapid.IntRange(1, 30).Draw(t, "days")) * 24 * time.Hour)
			case "years":
				now = now.Add(200 * 365 * 24 * time.Hour)
			}
			wait := p.Wait(now)
			switch {
			case p.woken && (wait < 0 || wait > maxVain):
				t.Fatalf("a notification waits %s", wait)
			case wait < 0 && !p.Armed && !p.Deaf:
				t.Fatal("a relay that is not armed waits for a notification that is not sent")
			case wait > max(p.Poll, maxQuietBeforeArm/16, quietBeforeIdle):
				t.Fatalf("waits %s, longer than %s", wait, p.Poll)
			case p.Interval < 0 || p.Interval > 2*p.Poll || p.quiet > maxQuietBeforeArm || p.vain > maxVain:
				t.Fatalf("interval %s, quiet %s, vain %s", p.Interval, p.quiet, p.vain)
			}
			if wait > 0 {
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(wait)).Draw(t, "passes")))
			}
		}
	})
}

// Producers that are active for a destination that is held, or for other relays, keep waking a relay, which finds nothing.
func TestLooksInVainBecomeRarer(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := Pace{Poll: 5 * time.Second}
	p.Declared(now, true)
	p.Claimed(now, 0, 0)
	looks := 0
	for range 1000 { // notifications in two seconds
		p.Notified(now, 1)
		if now = now.Add(2 * time.Millisecond); p.Looking(now) {
			p.Claimed(now, 0, 0)
			looks++
		}
	}
	if most := int(2*time.Second/maxVain) + 10; looks == 0 || looks > most {
		t.Errorf("%d looks in vain, at most %d are expected", looks, most)
	}
	now = now.Add(maxVain)
	if p.Notified(now, 1); !p.Looking(now) {
		t.Error("long after a look in vain a notification waits")
	}
	p.Claimed(now, 1, 0)
	if p.Notified(now, 1); !p.Looking(now) {
		t.Error("when there is work again, a notification waits")
	}
}
