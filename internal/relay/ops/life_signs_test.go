package ops_test

import (
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The health check touches no delivery, so that it costs the same whatever is pending or locked.
func TestLifeSignsTouchNoDelivery(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('alive', '')`)
	_, err := db.Begin().Exec(t.Context(), `LOCK TABLE outbox_delivery`)
	relaytest.Must(t, err)
	if relays, err := ops.New(db.Pool).LifeSigns(t.Context()); err != nil || len(relays) != 1 {
		t.Errorf("%+v, %v", relays, err)
	}
}

// Status does not wait for a lock, and then tell what was true before: it says who is to be asked.
func TestStatusDoesNotWaitForALock(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	_, err := db.Begin().Exec(t.Context(), `LOCK TABLE outbox_delivery`)
	relaytest.Must(t, err)
	if _, err := ops.New(db.Pool).Status(t.Context(), ""); err == nil || !strings.Contains(err.Error(), "outbox-relay doctor") {
		t.Errorf("%v", err)
	}
}

// A relay whose session has ended is silent at once, and not only when its heartbeat is old. The
// list of relays says so, and explain does of what it has in hand.
func TestRelayWithoutItsSessionIsSilent(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	db.Insert(3, "k")
	outbox := ops.New(db.Pool)
	states := func(what, want string) {
		t.Helper()
		all, err := outbox.Relays(t.Context())
		relaytest.Must(t, err)
		signs, err := outbox.LifeSigns(t.Context())
		relaytest.Must(t, err)
		for _, r := range []ops.RelayStatus{all[0], signs[0]} {
			if (r.State == "silent") != (want == "silent") || r.Session {
				t.Errorf("%s: %+v is %s", what, r, r.State)
			}
		}
	}
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now(), session_pid = NULL`)
	states("registered without a session", "busy")
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now(), session_pid = pg_backend_pid()`) // of another name
	states("cut off", "silent")
	db.Exec(`UPDATE outbox_delivery SET claimed_by = (SELECT id FROM outbox_relay), lease_expires_at = now() + interval '1 hour' WHERE event_id = 1`)
	waits, err := outbox.Waits(t.Context(), 1)
	relaytest.Must(t, err)
	if want := "; that relay is silent, and another one takes the delivery over; no relay is running; start one: outbox-relay run"; len(waits) != 1 || !strings.HasSuffix(waits[0].Text, want) {
		t.Errorf("%+v", waits)
	}
	waits, err = outbox.Waits(t.Context(), 2)
	relaytest.Must(t, err)
	if len(waits) != 1 {
		t.Fatalf("%+v", waits)
	}
	testkit.Equal(t, "why another delivery waits", waits[0].Cause, "no_relay")
}
