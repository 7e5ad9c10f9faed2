package relay

import (
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// inHandElsewhere inserts the event k-1 and returns its range, which a relay has in hand that lives
// and does nothing.
func inHandElsewhere(t *testing.T, db *relaytest.Database) (relay int32, r intake.Range) {
	t.Helper()
	relay, err := session.Register(t.Context(), db.Pool, false, "other", "test", time.Hour)
	relaytest.Must(t, err)
	db.Exec(insertKeyedEvent, "k-1", "k")
	r, err = intake.TakeRange(t.Context(), db.Pool, relay, intake.Terms{Events: 10, Inline: 1 << 20}, false)
	relaytest.Must(t, err)
	return relay, r
}

// A relay that waits for another one's event of an ordering key, and dies, leaves nothing that
// could be claimed before that event.
func TestWaiterThatDiesKeepsTheOrder(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	other, first := inHandElsewhere(t, db)
	victim, _ := startProcess(t, db.DSN, rc.URL)
	db.Exec(insertKeyedEvent, "k-2", "k")
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_range WHERE relay_id <> $1 AND seq > $2 AND taken_at < now() - interval '1.5 seconds'`, other, first.Seq)
	rc.Kill(t, victim)
	r := start(t, config(db, to(rc.URL)))
	r.await(t, "the rescue", func(o *observer) bool { return len(o.rescued) == 1 })
	db.Insert(1, "unkeyed")
	r.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, int(r.relayID()), `SELECT relay_id FROM outbox_range WHERE seq = $1`, first.Seq+1)
	testkit.Equal(t, "sent while another relay has k-1 in hand", rc.Keys(), []string{"unkeyed-1"})
	_, err := intake.SettleRanges(t.Context(), db.Pool, intake.NewRows{
		Relay: other, Ranges: []intake.RangeRef{first.Ref()}, Ended: []intake.RangeRef{first.Ref()},
		Deliveries: []intake.NewRow{{Range: first.Ref(), EventID: first.Events[0].ID, Destination: "default", Status: intake.Delivered, Attempts: 1}},
	})
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 2)
}

// A crash of the server may undo takes. What waited for an event that another relay had taken does
// not overtake it then.
func TestLostRangesKeepTheOrder(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	_, first := inHandElsewhere(t, db)
	r := start(t, config(db, to(rc.URL)))
	db.Exec(insertKeyedEvent, "k-2", "k")
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_range WHERE seq > $1`, first.Seq)
	db.Exec(`DELETE FROM outbox_range WHERE seq >= $1`, first.Seq)
	db.Insert(1, "unkeyed")
	r.settles(t, policy.Delivered, 3)
	if keys := rc.Keys(); slices.Index(keys, "k-1") > slices.Index(keys, "k-2") {
		t.Errorf("sent: %v", keys)
	}
}
