package claim

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// An event may be committed after later ones of its key. A floor above it does not count once any
// relay has it in hand.
func TestFloorsEndWithRanges(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	name := "k"
	key := ordering.Key{Destination: "default", Key: name}
	db.InsertKeyed(name, 1, 3)
	db.Exec(`DELETE FROM outbox_delivery WHERE event_id = 1`)
	c := newRows(t, db, named("default"))
	floor := func() int64 { return c.floors.LookUp(key, 0, false).Event }
	c.Lanes.Get("default").MakeReady(name, ordering.Place{Event: 2}, lane.Live)
	relaytest.Must(t, c.ClaimRows(t.Context(), c.relayID, false))
	testkit.Equal(t, "the floor", floor(), 1)
	learnt := c.floors.Range

	// This relay takes the next range: only those above its events are dropped.
	taken := func(seq, event int64) {
		c.NoteRange(&settle.TakenRange{Seq: seq, Deliveries: []settle.InHand{{EventID: event, Destination: "default", OrderingKey: &name}}})
	}
	taken(learnt+1, 4)
	testkit.Equal(t, "the floor below a new event", floor(), 1)
	taken(learnt, 1) // rescued
	if floor() == 1 {
		t.Error("a floor above an event in hand is kept")
	}
	c.floors.Set(key, ordering.Floor{Event: 1})
	taken(learnt+3, 4)
	if floor() == 1 {
		t.Error("a floor is kept although another relay has taken a range")
	}

	// Another relay takes it: claims do not trust their floors.
	c.floors = ordering.Floors{Range: learnt}
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now(), claimed_by = NULL, lease_expires_at = NULL WHERE event_id = 2`)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = NULL, lease_expires_at = NULL WHERE event_id = 3`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, next_attempt_at) VALUES (1, 'default', 'k', now() + interval '1 hour')`)
	db.Exec(`INSERT INTO outbox_range (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, keys)
		SELECT seq + 1, 77, 2, target, pg_current_snapshot(), 0, 1, false, seq + 1, ARRAY[hashtext('k')] FROM outbox_range ORDER BY seq DESC LIMIT 1`)
	result, err := c.Claim(t.Context(), c.relayID, []Request{{Destination: "default", Run: 1, Keys: []lane.ReadyKey{{Key: name, Floor: 1}}}})
	relaytest.Must(t, err)
	if len(result.Deliveries) != 0 || len(result.heads) != 1 || result.heads[0].place.Event != 1 || result.newest != learnt+1 || !result.inHand[key] {
		t.Errorf("%+v", result)
	}
	c.applyResult([]laneClaim{{c.Lanes.Get("default"), Request{Destination: "default"}}}, result, 0)
	if c.floors.Range != learnt+1 || floor() == 0 {
		t.Error("a floor is learnt while an open range has events of the key")
	}
}
