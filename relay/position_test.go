package relay

import (
	"strconv"
	"testing"
	"time"
)

// TestWalkInChunks has more blocked deliveries than one chunk of a walk looks at, and a delivery between them that the
// lane's position has passed.
func TestWalkInChunks(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, $1) i`, 3*walkChunk)
	db.exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1`)
	db.insert(1, "first")
	r := prepared(t, db.config(to(rc.URL)))
	r.lane("default").walks[backlog].chunked = true
	r.begin()
	r.settles(t, Delivered, 1)

	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'late-1');
		UPDATE outbox_delivery SET next_attempt_at = (SELECT next_attempt_at FROM outbox_delivery WHERE event_id = ` + strconv.Itoa(2*walkChunk) + `)
		WHERE event_id = (SELECT max(event_id) FROM outbox_delivery)`) // both in one transaction
	r.settles(t, Delivered, 2)
	if keys := rc.keys(); len(keys) != 2 || keys[0] != "first-1" || keys[1] != "late-1" {
		t.Errorf("sent %q", keys)
	}
}

// TestWalk takes the classes of a lane through claims.
func TestWalk(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	const poll = 5 * time.Second
	for name, c := range map[string]struct {
		walk  walk
		ask   ask
		found int
		last  keyset
		took  time.Duration
		want  walk // but for due
		rests bool
	}{
		"a full live claim ends at its last":      {ask: ask{free: 2}, found: 2, last: keyset{at(2), 2}, want: walk{position: keyset{at(2), 2}, more: true}},
		"a short live claim has looked at all":    {ask: ask{free: 3}, found: 1, last: keyset{at(2), 2}, want: walk{position: keyset{at: at(9)}}},
		"an empty one too, however slow":          {ask: ask{free: 3}, took: time.Second, want: walk{position: keyset{at: at(9)}}},
		"a short walk rests":                      {ask: ask{class: backlog, free: 3}, found: 2, last: keyset{at(2), 2}, rests: true},
		"a full claim goes on at once":            {ask: ask{class: backlog, free: 1}, found: 1, last: keyset{at(1), 1}, took: slowWalk, want: walk{position: keyset{at(1), 1}, more: true}},
		"what a productive walk takes is no cost": {walk: walk{took: time.Millisecond}, ask: ask{class: replays, free: 1}, found: 1, last: keyset{at(1), 1}, took: slowWalk, want: walk{position: keyset{at(1), 1}, more: true, took: time.Millisecond}},
		"a slow walk goes in chunks next time":    {ask: ask{class: backlog, free: 3}, took: time.Second, want: walk{chunked: true}, rests: true},
		"a chunk is followed by the next":         {walk: walk{chunked: true}, ask: ask{class: backlog, free: 3, until: keyset{at(4), 4}, chunk: true}, took: time.Millisecond, want: walk{position: keyset{at(4), 4}, more: true, chunked: true, took: time.Millisecond}},
		"the last chunk ends a slow walk":         {walk: walk{chunked: true, took: time.Second, position: keyset{at(4), 4}}, ask: ask{class: backlog, free: 3, after: keyset{at(4), 4}}, want: walk{chunked: true}, rests: true},
		"and of a quick one the chunks":           {walk: walk{chunked: true}, ask: ask{class: backlog, free: 3}, rests: true},
	} {
		w := c.walk
		w.advance(c.ask, c.found, c.last, at(9), c.took, poll)
		rests := time.Until(w.due) > poll/2
		w.due = time.Time{}
		if w != c.want || rests != c.rests {
			t.Errorf("%s: got %+v, rests %t", name, w, rests)
		}
	}

	// A walk that failed may have been too long: the next claim does without, and the next one goes in chunks.
	var w walk
	w.failed(time.Now(), poll)
	if !w.chunked || time.Until(w.due) < poll/2 {
		t.Errorf("after a failure: %+v", w)
	}
}

func TestUnblockedKeysAreTakenOnce(t *testing.T) {
	t.Parallel()
	var l lane
	for i := range 5 {
		l.unblock(strconv.Itoa(i % 3))
	}
	if first, rest := l.takeUnblocked(2), l.takeUnblocked(9); len(first) != 2 || len(rest) != 1 {
		t.Errorf("took %q, then %q", first, rest)
	}
}
