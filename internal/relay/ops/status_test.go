package ops

import (
	"regexp"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// wholeTable finds a scan of all deliveries, and one of all that are pending for each of something
// else.
var wholeTable = regexp.MustCompile(`Seq Scan on outbox_delivery|Materialize\n.* on outbox_delivery`)

// However much was delivered, waits or failed, status reads a bounded part of it, whether or not
// the table was analysed.
func TestPlansOfStatus(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.Fill(60_000, 40)
	db.Exec(`UPDATE outbox_delivery SET status = 'failed', delivered_at = NULL WHERE event_id % 50 = 7`)
	db.Exec(`UPDATE outbox_delivery SET attempts = 1, last_attempt_at = now(), last_reason = 'not_found', last_error = '404', next_attempt_at = now() + interval '1 hour'
		WHERE event_id = (SELECT max(event_id) FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NULL)`)
	for _, analysed := range []bool{false, true} {
		if analysed {
			db.Exec(`VACUUM ANALYZE`)
		}
		for name, c := range map[string]struct{ sql, index string }{
			"destinations": {selectDestinationStatus, "outbox_delivery_due"}, "heads": {selectDestinationStatus, "outbox_delivery_heads"},
			"failed": {selectDestinationStatus, "outbox_delivery_aside"}, "parked": {countParked, "outbox_delivery_"}, "relays": {selectRelays, "outbox_delivery_due"},
		} {
			tx := db.Begin()
			_, err := tx.Exec(t.Context(), pinPlans)
			relaytest.Must(t, err)
			plan := relaytest.PlanOf(t, tx, c.sql)
			relaytest.Must(t, tx.Rollback(t.Context()))
			if !strings.Contains(plan, c.index) || wholeTable.MatchString(plan) {
				t.Errorf("%s, analysed %t:\n%s", name, analysed, plan)
			}
		}
		s, err := New(db.Pool).Status(t.Context(), "")
		relaytest.Must(t, err)
		d := s.Destinations[0] // a large backlog does not hide the one that is retried
		if d.Pending != CountedTo+1 || d.Due != CountedTo+1 || d.Retrying != 1 || d.RetryReason != "not_found" || d.Failed != FailedTo+1 {
			t.Errorf("%+v", d)
		}
	}
}

// Status counts the events that no relay has taken apart from what is pending, and has the lag of
// the alerts.
func TestStatusOfUnroutedEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "default", "second")
	db.Insert(2, "k")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at)
		VALUES ('t', '{}', 'old', now() - interval '1 hour', now() - interval '1 hour')`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, replay) VALUES (1, 'second', now() - interval '9 hours', true)`)
	db.Serve("default", "second")
	s, err := New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	if s.Untaken.Events != 3 || s.Untaken.OldestSeconds < 3600 || s.Untaken.OldestSeconds > 7200 {
		t.Errorf("%+v", s.Untaken)
	}
	for i, pending := range []int64{0, 1} {
		if d := s.Destinations[i]; d.Pending != pending || d.Replays != pending || d.LagSeconds < 3600 || d.LagSeconds > 7200 {
			t.Errorf("%+v", d)
		}
	}
	if len(s.Advice) != 1 || s.Advice[0].Rule != "untaken" {
		t.Errorf("%+v", s.Advice)
	}
}
