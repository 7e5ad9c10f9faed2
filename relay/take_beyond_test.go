package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// An event that has got a row beyond a cut is sent by that row alone.
func TestEventBeyondACutIsSentOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(4, "bulk")
	_, err := intake.TakeRange(t.Context(), db.Pool, deadRelay, intake.Terms{Events: 2, Bytes: 1 << 20, Promised: time.Hour}, true)
	relaytest.Must(t, err)
	db.Insert(1, "beyond")
	found, err := intake.FindBeyond(t.Context(), db.Pool)
	relaytest.Must(t, err)
	if len(found.Events) != 1 {
		t.Fatalf("found %+v", found)
	}
	_, written, err := intake.WriteBeyond(t.Context(), db.Pool, deadRelay, found.Seq,
		[]intake.BeyondRow{{EventID: found.Events[0].ID, Destination: "default", Bytes: found.Bytes[0]}})
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

// While what is left of a cut difference waits for room, the claimer makes rows of what came after it for the lanes that may send it.
func TestClaimerPassesACut(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "bulk", "other")
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, post.Destination{Name: "bulk", URL: rc.URL}, post.Destination{Name: "other", URL: rc.URL})
	cfg.Routes = []Route{{Event: "bulk", To: []string{"bulk"}}, {Event: "other", To: []string{"other"}}}
	r := sessionOf(t, cfg)
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route VALUES ('bulk', 'bulk'), ('other', 'other');
		INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('bulk', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	instance, _ := r.current()
	c := r.newClaimer()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'bulk', '{}', 'bulk-' || i FROM generate_series(1, 4) i`)
	_, err := intake.TakeRange(t.Context(), db.Pool, instance, intake.Terms{Events: 2, Bytes: 1 << 20}, true)
	relaytest.Must(t, err)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('other', '{}', 'other-1'), ('bulk', '{}', 'bulk-5'), ('nowhere', '{}', 'x')`)
	c.taker.cut = true
	relaytest.Must(t, c.taker.passCut(t.Context(), instance))
	if got := relaytest.Rows[string](db, `SELECT destination FROM outbox_delivery`); len(got) != 1 || got[0] != "other" {
		t.Errorf("rows for %v", got)
	}
}
