package page

import (
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A destination's page counts what is held once, and says nothing of failures that the rows below
// it contradict.
func TestDestinationTellsEachFaultOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES ('r', 'v', now() + interval '1 hour'); INSERT INTO outbox_relay_destination VALUES (1, 'default')`)
	db.Insert(3, "k")
	db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_attempt_at = now(), last_error = '401 Unauthorized', last_reason = 'unauthorized' WHERE event_id < 3`)
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, http_status, error)
		VALUES (1, 1, now(), 12, 1, 1, 'default', 'retry', 'unauthorized', 401, '401 Unauthorized')`)
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_error) VALUES ('default', 'open', now(), now() + interval '1 hour', '401 Unauthorized')`)
	s := serve(t, db.Pool)
	if _, body := s.get("/destinations/default"); strings.Contains(body, "reason-pending-unauthorized") || strings.Count(body, "<td>unauthorized</td>") != 1 {
		t.Errorf("what is held is counted twice:\n%s", body)
	}
	// What opened the breaker is held, and only what was sent since then is a probe.
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, destination, outcome, reason, http_status, error)
		SELECT 1, 10 + n, (SELECT breaker_opened_at FROM outbox_destination) + n * interval '1 second', 12, 1, 1, 'default', 'hold', 'unauthorized', 401, '401 Unauthorized' FROM generate_series(-1, 1, 2) n`)
	s.forget()
	if _, body := s.get("/destinations/default"); strings.Count(body, ">probe<") != 1 || strings.Count(body, ">held<") != 3 {
		t.Errorf("not one probe, and one held attempt beside the two of the state:\n%s", body)
	}
	db.Exec(`UPDATE outbox_delivery SET last_reason = 'timeout', last_error = 'timeout' WHERE event_id = 1`)
	s.gets(200, "/destinations/default", "reason-pending-timeout")
	db.Exec(`UPDATE outbox_destination SET breaker = 'closed', breaker_opened_at = NULL, breaker_until = NULL, breaker_error = NULL, paused = true, paused_at = now()`)
	db.Exec(`UPDATE outbox_delivery SET attempts = 0, last_attempt_at = NULL, last_error = NULL, last_reason = NULL`)
	s.forget()
	if _, body := s.get("/destinations/default"); strings.Contains(body, "No attempt has failed") || !strings.Contains(body, "has failed or is retried now. What is wrong stands above.") {
		t.Errorf("the attempt below is denied:\n%s", body)
	}
	db.Exec(`DELETE FROM outbox_destination`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'o' || i, 'o' FROM generate_series(1, 2) i`)
	db.Settled("failed", "event_id = 4")
	s.forget()
	s.gets(200, "/destinations/default", "1 key waits")
}

// The page of relays says which relay is meant by what the first page says of relays.
func TestRelaysPageNamesTheirFaults(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at, reload_error, reload_failed_at) VALUES ('b', 'v', now() + interval '1 hour', 'no url', now())`)
	db.Exec(`INSERT INTO outbox_relay_destination (relay_id, destination, refused_at, refused_error) VALUES (1, 'default', now(), '401 Unauthorized')`)
	db.Serve("default")
	serve(t, db.Pool).gets(200, "/relays", "Relay &#34;b&#34; refused its new configuration: no url.", "Only relay b is refused by &#34;default&#34;: 401 Unauthorized.")
}

// The page of an event offers a retry where a retry acts, and otherwise says what the event waits
// for.
func TestEventOffersARetryThatActs(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (name, version, heartbeat_at) VALUES ('r', 'v', now() + interval '1 hour'); INSERT INTO outbox_relay_destination VALUES (1, 'default')`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'o' || i, 'o' FROM generate_series(1, 2) i`)
	db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_attempt_at = now(), last_reason = 'rejected', last_error = E'no\nid', next_attempt_at = now() + interval '1 hour' WHERE event_id = 1`)
	s := serve(t, db.Pool)
	const retry, button = "outbox-relay retry %s --destination default", `name="action" value="retry"`
	s.gets(200, "/events/1", strings.ReplaceAll(retry, "%s", "1"), button)
	s.gets(200, "/events/2", "# It waits: behind event 1 of its ordering key, which is pending: after 1 attempt, the last of which ended with no id")
	if _, body := s.get("/events/2"); strings.Contains(body, strings.ReplaceAll(retry, "%s", "2")) || strings.Contains(body, button) {
		t.Errorf("a retry that changes nothing is offered:\n%s", body)
	}
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour'`)
	s.forget()
	s.gets(200, "/events/1", "# It waits: due: it goes out with the next claims of its destination")
	if _, body := s.get("/events/1"); strings.Contains(body, strings.ReplaceAll(retry, "%s", "1")) || strings.Contains(body, button) {
		t.Errorf("a retry of what is due is offered:\n%s", body)
	}
}

// What was given up has not been delivered.
func TestWellIsNotDelivered(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	db.Insert(1, "k")
	db.Settled("discarded", "true")
	serve(t, db.Pool).gets(200, "/", "All is well.", "Nothing waits, and nothing has failed.")
}
