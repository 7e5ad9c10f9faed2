package relay

import (
	"strconv"
	"testing"
	"time"
)

// TestSweepInChunks has more blocked deliveries than one chunk of a sweep looks at, and a delivery between them that the
// lane's position has passed.
func TestSweepInChunks(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'k' FROM generate_series(1, $1) i`, 3*sweepChunk)
	db.exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = 1`)
	db.insert(1, "first")
	r := prepared(t, db.config(to(rc.URL)))
	r.lanes["default"].chunked = true
	r.begin()
	r.settles(t, Delivered, 1)

	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'late-1');
		UPDATE outbox_delivery SET next_attempt_at = (SELECT next_attempt_at FROM outbox_delivery WHERE event_id = ` + strconv.Itoa(2*sweepChunk) + `)
		WHERE event_id = (SELECT max(event_id) FROM outbox_delivery)`) // both in one transaction
	r.settles(t, Delivered, 2)
	if keys := rc.keys(); len(keys) != 2 || keys[0] != "first-1" || keys[1] != "late-1" {
		t.Errorf("sent %q", keys)
	}
}

// TestPositionAdvance walks a lane through claims and sweeps.
func TestPositionAdvance(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	due := func(seconds int, key string) delivery {
		d := delivery{eventID: int64(seconds)}
		d.nextAttemptAt.Time = at(seconds)
		if key != "" {
			d.event.orderingKey = &key
		}
		return d
	}
	const poll = 5 * time.Second
	for name, c := range map[string]struct {
		lane       *lane
		ask        ask
		deliveries []delivery
		took       time.Duration
		position   keyset
		more       bool
		swept      keyset
		chunked    bool
		rests      bool // no sweep is due
	}{
		"a full claim ends at its last":         {ask: ask{free: 2}, deliveries: []delivery{due(1, ""), due(2, "")}, position: keyset{at(2), 2}, more: true},
		"a short claim has looked at all":       {ask: ask{free: 3}, deliveries: []delivery{due(1, "")}, position: keyset{at: at(9)}},
		"an empty claim too":                    {ask: ask{free: 3}, position: keyset{at: at(9)}},
		"the next of a key does not count":      {ask: ask{free: 1, unblocked: []string{"k"}}, deliveries: []delivery{due(1, "k")}, position: keyset{at: at(9)}},
		"nor does it move what did not look":    {lane: &lane{position: keyset{at(5), 5}, more: true}, ask: ask{unblocked: []string{"k"}}, deliveries: []delivery{due(1, "k")}, position: keyset{at(5), 5}, more: true},
		"a quick sweep rests":                   {ask: ask{free: 3, sweep: true}, position: keyset{at: at(9)}, rests: true},
		"a full sweep goes on as claims":        {ask: ask{free: 1, sweep: true}, deliveries: []delivery{due(1, "")}, position: keyset{at(1), 1}, more: true, rests: true},
		"a slow sweep goes in chunks next time": {ask: ask{free: 3, sweep: true}, took: time.Second, position: keyset{at: at(9)}, chunked: true, rests: true},
		"a chunk moves only the sweep": {
			lane: &lane{chunked: true, position: keyset{at: at(8)}}, ask: ask{free: 3, sweep: true, until: keyset{at(4), 4}},
			position: keyset{at: at(8)}, swept: keyset{at(4), 4}, chunked: true,
		},
		"a full chunk too": {
			lane: &lane{chunked: true, position: keyset{at: at(8)}}, ask: ask{free: 1, sweep: true, until: keyset{at(4), 4}},
			deliveries: []delivery{due(2, "")}, position: keyset{at: at(8)}, swept: keyset{at(2), 2}, chunked: true,
		},
		"the last chunk ends a slow sweep": {
			lane: &lane{chunked: true, swept: keyset{at(4), 4}, sweeping: time.Second, position: keyset{at: at(8)}},
			ask:  ask{free: 3, sweep: true, after: keyset{at(4), 4}}, position: keyset{at: at(9)}, chunked: true, rests: true,
		},
		"and of a quick one the chunks": {
			lane: &lane{chunked: true, position: keyset{at: at(8)}}, ask: ask{free: 3, sweep: true},
			position: keyset{at: at(9)}, rests: true,
		},
	} {
		l := c.lane
		if l == nil {
			l = &lane{}
		}
		l.advance(c.ask, c.deliveries, at(9), c.took, poll)
		rests := time.Until(l.sweepDue) > poll/2
		if l.position != c.position || l.more != c.more || l.swept != c.swept || l.chunked != c.chunked || rests != c.rests {
			t.Errorf("%s: got position %v, more %t, swept %v, chunked %t, rests %t", name, l.position, l.more, l.swept, l.chunked, rests)
		}
	}

	// A sweep that failed may have been too long: the next claim does without, and the next sweep goes in chunks.
	var l lane
	l.failed(ask{sweep: true, unblocked: []string{"k"}}, time.Now(), poll)
	if !l.chunked || time.Until(l.sweepDue) < poll/2 || len(l.takeUnblocked(10)) != 1 {
		t.Errorf("after a failure: %+v", &l)
	}
	for i := range 5 {
		l.unblock(strconv.Itoa(i % 3))
	}
	if first, rest := l.takeUnblocked(2), l.takeUnblocked(9); len(first) != 2 || len(rest) != 1 {
		t.Errorf("took %q, then %q", first, rest)
	}
}
