package relay

import (
	"strconv"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// TestWalk takes the classes of a lane through claims.
func TestCursor(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	const poll = 5 * time.Second
	last := keyset{at(2), 2}
	for name, c := range map[string]struct {
		cursor cursor
		class  class
		result scanResult
		found  int
		took   time.Duration
		want   cursor // but for due
		rests  bool
	}{
		"a live claim that came not to the end ends at its last": {result: scanResult{last: last, more: true}, found: 2, want: cursor{position: last, more: true}},
		"the next one has passed what was committed meanwhile":   {cursor: cursor{more: true}, result: scanResult{last: last}, want: cursor{position: keyset{at: at(9)}}},
		"one that came to the end has looked at all":             {result: scanResult{last: last}, found: 1, want: cursor{position: keyset{at: at(9)}}},
		"an empty one too, however slow":                         {took: time.Second, want: cursor{position: keyset{at: at(9)}}},
		"a walk that came to the end rests":                      {class: backlog, result: scanResult{last: last}, found: 2, rests: true},
		"one that did not goes on at once": {
			class: backlog, result: scanResult{last: last, more: true}, found: 1, took: time.Second, want: cursor{position: last, more: true},
		},
		"what it takes to find something is no cost": {
			cursor: cursor{took: time.Millisecond}, class: replays, result: scanResult{last: last, more: true}, found: 1, took: time.Second,
			want: cursor{position: last, more: true, took: time.Millisecond},
		},
		"one that found nothing leaves time to others": {
			class: backlog, result: scanResult{last: last, more: true}, took: 2 * poll, want: cursor{position: last, more: true, foundNothing: true, took: 2 * poll}, rests: true,
		},
		"a walk that found replays looks for more soon, behind where it came to": {
			cursor: cursor{took: time.Second, position: last}, class: replays, result: scanResult{last: last}, found: 3, took: time.Millisecond,
			want: cursor{position: keyset{at: at(9).Add(-overlap)}, more: true, pause: replayRescan},
		},
		"less soon without any": {
			cursor: cursor{more: true, position: last, pause: replayRescan}, class: replays, took: time.Millisecond,
			want: cursor{position: keyset{at: at(9).Add(-overlap)}, more: true, foundNothing: true, pause: 2 * replayRescan},
		},
		"and then rests": {cursor: cursor{more: true, position: last, pause: poll}, class: replays, rests: true},
		"a walk of the backlog rests, whatever it found": {class: backlog, result: scanResult{last: last}, found: 3, rests: true},
		"and rests for long at the end":                  {cursor: cursor{took: time.Second, foundNothing: true, position: last, more: true}, class: backlog, rests: true},
	} {
		w := c.cursor
		w.advance(c.class, c.result, c.found, at(9), c.took, agenda.Rest{Least: poll * 9 / 10, Times: agenda.RestFactor})
		rests := time.Until(w.due) > poll/2
		w.due = time.Time{}
		if w != c.want || rests != c.rests {
			t.Errorf("%s: got %+v, rests %t", name, w, rests)
		}
	}

	// A walk whose claim failed may have been too long: the next claim does without.
	var w cursor
	w.failed(time.Now(), poll)
	if time.Until(w.due) < poll/2 {
		t.Errorf("after a failure: %+v", w)
	}
}

func TestReadyKeysAreTakenOnce(t *testing.T) {
	t.Parallel()
	var l lane
	for i := range 6 {
		l.makeReady(strconv.Itoa(i%3), ordering.Place{Event: 1}, backlog)
	}
	l.countClaimed("in flight", 2, ordering.Place{Event: 1})
	l.makeReady("in flight", ordering.Place{Event: 1}, live)
	if none, _ := l.takeReady([classes]int{live: 9}); len(none) != 0 {
		t.Errorf("took %v without room for their class", none)
	}
	first, _ := l.takeReady([classes]int{backlog: 2})
	rest, _ := l.takeReady([classes]int{backlog: 9})
	if len(first) != 2 || len(rest) != 1 || first[0].key != "0" || rest[0].key != "2" {
		t.Errorf("took %v, then %v", first, rest)
	}
	l.keySettled("in flight", live, false, false)
	l.keySettled("in flight", live, true, false)
	if keys, _ := l.takeReady([classes]int{live: 1}); len(keys) != 1 || keys[0].key != "in flight" || len(l.keys.inFlight) != 0 {
		t.Errorf("took %v when its run was settled", keys)
	}
}
