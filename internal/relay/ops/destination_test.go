package ops_test

import (
	"context"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestResumeResetsTheBreaker(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	outbox := ops.New(db.Pool)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at, breaker, breaker_opened_at, breaker_until, breaker_relay_id, breaker_probes, breaker_error)
		VALUES ('default', true, now(), 'half_open', now(), now() + interval '1 hour', 3, 2, 'refused')`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('breaker_open', 'default'), ('breaker_open', 'other'), ('failed', 'default')`)
	const breaker = `SELECT breaker || ' ' || breaker_probes FROM outbox_destination WHERE NOT paused`

	if got, err := outbox.Resume(t.Context(), "default", false); err != nil || got.Breaker != "half_open" || !got.Changed || got.BreakerReset {
		t.Errorf("%+v, %v", got, err)
	}
	testkit.Equal(t, "the breaker", relaytest.Row[string](db, breaker), "half_open 2")
	if got, err := outbox.Resume(t.Context(), "default", true); err != nil || got.Breaker != "closed" || got.Changed || !got.BreakerReset {
		t.Errorf("%+v, %v", got, err)
	}
	testkit.Equal(t, "the breaker", relaytest.Row[string](db, breaker), "closed 0")
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert WHERE resolved_at IS NOT NULL`); n > 0 {
		t.Errorf("%d alerts have ended, though nothing says that the destination works", n)
	}
}

func TestDestinations(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "routed")
	db.Insert(2, "k")
	db.Exec(`UPDATE outbox_delivery SET destination = CASE event_id WHEN 1 THEN 'waiting' ELSE 'failed' END`)
	db.Settled("failed", "event_id = 2")
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route VALUES ('x', 'routed'); INSERT INTO outbox_destination (destination) VALUES ('state')`)
	db.Insert(1, "parked")
	got, err := ops.New(db.Pool).Destinations(t.Context())
	relaytest.Must(t, err)
	if want := []string{"failed", "routed", "state", "waiting"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Relays look behind their positions at once, where what an operator released may lie.
func TestOperatorsTellRelays(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(2, "k")
	db.Settled("failed", "event_id = 1")
	outbox := ops.New(db.Pool)
	_, err := outbox.Pause(t.Context(), "default", "")
	relaytest.Must(t, err)
	listening, err := db.Pool.Acquire(t.Context())
	relaytest.Must(t, err)
	defer listening.Release()
	conn := listening.Conn()
	_, err = conn.Exec(t.Context(), `LISTEN outbox_wake`)
	relaytest.Must(t, err)
	waiting, cancel := context.WithTimeout(t.Context(), relaytest.Patience)
	defer cancel()
	for name, act := range map[string]func() error{
		"replay": func() error {
			_, err := outbox.Replay(t.Context(), ops.Selection{EventIDs: []int64{1}}, 0, nil)
			return err
		},
		"discard": func() error {
			_, err := outbox.Discard(t.Context(), ops.Selection{EventIDs: []int64{2}}, nil)
			return err
		},
		"resume": func() error { _, err := outbox.Resume(t.Context(), "default", false); return err },
	} {
		relaytest.Must(t, act())
		for {
			notification, err := conn.WaitForNotification(waiting)
			if err != nil {
				t.Fatalf("%s notifies no relay: %v", name, err)
			}
			if notification.Payload == "sweep public" {
				break
			}
		}
	}
}

// A destination without state has no row to lock. A pause that makes one after the resume has
// looked is ended by it, and the answer and the audit say so.
func TestResumeMeetsAPause(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	slow := pgtest.PoolBefore(t, db.DSN, "SET paused = false", func() {
		_, err := ops.New(db.Pool).Pause(t.Context(), "default", "maintenance")
		relaytest.Must(t, err)
	})
	if got, err := ops.New(slow).Resume(t.Context(), "default", false); err != nil || !got.Changed || got.Paused {
		t.Errorf("%+v, %v", got, err)
	}
	testkit.Equal(t, "the audit has", relaytest.Rows[string](db, `SELECT action FROM outbox_audit ORDER BY id`), []string{"pause", "resume"})
}
