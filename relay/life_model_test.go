package relay

import (
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// modelled is what the model knows of a delivery.
type modelled struct {
	event       int64
	destination string
	key         string
	from, to    time.Time // between which the event became due
	status      string
	attempts    int
	since       time.Time // when an operator made others of its key wait for it; zero: they always did
	fence       int64     // of its last request
	sender      *member   // of a request that is under way
}

func (d *modelled) String() string { return fmt.Sprintf("event %d to %q", d.event, d.destination) }

func (d *modelled) isSettled() bool { return d.status == "delivered" || d.status == "discarded" }

func (d *modelled) isInHand() bool { return d.sender != nil && !d.sender.rescued }

// blocks reports whether another delivery of its key and destination must wait for it that was
// handed out at the given time.
func (d *modelled) blocks(other *modelled, at time.Time) bool {
	return d.key != "" && d.key == other.key && d.destination == other.destination && d.to.Before(other.from) && at.After(d.since) &&
		(d.status == "pending" || d.status == "failed" && d.destination == "block")
}

// find returns a delivery that must be one of a committed event.
func (l *life) find(t *rapid.T, event int64, destination string) *modelled {
	i := slices.IndexFunc(l.model, func(d *modelled) bool { return d.event == event && d.destination == destination })
	if i < 0 {
		t.Fatalf("event %d to %q was never committed", event, destination)
	}
	return l.model[i]
}

// check compares the tables with the model.
func (l *life) check(t *rapid.T) {
	for _, m := range l.members {
		m.await()
	}
	type stored struct {
		Event       int64
		Destination string
		Status      string // empty: there is no row
		Attempts    int
		Untaken     bool
		Ranges      int // open ones that have the event
	}
	list, err := rows.Structs[stored](l.Context(), l.Pool, "read", `SELECT e.id, x.destination, coalesce(d.status, ''), coalesce(d.attempts, 0),
			NOT pg_visible_in_snapshot(e.xid, (SELECT target FROM outbox_range ORDER BY seq DESC LIMIT 1)),
			(SELECT count(*) FROM outbox_range r WHERE ended_at IS NULL AND pg_visible_in_snapshot(e.xid, target) AND NOT pg_visible_in_snapshot(e.xid, base))
		FROM outbox e CROSS JOIN unnest(CASE event_type WHEN 't' THEN ARRAY['block', 'skip'] ELSE ARRAY[''] END) x (destination)
		LEFT JOIN outbox_delivery d ON d.event_id = e.id AND d.destination = x.destination`)
	relaytest.Must(l, err)
	if len(list) != len(l.model) {
		t.Fatalf("there are %d deliveries, want %d", len(list), len(l.model))
	}
	for _, s := range list {
		d, row := l.find(t, s.Event, s.Destination), s.Status != ""
		if d.attempts != s.Attempts || d.status != s.Status && (row || d.status != "pending") || row && s.Untaken || !row && s.Untaken == (s.Ranges == 1) {
			t.Fatalf("%s is %+v, want %s after %d attempts", d, s, d.status, d.attempts)
		}
	}
}
