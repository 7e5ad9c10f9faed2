package policy

import (
	"testing"
	"time"
)

// What transactions that are still open may have written is not closed, and those that stay open are looked back for.
func TestWriters(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var w Writers
	for i, c := range []struct {
		half   int // seconds
		latest int64
		open   []string
		closed int64
		late   int // since when; 0: nothing is late; -1: any time
	}{
		{1, 10, []string{"a"}, 0, 0},
		{2, 20, []string{"a", "b"}, 0, 0},
		{3, 30, []string{"b"}, 10, -1}, // a is gone, with it what it may have written before 10; of b nothing is known
		{4, 40, []string{"b"}, 10, 0},  // and b was there when 30 was seen
		{5, 50, nil, 50, 1},            // no transaction writes
		{6, 60, []string{"c"}, 50, 0},
		{7, 70, []string{"d"}, 60, 5},
		{9, 80, []string{"d"}, 60, 7}, // one may have begun and ended between these looks
	} {
		at := start.Add(time.Duration(c.half) * time.Second / 2)
		late := w.Observe(at, at, c.latest, c.open, true)
		want := time.Time{}
		if c.late > 0 {
			want = start.Add(time.Duration(c.late) * time.Second / 2)
		} else if c.late < 0 { // it was open when the relay came
			want = time.Unix(0, 0)
		}
		if w.Closed != c.closed || late != want {
			t.Errorf("%d: closed %d, want %d; late %s, want %s", i, w.Closed, c.closed, late, want)
		}
	}
	now := start.Add(5 * time.Second)
	if !w.Wanted(now, true) || w.Wanted(w.Next.Add(-1), false) {
		t.Errorf("next at %s", w.Next)
	}
	for range 1000 {
		now = w.Next
		w.Observe(now, now, 80, []string{"forgotten"}, true)
	}
	if wait := w.Next.Sub(now); wait != WritersMost {
		t.Errorf("an idle relay looks for a transaction that stays open every %s", wait)
	}
	w.Observe(now, now, 80, []string{"forgotten"}, false)
	if wait := w.Next.Sub(now); wait != writersEvery {
		t.Errorf("a busy relay looks for a transaction that stays open every %s", wait)
	}
	w.Observe(now, now, 80, nil, true)
	if w.Wanted(now.Add(time.Hour), true) || !w.Wanted(now.Add(time.Hour), false) {
		t.Error("looks without a writer while idle, or not at all")
	}
	if w.Closed != 80 {
		t.Errorf("closed %d", w.Closed)
	}
}

// A transaction has written while the relay was idle and looked for none. It is seen, and commits soon after that.
func TestWriterMayHaveBegunLongBeforeItIsSeen(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var w Writers
	w.Observe(start, start, 10, nil, true)
	woken := start.Add(time.Minute)
	w.Observe(woken, woken, 20, []string{"a"}, true)
	if !w.Pending() || w.Wanted(w.Next.Add(-1), true) || w.Next.Sub(woken) != writersEvery {
		t.Errorf("next at %s", w.Next)
	}
	if late := w.Observe(w.Next, w.Next, 30, nil, true); late != start {
		t.Errorf("looks back to %s", late)
	}
}

// A relay that is notified after a long time claims first if no transaction was open when it last looked, and then looks back to that time.
func TestWokenRelayClaimsBeforeItLooks(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	woken := start.Add(time.Minute)
	var w Writers
	if since := w.Woken(woken); !since.IsZero() || !w.Wanted(woken, false) {
		t.Errorf("looks at %s, claims from %s: there was no look yet", w.Next, since)
	}
	w.Observe(start, start, 10, []string{"a"}, true)
	if since := w.Woken(woken); since != start || !w.Wanted(woken, false) {
		t.Errorf("looks at %s, claims from %s: a transaction was open", w.Next, since)
	}
	w.Observe(start, start, 10, nil, true)
	if since := w.Woken(woken); since != start || w.Wanted(woken, false) || w.Next.Sub(woken) != writersEvery {
		t.Errorf("looks at %s, claims from %s: no transaction was open", w.Next, since)
	}
	if late := w.Observe(w.Next, w.Next, 20, nil, false); late != start {
		t.Errorf("after that it looks back to %s", late)
	}
}

func TestClaimPassesWhatWasCommittedMeanwhile(t *testing.T) {
	t.Parallel()
	whole := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i, c := range []struct {
		whole      time.Time
		after, now time.Duration // since whole
		want       bool
	}{
		{whole, -Overlap, time.Hour, false},             // it looks over the overlap
		{whole, 0, Overlap/2 - 1, false},                // the next one, over the overlap, will
		{whole, 3 * time.Second, 4 * time.Second, true}, // a burst
		{whole, -time.Second, time.Minute, false},       // a burst of which claims are still at the beginning
		{whole, 50 * time.Second, time.Minute, true},    // no room for a minute
		{time.Time{}, 0, time.Hour, false},
	} {
		if got := Passes(c.whole, whole.Add(c.after), whole.Add(c.now)); got != c.want {
			t.Errorf("%d: %v", i, got)
		}
	}
}
