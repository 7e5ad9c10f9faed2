package relay

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

const insertKeyedEvent = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', $1, $2)`

// rangesEnd waits until no range is open and each event has a row.
func rangesEnd(db *relaytest.Database) {
	db.Helper()
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox o WHERE NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id)`)
}

// A delivery is written once, with its outcome: no row is inserted as pending and updated, unless
// its answer took a second.
func TestEventsAreTakenAndWrittenOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Exec(`CREATE TABLE noted (inserted text, slow boolean);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS $$ BEGIN
			INSERT INTO noted SELECT NEW.status, clock_timestamp() > o.created_at + interval '1 second' FROM outbox o WHERE o.id = NEW.event_id;
			RETURN NULL;
		END $$;
		CREATE TRIGGER note AFTER INSERT ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION note()`)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.relayID()
	db.Insert(50, "key")
	r.settles(t, policy.Delivered, 50)
	rangesEnd(db)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1 AND claim > 0`); n != 50 || rc.Total() != 50 {
		t.Errorf("%d are delivered, %d requests", n, rc.Total())
	}
	if got := relaytest.Rows[string](db, `SELECT inserted || ' ' || slow || ' ' || count(*) FROM noted WHERE inserted <> 'delivered' AND NOT slow GROUP BY inserted, slow`); len(got) > 0 {
		t.Errorf("inserted: %v", got)
	}
}

// A transaction that commits long after later ones delays nothing, and its event comes when it has
// committed, also to a relay that does not poll.
func TestLateCommitArrives(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, rarely(config(db, to(rc.URL))))
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	late := db.Begin()
	_, err := late.Exec(t.Context(), insertKeyedEvent, "late", "k")
	relaytest.Must(t, err)
	db.Insert(3, "early")
	r.settles(t, policy.Delivered, 3)
	relaytest.Must(t, late.Commit(t.Context()))
	r.settles(t, policy.Delivered, 4)
	if keys := rc.Keys(); keys[3] != "late" {
		t.Errorf("%v", keys)
	}
}

// An event that commits while a later one of its ordering key is being sent does not wait for that
// one's retry.
func TestLateCommitWhileItsKeyIsInHand(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	g := relaytest.NewGate(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Key == "k-2" {
			g.Pass(r)
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Retry.Schedule = []time.Duration{time.Hour}
	r := start(t, rarely(config(db, d)))
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	late := db.Begin()
	_, err := late.Exec(t.Context(), insertKeyedEvent, "k-1", "k")
	relaytest.Must(t, err)
	db.Exec(insertKeyedEvent, "k-2", "k")
	<-g.Arrived
	relaytest.Must(t, late.Commit(t.Context()))
	db.Insert(1, "other")
	r.settles(t, policy.Delivered, 1)
	g.Open()
	r.settles(t, policy.Delivered, 2)
}

// What cannot be sent within a second gets rows, so that the range ends.
func TestRangeEndsWhileItsDeliveriesAreInFlight(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	g, rc := relaytest.NewGated(t)
	d := to(rc.URL)
	d.MaxInFlight = 2
	r := start(t, config(db, d))
	db.Insert(5, "key")
	<-g.Arrived
	<-g.Arrived
	rangesEnd(db)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NOT NULL`); n == 0 {
		t.Error("no row is claimed")
	}
	g.Open()
	r.settles(t, policy.Delivered, 5)
	testkit.Equal(t, "requests", rc.Total(), 5)
}

// A route applies to the events that commit after it, and parked ones are released.
func TestRouteAppliesAtOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "other")
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL), named("other", to(rc.URL)))
	cfg.Routes = nil
	r := start(t, cfg)
	db.Insert(1, "a")
	r.await(t, "the first", func(o *observer) bool { return o.outcomes[policy.Delivered] >= 1 })
	for i := range 20 {
		db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ($1, 'default')`, fmt.Sprintf("t%d", i))
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ($1, '{}', $2)`, fmt.Sprintf("t%d", i), fmt.Sprintf("t%d", i))
	}
	relaytest.Becomes(db, 20, `SELECT count(*) FROM outbox_delivery WHERE destination = 'default' AND status = 'delivered' AND event_id > 1`)
}

// A payload that is too large fails the event under the rule's name, also if the event got its row
// before the payload was read.
func TestTooLargePayloadFailsWhenItIsLoaded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', to_json(repeat('x', (1 << 20) - 2)), 'fits'), ('t', to_json(repeat('x', (1 << 20) - 1)), 'large')`)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_error LIKE '%the rule outbox\_payload\_is\_at\_most\_1\_mib'`)
	testkit.Equal(t, "sent", rc.Keys(), []string{"fits"})
}

// An event of the future is not sent early, and is sent in time. One that is due does not wait for
// it.
func TestEventOfTheFutureBecomesPending(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	db.Insert(1, "now")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '{}', 'soon', now() + interval '2 seconds'), ('t', '{}', 'later', now() + interval '1 hour')`)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND next_attempt_at > now() + interval '30 minutes'`)
	r.settles(t, policy.Delivered, 2)
	if early := relaytest.Row[bool](db, `SELECT bool_or(d.last_attempt_at < o.available_at) FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id`); early {
		t.Error("it was sent early")
	}
	testkit.Equal(t, "sent", rc.Keys(), []string{"now-1", "soon"})
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() WHERE status = 'pending'`)
	r.settles(t, policy.Delivered, 3)
}

