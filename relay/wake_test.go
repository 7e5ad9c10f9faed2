package relay

import (
	"net/http"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestNotifyNeverLosesASweep(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		tokens []bool
		want   bool
	}{
		{"look", []bool{false}, false},
		{"sweep", []bool{true}, true},
		{"look, then sweep", []bool{false, true}, true},
		{"sweep, then look", []bool{true, false}, true},
		{"many", []bool{false, false, true, false, false}, true},
	} {
		w := newWakeup()
		for _, sweep := range c.tokens {
			w.notify(sweep)
		}
		if got := <-w.notified; got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
		select {
		case <-w.notified:
			t.Errorf("%s: more than one token", c.name)
		default:
		}
	}
}

func TestPaceOfAnIdlingRelay(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := pace{poll: time.Second}

	if armed, changed := p.declaration(now); !armed || !changed {
		t.Fatal("a relay that never saw work is armed, and has to say so")
	}
	p.declared(now, true)
	if !p.becomeIdle(now) || p.becomeIdle(now) {
		t.Fatal("a relay that never saw work becomes idle, once")
	}
	if !p.looking(now) {
		t.Fatal("a relay that becomes idle looks once more: a transaction that began before does not notify")
	}
	var waits []time.Duration
	for range 8 {
		p.claimed(now, 0, 0)
		wait := p.wait(now)
		waits = append(waits, wait)
		if wait < 0 {
			break
		}
		now = now.Add(wait)
		if !p.looking(now) {
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

	p.look() // the safety tick
	if !p.looking(now) {
		t.Error("the tick does not make it look")
	}
	p.claimed(now, 0, 0)
	if p.wait(now) != -1 {
		t.Error("after a tick that found nothing, a tick is waited for again")
	}

	p.notified(now, 1)
	if p.idle || !p.looking(now) {
		t.Error("a notification ends idleness, and is answered at once")
	}
	p.claimed(now, 3, 0)
	if wait := p.wait(now); wait != quietBeforeIdle {
		t.Errorf("waits %s, until it is idle or woken", wait)
	}
	if armed, changed := p.declaration(now); !armed || changed {
		t.Error("a relay with little to do is not armed any more")
	}
	if p.becomeIdle(now.Add(quietBeforeIdle - 1)) {
		t.Error("idle too early")
	}
	if !p.becomeIdle(now.Add(quietBeforeIdle)) || !p.looking(now) {
		t.Error("not idle after the quiet time, or without a look")
	}
}

// A relay is armed at a low load and polls at a high one, for as long as that lasts.
func TestPaceFollowsTheLoad(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := pace{poll: time.Second}
	p.declared(now, true)
	commits := func(n int, every time.Duration) (armed bool) {
		for range n {
			now = now.Add(every)
			if p.armed {
				p.notified(now, 1)
			}
			if p.looking(now) {
				p.claimed(now, 1, 0)
			}
			if armed, changed := p.declaration(now); changed {
				p.declared(now, armed)
			}
		}
		return p.armed
	}
	if !commits(1000, 10*time.Millisecond) {
		t.Error("100 commits a second disarm it")
	}
	if commits(1000, time.Millisecond) {
		t.Error("1,000 commits a second leave it armed")
	}
	if wait := p.wait(now); wait > fastPoll {
		t.Errorf("a relay that finds something at each look waits %s", wait)
	}
	p.claimed(now, 1, 7*time.Millisecond)
	if wait := p.wait(now); wait != 7*time.Millisecond-fastPoll {
		t.Errorf("a relay whose looks take 7 ms waits %s between them", wait)
	}
	for range 20 { // the load ends
		p.claimed(now, 0, 0)
		if wait := p.wait(now); wait > slowPoll {
			t.Errorf("waits %s and is not armed", wait)
		}
		now = now.Add(p.wait(now))
	}
	if armed, _ := p.declaration(now); !armed {
		t.Error("not armed when the load has ended")
	}
}

// A lane that drains its backlog keeps the relay from being idle. Meanwhile the others are looked at as often as if it became so:
// not every producer notifies.
func TestArmedRelayLooksBesideABacklog(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := pace{poll: time.Hour}
	p.declared(now, true)
	for range 30 { // as many notifications make a look without one rare
		p.notified(now, 1)
		p.claimed(now, 1, 0)
	}
	for range 3 {
		end := now.Add(quietBeforeIdle)
		for ; now.Before(end); now = now.Add(10 * time.Millisecond) {
			p.worked(now)
			if p.becomeIdle(now) {
				t.Fatal("idle while it works")
			}
		}
		if !p.looking(now) {
			t.Fatalf("does not look for %s", p.nextLook.Sub(now))
		}
		p.claimed(now, 0, 0)
	}
}

// A relay that hears no notifications is never armed, polls, and becomes idle.
func TestPaceOfADeafRelay(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := pace{poll: time.Second, deaf: true}
	p.claimed(now, 1, 0)
	if armed, changed := p.declaration(now); armed || changed {
		t.Error("armed")
	}
	if wait := p.wait(now); wait != fastPoll {
		t.Errorf("waits %s", wait)
	}
	if now = now.Add(quietBeforeIdle); !p.becomeIdle(now) {
		t.Error("not idle")
	}
	p = pace{poll: time.Second, armed: true, deaf: true} // its session has stopped to listen
	if armed, changed := p.declaration(now); armed || !changed {
		t.Error("still armed")
	}
}

// Two relays hear every notification. One that leaves the work to others must not arm the busy producers again and again.
func TestArmingInVainBecomesRarer(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := pace{poll: 5 * time.Second}
	for _, want := range []time.Duration{250, 500, 1000, 2000, 4000, 4000, 4000} {
		want *= time.Millisecond
		p.declared(now, true)
		p.notified(now, 1000)
		if armed, changed := p.declaration(now); armed || !changed {
			t.Fatal("1,000 notifications at once leave it armed")
		}
		p.declared(now, false)
		if armed, _ := p.declaration(now.Add(want - 1)); armed {
			t.Fatalf("armed before %s", want)
		}
		now = now.Add(want)
		if armed, _ := p.declaration(now); !armed {
			t.Fatalf("not armed after %s", want)
		}
	}
	p.declared(now, true)
	now = now.Add(2 * shortlyArmed)
	p.notified(now, 1000)
	p.declaration(now)
	p.declared(now, false)
	if armed, _ := p.declaration(now.Add(quietBeforeIdle)); !armed {
		t.Error("an arming that lasted does not reset the waiting")
	}
}

// Whatever happens in whatever order, over days and years, the relay keeps looking: a wait is short, or it is left to
// the tick, and then producers notify, or notifications are never heard.
func TestPaceAlwaysComesBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := pace{poll: time.Duration(rapid.Int64Range(int64(time.Second), int64(24*time.Hour)).Draw(t, "poll"))}
		p.deaf = rapid.Bool().Draw(t, "deaf")
		now := time.Unix(1_800_000_000, 0)
		var work time.Time
		for range rapid.IntRange(1, 300).Draw(t, "events") {
			switch rapid.SampledFrom([]string{"turn", "found", "notify", "many", "tick", "days", "years"}).Draw(t, "event") {
			case "turn":
				if armed, changed := p.declaration(now); changed {
					p.declared(now, armed)
					if armed && !p.looking(now) {
						t.Fatal("no look after the declaration")
					}
				}
				if p.becomeIdle(now) && (now.Sub(work) < quietBeforeIdle || !p.looking(now)) {
					t.Fatalf("idle %s after work, looking: %t", now.Sub(work), p.looking(now))
				}
				if p.looking(now) {
					p.claimed(now, 0, time.Millisecond)
				}
			case "found":
				p.claimed(now, 1, time.Millisecond)
				work = now
			case "notify":
				p.notified(now, 1)
				work = now
			case "many":
				p.notified(now, 1000)
				work = now
			case "tick":
				p.look()
			case "days":
				now = now.Add(time.Duration(rapid.IntRange(1, 30).Draw(t, "days")) * 24 * time.Hour)
			case "years":
				now = now.Add(200 * 365 * 24 * time.Hour)
			}
			wait := p.wait(now)
			switch {
			case p.woken && (wait < 0 || wait > maxVain):
				t.Fatalf("a notification waits %s", wait)
			case wait < 0 && !p.armed && !p.deaf:
				t.Fatal("a relay that is not armed waits for a notification that is not sent")
			case wait > max(p.poll, maxQuietBeforeArm/16, quietBeforeIdle):
				t.Fatalf("waits %s, longer than %s", wait, p.poll)
			case p.interval < 0 || p.interval > 2*p.poll || p.quiet > maxQuietBeforeArm || p.vain > maxVain:
				t.Fatalf("interval %s, quiet %s, vain %s", p.interval, p.quiet, p.vain)
			}
			if wait > 0 {
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(wait)).Draw(t, "passes")))
			}
		}
	})
}

