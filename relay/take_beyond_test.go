package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// An event that has got a row beyond a cut is sent by that row alone.
func TestEventBeyondACutIsSentOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(4, "bulk")
	_, err := intake.TakeRange(t.Context(), db.Pool, deadRelay, intake.Terms{Events: 2, Inline: 1 << 20, Promised: time.Hour}, true)
	relaytest.Must(t, err)
	db.Insert(1, "beyond")
	found, err := intake.FindBeyond(t.Context(), db.Pool)
	relaytest.Must(t, err)
	if len(found.Events) != 1 {
		t.Fatalf("found %+v", found)
	}
	_, written, err := intake.WriteBeyond(t.Context(), db.Pool, deadRelay, found.Seq,
		[]intake.BeyondRow{{EventID: found.Events[0].ID, Destination: "default", Bytes: found.Events[0].PayloadBytes}})
	if err != nil || !written {
		t.Fatalf("written: %v, %v", written, err)
	}

	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 5)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
	db.Insert(1, "last")
	r.settles(t, policy.Delivered, 6)
	for key, n := range counted(rc.Keys()) {
		if n != 1 {
			t.Errorf("%s was sent %d times", key, n)
		}
	}
}
