package relay

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.instance()
	ops := NewOps(db.pool)

	for _, test := range []struct {
		reason string
		want   Pause
	}{
		{"maintenance", Pause{Destination: "default", Paused: true, Changed: true, Reason: "maintenance", Breaker: "closed"}},
		{"", Pause{Destination: "default", Paused: true, Reason: "maintenance", Breaker: "closed"}},
		{"longer maintenance", Pause{Destination: "default", Paused: true, Reason: "longer maintenance", Breaker: "closed"}},
	} {
		if got, err := ops.Pause(t.Context(), "default", test.reason); err != nil || got != test.want {
			t.Errorf("got %+v, %v, want %+v", got, err, test.want)
		}
	}
	idle := sees(r.observer, func(o *observer) int { return o.idle })
	db.insert(3, "k")
	r.await(t, "a look at what waits", func(o *observer) bool { return o.idle > idle })
	if n := rc.total(); n != 0 {
		t.Errorf("%d were sent to a paused destination", n)
	}
	got, err := ops.Resume(t.Context(), "default", false)
	if want := (Pause{Destination: "default", Changed: true, Reason: "maintenance", Breaker: "closed"}); err != nil || got.Changed != want.Changed || got.Paused {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	r.settles(t, policy.Delivered, 3)
	if got, err := ops.Resume(t.Context(), "default", true); err != nil || got.Changed || got.BreakerReset {
		t.Errorf("a second time: %+v, %v", got, err)
	}
	for _, change := range []func() (Pause, error){
		func() (Pause, error) { return ops.Pause(t.Context(), "defualt", "") },
		func() (Pause, error) { return ops.Resume(t.Context(), "", true) },
	} {
		if _, err := change(); !errors.Is(err, ErrUnknownDestination) {
			t.Error(err)
		}
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_destination`); n != 1 {
		t.Errorf("%d destinations have state", n)
	}
}

func TestResumeResetsTheBreaker(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ops := NewOps(db.pool)
	db.exec(`INSERT INTO outbox_destination (destination, paused, paused_at, breaker, breaker_opened_at, breaker_until, breaker_owner, breaker_probes, breaker_error)
		VALUES ('default', true, now(), 'half_open', now(), now() + interval '1 hour', 3, 2, 'refused')`)
	db.exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('breaker_open', 'default'), ('breaker_open', 'other'), ('failed', 'default')`)
	const breaker = `SELECT breaker || ' ' || breaker_probes FROM outbox_destination WHERE NOT paused`

	if got, err := ops.Resume(t.Context(), "default", false); err != nil || got.Breaker != "half_open" || !got.Changed || got.BreakerReset {
		t.Errorf("%+v, %v", got, err)
	}
	if got := row[string](db, breaker); got != "half_open 2" {
		t.Errorf("the breaker is %s", got)
	}
	if got, err := ops.Resume(t.Context(), "default", true); err != nil || got.Breaker != "closed" || got.Changed || !got.BreakerReset {
		t.Errorf("%+v, %v", got, err)
	}
	if got := row[string](db, breaker); got != "closed 0" {
		t.Errorf("the breaker is %s", got)
	}
	if got := rows[string](db, `SELECT rule || ' ' || subject FROM outbox_alert WHERE resolved_at IS NOT NULL`); !slices.Equal(got, []string{"breaker_open default"}) {
		t.Errorf("resolved are %q", got)
	}
}

func TestDestinations(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "routed")
	db.insert(2, "k")
	db.exec(`UPDATE outbox_delivery SET destination = CASE event_id WHEN 1 THEN 'waiting' ELSE 'failed' END`)
	db.settled("failed", "event_id = 2")
	db.exec(`DELETE FROM outbox_route; INSERT INTO outbox_route VALUES ('x', 'routed'); INSERT INTO outbox_destination (destination) VALUES ('state')`)
	db.insert(1, "parked")
	got, err := NewOps(db.pool).Destinations(t.Context())
	must(t, err)
	if want := []string{"failed", "routed", "state", "waiting"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// The head of a blocked key is given up, and those behind it go at once, though they lie behind the relay's position.
func TestDiscardTheHeadOfAKey(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.key == "head" {
			w.WriteHeader(422)
		}
	})
	r := start(t, db.config(to(rc.URL)))
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		VALUES ('t', '{}', 'head', 'o'), ('t', '{}', 'second', 'o'), ('t', '{}', 'third', 'o'), ('t', '{}', 'free', 'p')`)
	r.settles(t, policy.Fail, 1)
	r.settles(t, policy.Delivered, 1)
	ops := NewOps(db.pool)
	head, err := ops.HeadOfKey(t.Context(), "default", "o")
	must(t, err)
	if head == nil || head.EventID != 1 || head.IdempotencyKey != "head" || head.Status != "failed" || head.Behind != 2 {
		t.Fatalf("the head is %+v", head)
	}
	waits, err := ops.Waits(t.Context(), 3)
	must(t, err)
	if len(waits) != 1 || waits[0].Why != "behind" {
		t.Errorf("the third waits for %+v", waits)
	}
	b, err := ops.Discard(t.Context(), Selection{EventIDs: []int64{1}, Destination: "default"}, nil)
	must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, 3)
	if head, err := ops.HeadOfKey(t.Context(), "default", "o"); head != nil || err != nil {
		t.Errorf("%+v, %v", head, err)
	}
}

// A delivered event that is replayed holds up the later ones of its key that are still pending.
func TestReplayKeepsTheOrder(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', '1', 'o'), ('t', '{}', '2', 'o'), ('t', '{}', '3', 'o')`)
	db.settled("delivered", "event_id = 1")
	b, err := NewOps(db.pool).Replay(t.Context(), Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 3)
	if got := rc.keys(); !slices.Equal(got, []string{"1", "2", "3"}) {
		t.Errorf("sent in the order %q", got)
	}
}

// Relays look behind their positions at once, where what an operator released may lie.
func TestOperatorsTellRelays(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(2, "k")
	db.settled("failed", "event_id = 1")
	ops := NewOps(db.pool)
	_, err := ops.Pause(t.Context(), "default", "")
	must(t, err)
	conn := commandConn(t, db)
	_, err = conn.Exec(t.Context(), listen)
	must(t, err)
	waiting, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, act := range map[string]func() error{
		"replay":  func() error { _, err := ops.Replay(t.Context(), Selection{EventIDs: []int64{1}}, 0, nil); return err },
		"discard": func() error { _, err := ops.Discard(t.Context(), Selection{EventIDs: []int64{2}}, nil); return err },
		"resume":  func() error { _, err := ops.Resume(t.Context(), "default", false); return err },
	} {
		must(t, act())
		for {
			notification, err := conn.WaitForNotification(waiting)
			if err != nil {
				t.Fatalf("%s tells nobody: %v", name, err)
			}
			if notification.Payload == "sweep public" {
				break
			}
		}
	}
}