func TestDuesAreKeptInSteps(t *testing.T) {
	t.Parallel()
	begun := time.Unix(1_000_000, 0)
	d := &dues{}
	if due, next := d.take(begun); due || !next.IsZero() {
		t.Errorf("nothing was put off: %t, %s", due, next)
	}
	for i := range 1000 {
		d.add(begun.Add(time.Duration(i)*time.Microsecond), 5*time.Second)
	}
	d.add(begun, dueAhead+1)
	d.add(begun, time.Second)
	d.add(begun, 0)
	if n := len(d.at); n != 3 {
		t.Errorf("%d times are kept, want 3", n)
	}
	for _, c := range []struct {
		at   time.Duration
		due  bool
		next time.Duration
	}{
		{0, false, dueStep},
		{dueStep, true, time.Second + dueStep},
		{time.Second, false, time.Second + dueStep}, // no earlier than the database has it
		{time.Second + dueStep, true, 5*time.Second + dueStep},
	} {
		if due, next := d.take(begun.Add(c.at)); due != c.due || !next.Equal(begun.Add(c.next)) {
			t.Errorf("after %s: %t, next after %s; want %t, %s", c.at, due, next.Sub(begun), c.due, c.next)
		}
	}
	if due, next := d.take(begun.Add(time.Hour)); !due || !next.IsZero() {
		t.Errorf("the last: %t, next %s", due, next)
	}
}

// A relay that idles between polls looks when a retry is due.
func TestRetryWaitsForNoPoll(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(1, "key")
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.number == 1 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Retry.Schedule = []time.Duration{10 * time.Millisecond}
	r := sessionOf(t, db.config(d))
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	turn := func(c *claimer) (wait time.Duration) {
		wait, err := c.turn(t.Context())
		must(t, err)
		r.senders.wait()
		return wait
	}
	first := r.newClaimer()
	first.pace = pace{poll: time.Hour}
	turn(first)
	r.settler.write(batch{settlements: []settlement{<-r.settler.settlements}})

	far := time.Now().Add(time.Hour)
	idle := r.newClaimer()
	idle.writers.next, idle.pace = far, pace{poll: time.Second, idle: true, interval: time.Hour, nextLook: far}
	eventually(t, "the retry", func() bool {
		wait := turn(idle)
		return rc.total() == 2 || wait < 0 || wait > time.Second
	})
	if rc.total() != 2 {
		t.Error("the relay idles, and nothing will wake it when the retry is due")
	}
}
