package ops_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestWaits(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, CASE WHEN i < 4 THEN 'o' END FROM generate_series(1, 8) i`)
	db.Settled("failed", "event_id = 1")
	outbox := ops.New(db.Pool)
	waits := func(id int64, want ...string) {
		t.Helper()
		list, err := outbox.Waits(t.Context(), id)
		relaytest.Must(t, err)
		var got []string
		for _, w := range list {
			got = append(got, w.Cause)
			if w.Text == "" || strings.Contains(w.Text, "%!") {
				t.Errorf("event %d waits for %+v", id, w)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("event %d waits for %+v, want %q", id, list, want)
		}
	}
	waits(4, "no_relay")
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES ('r', 'v', now() + interval '1 hour')`)
	waits(4, "unserved")
	db.Exec(`UPDATE outbox_relay SET quarantined = 'a copy'`)
	waits(4, "quarantined")
	db.Exec(`UPDATE outbox_relay SET quarantined = NULL`)
	db.Exec(`INSERT INTO outbox_relay_destination (relay_id, destination) VALUES (1, 'default')`)
	waits(1) // has failed
	waits(2, "behind")
	waits(4, "due")
	if list, err := outbox.Waits(t.Context(), 4); err != nil || !strings.HasSuffix(list[0].Text, "; 2 are due before it") {
		t.Errorf("%v %+v", err, list)
	}
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 4`)
	waits(4, "in_flight")
	db.Exec(`UPDATE outbox_relay_destination SET wait_until = now() + interval '1 minute'`)
	if list, err := outbox.Waits(t.Context(), 4); err != nil || !strings.Contains(list[0].Text, "; the destination has asked to wait (Retry-After): it is tried again at ") {
		t.Errorf("%v %+v", err, list)
	}
	waits(6, "slowed")
	db.Exec(`UPDATE outbox_relay_destination SET wait_until = now()`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour', attempts = 2 WHERE event_id = 5`)
	waits(5, "not_due")
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at, breaker, breaker_opened_at, breaker_until, breaker_error)
		VALUES ('default', true, now(), 'open', now(), now() + interval '1 hour', 'refused')`)
	waits(5, "paused", "breaker_open", "not_due")
	db.Exec(`UPDATE outbox_destination SET breaker = 'half_open', breaker_relay_id = 1`)
	if list, err := outbox.Waits(t.Context(), 5); err != nil || !strings.Contains(list[1].Text, "a probe is under way") {
		t.Errorf("%v %+v", err, list)
	}
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 minute'`)
	if list, err := outbox.Waits(t.Context(), 5); err != nil || !strings.Contains(list[1].Text, "no running relay probes it") {
		t.Errorf("%v %+v", err, list)
	}
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 hour'`)
	db.Exec(`DELETE FROM outbox_destination; DELETE FROM outbox_route; DELETE FROM outbox_relay_destination`)
	waits(6, "unserved")
	waits(5, "unserved", "not_due")
	db.Insert(1, "parked")
	waits(9, "parked")
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('other', 'default')`)
	if list, err := outbox.Waits(t.Context(), 9); err != nil || !strings.HasSuffix(list[0].Text, "or give it up: outbox-relay discard 9") {
		t.Errorf("%v %+v", err, list)
	}
	db.Exec(`UPDATE outbox_delivery SET status = 'pending', attempts = 2, last_reason = 'timeout', last_error = 'no answer within 5s', next_attempt_at = '2099-01-02 03:04:05Z' WHERE event_id = 1`)
	if list, err := outbox.Waits(t.Context(), 2); err != nil || !strings.HasSuffix(list[1].Text, "which is pending: after 2 attempts, the last of which ended with no answer within 5s, it is tried at 2099-01-02T03:04:05Z; see: outbox-relay explain 1") {
		t.Errorf("%v %+v", err, list)
	}
	for _, c := range []struct{ change, want string }{
		{`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute' WHERE event_id = 1`, "it is due"},
		{`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 minute' WHERE event_id = 1;
			INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_error) VALUES ('default', 'open', now(), now() + interval '1 hour', '500')
			ON CONFLICT (destination) DO UPDATE SET breaker = 'open', breaker_opened_at = now(), breaker_until = now() + interval '1 hour', breaker_error = '500'`, "it waits for the destination"},
	} {
		db.Exec(c.change)
		list, err := outbox.Waits(t.Context(), 2)
		relaytest.Must(t, err)
		if !strings.HasSuffix(list[len(list)-1].Text, "no answer within 5s, "+c.want+"; see: outbox-relay explain 1") {
			t.Errorf("%+v, want %s", list, c.want)
		}
	}
	db.Exec(`DELETE FROM outbox_destination`)
	db.Settled("failed", "event_id = 1")
	list, err := outbox.Waits(t.Context(), 2)
	relaytest.Must(t, err)
	if want := "behind event 1 of its ordering key, which has failed; to continue: outbox-relay replay 1 --destination default, or outbox-relay discard --destination default --head-of-key o"; list[1].Text != want {
		t.Errorf("got %s, want %s", list[1].Text, want)
	}
	db.Exec(`UPDATE outbox_watch SET sample = sample || '{"lenient": ["default"]}'`) // on_failure: skip
	waits(2, "unserved")
}

// What operators see of lanes that do not flow.
func TestStatusOfBlockedLanes(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	for _, key := range []string{"o1", "o2", "o3"} {
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', $1 || i, $1 FROM generate_series(1, 3) i`, key)
	}
	db.Settled("failed", "destination = 'a' AND event_id IN (1, 2, 4, 9)") // of the last key nothing waits behind it
	db.Exec(`UPDATE outbox_delivery SET last_attempt_at = now() - interval '1 hour' WHERE event_id = 1`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '30 minutes' WHERE event_id = 3`) // event 2 has failed, too
	db.Exec(`DELETE FROM outbox_route WHERE destination = 'b'`)
	db.Exec(`UPDATE outbox_delivery SET replay = true WHERE destination = 'b' AND event_id < 3`)
	db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('r', 'v')`)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = 1, lease_expires_at = now() + interval '1 hour' WHERE event_id = 5`)
	s, err := ops.New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	a, b := s.Destinations[0], s.Destinations[1]
	if got := fmt.Sprint(a.BlockedKeys, a.Routed, a.Replays, b.BlockedKeys, b.Routed, b.Replays); got != "2 true 0 0 false 2" {
		t.Errorf("%s: %+v", got, s.Destinations)
	}
	testkit.Equal(t, "waiting behind", fmt.Sprint(a.WaitingBehind), "[{1 1 o1 failed 0 0 server_error} {4 2 o2 failed 0 0 server_error}]") // no relay has marked them
	if a.BlockedSeconds < 1800 || a.BlockedSeconds > 3000 || b.BlockedSeconds != 0 {
		t.Errorf("blocked for %g and %g seconds", a.BlockedSeconds, b.BlockedSeconds)
	}
	relays, err := ops.New(db.Pool).Relays(t.Context())
	relaytest.Must(t, err)
	if len(relays) != 1 || relays[0].InFlight != 2 || relays[0].Session || s.Relays[0].InFlight != 2 {
		t.Errorf("%+v", relays)
	}
}
