package lane

import (
	"strconv"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// TestCursor takes the classes of a lane through claims.
func TestCursor(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	const poll = 5 * time.Second
	last := Keyset{at(2), 2}
	for name, c := range map[string]struct {
		cursor Cursor
		class  Class
		result ScanResult
		found  int
		took   time.Duration
		want   Cursor // but for due
		rests  bool
	}{
		"a live claim that came not to the end ends at its last": {result: ScanResult{Last: last, More: true}, found: 2, want: Cursor{Position: last, More: true}},
		"the next one has passed what was committed meanwhile":   {cursor: Cursor{More: true}, result: ScanResult{Last: last}, want: Cursor{Position: Keyset{At: at(9)}}},
		"one that came to the end has looked at all":             {result: ScanResult{Last: last}, found: 1, want: Cursor{Position: Keyset{At: at(9)}}},
		"an empty one too, however slow":                         {took: time.Second, want: Cursor{Position: Keyset{At: at(9)}}},
		"a cursor that came to the end rests":                    {class: Backlog, result: ScanResult{Last: last}, found: 2, rests: true},
		"one that did not continues at once": {
			class: Backlog, result: ScanResult{Last: last, More: true}, found: 1, took: time.Second, want: Cursor{Position: last, More: true},
		},
		"what it takes to find something is no cost": {
			cursor: Cursor{took: time.Millisecond}, class: Replays, result: ScanResult{Last: last, More: true}, found: 1, took: time.Second,
			want: Cursor{Position: last, More: true, took: time.Millisecond},
		},
		"one that found nothing leaves time to others": {
			class: Backlog, result: ScanResult{Last: last, More: true}, took: 2 * poll, want: Cursor{Position: last, More: true, FoundNothing: true, took: 2 * poll}, rests: true,
		},
		"a cursor that found replays reads on soon, behind where it came to": {
			cursor: Cursor{took: time.Second, Position: last}, class: Replays, result: ScanResult{Last: last}, found: 3, took: time.Millisecond,
			want: Cursor{Position: Keyset{At: at(9).Add(-Overlap)}, More: true, Pause: replayRescan},
		},
		"less soon without any": {
			cursor: Cursor{More: true, Position: last, Pause: replayRescan}, class: Replays, took: time.Millisecond,
			want: Cursor{Position: Keyset{At: at(9).Add(-Overlap)}, More: true, FoundNothing: true, Pause: 2 * replayRescan},
		},
		"and then rests": {cursor: Cursor{More: true, Position: last, Pause: poll}, class: Replays, rests: true},
		"a cursor of the backlog rests, whatever it found": {class: Backlog, result: ScanResult{Last: last}, found: 3, rests: true},
		"and rests for long at the end":                    {cursor: Cursor{took: time.Second, FoundNothing: true, Position: last, More: true}, class: Backlog, rests: true},
	} {
		w := c.cursor
		w.Advance(c.class, c.result, c.found, at(9), c.took, agenda.Rest{Least: poll * 9 / 10, Times: agenda.RestFactor})
		rests := time.Until(w.Due) > poll/2
		w.Due = time.Time{}
		if w != c.want || rests != c.rests {
			t.Errorf("%s: got %+v, rests %t", name, w, rests)
		}
	}

	// A cursor whose claim failed may have read too much: the next claim does without.
	var w Cursor
	w.Failed(time.Now(), poll)
	if time.Until(w.Due) < poll/2 {
		t.Errorf("after a failure: %+v", w)
	}
}

func TestReadyKeysAreTakenOnce(t *testing.T) {
	t.Parallel()
	var l Lane
	for i := range 6 {
		l.MakeReady(strconv.Itoa(i%3), ordering.Place{Event: 1}, Backlog)
	}
	l.CountClaimed("in flight", 2, ordering.Place{Event: 1})
	l.MakeReady("in flight", ordering.Place{Event: 1}, Live)
	if none, _ := l.TakeReady([Classes]int{Live: 9}); len(none) != 0 {
		t.Errorf("took %v without room for their class", none)
	}
	first, _ := l.TakeReady([Classes]int{Backlog: 2})
	rest, _ := l.TakeReady([Classes]int{Backlog: 9})
	if len(first) != 2 || len(rest) != 1 || first[0].Key != "0" || rest[0].Key != "2" {
		t.Errorf("took %v, then %v", first, rest)
	}
	l.keySettled("in flight", Live, false, false)
	l.keySettled("in flight", Live, true, false)
	if keys, _ := l.TakeReady([Classes]int{Live: 1}); len(keys) != 1 || keys[0].Key != "in flight" || len(l.keys.inFlight) != 0 {
		t.Errorf("took %v when its run was settled", keys)
	}
}