// A backlog that no relay has taken is delivered in whole, with keys and without, beside a
// destination that bears little.
func TestBacklogIsTaken(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "fast", "slow")
	fast := relaytest.NewReceiver(t, nil)
	slow := relaytest.NewReceiver(t, func(http.ResponseWriter, relaytest.Request) { <-time.After(5 * time.Millisecond) })
	n := testsize.Of(6000, 3000)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, created_at)
		SELECT 't', '{}', 'e' || i, CASE WHEN i % 3 = 0 THEN 'k' || i % 50 END, now() - interval '1 hour' FROM generate_series(1, $1) i`, n)
	s := named("slow", to(slow.URL))
	s.MaxInFlight = 8
	start(t, config(db, named("fast", to(fast.URL)), s))
	relaytest.Becomes(db, n, `SELECT count(*) FROM outbox_delivery WHERE destination = 'fast' AND status = 'delivered'`)
	relaytest.Becomes(db, 2*n, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	if fast.Total() != n || slow.Total() != n {
		t.Errorf("%d and %d requests for %d events", fast.Total(), slow.Total(), n)
	}
}

// A relay that stops gives back what it has not sent.
func TestStopGivesBackWhatIsInHand(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	g, rc := relaytest.NewGated(t, "key-1")
	d := to(rc.URL)
	d.MaxInFlight = 1
	r := start(t, config(db, d))
	db.Insert(1, "key")
	<-g.Arrived
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'more' || i, 'k' FROM generate_series(1, 10) i`)
	relaytest.Becomes(db, true, `SELECT pg_current_xact_id() IS NOT NULL AND NOT EXISTS (
		SELECT FROM outbox o WHERE NOT pg_visible_in_snapshot(o.xid, (SELECT target FROM outbox_range ORDER BY seq DESC LIMIT 1)))`)
	r.cancel()
	g.Open()
	r.stop()
	rangesEnd(db)
	testkit.Equal(t, "given back", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NULL AND attempts = 0`), 10)
	start(t, config(db, d)).settles(t, policy.Delivered, 10)
}

// A receiver that was fast and stops answering keeps no new event from other destinations.
func TestHungReceiverKeepsNoNewEventFromOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "hung", "well")
	g := relaytest.NewGate(t)
	hung := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) {
		if strings.HasPrefix(r.Key, "later") {
			g.Pass(r)
		}
	})
	well := relaytest.NewReceiver(t, nil)
	start(t, config(db, named("hung", to(hung.URL)), named("well", to(well.URL))))
	db.Insert(1000, "first")
	relaytest.Becomes(db, 2000, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	n := testsize.Of(8000, 3000)
	for i := range 4 {
		db.Insert(n/4, fmt.Sprint("later", i))
	}
	relaytest.Becomes(db, 1000+n, `SELECT count(*) FROM outbox_delivery WHERE destination = 'well' AND status = 'delivered'`)
	g.Open()
	relaytest.Becomes(db, 1000+n, `SELECT count(*) FROM outbox_delivery WHERE destination = 'hung' AND status = 'delivered'`)
}
