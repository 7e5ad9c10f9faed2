package relay

import (
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// many is a relay of so many destinations that most of them rest. Each gets the events of the type
// that is its name.
type many struct {
	*relaytest.Database
	*running
	cfg   Config
	fails atomic.Bool // the receiver answers 503
}

func newMany(t *testing.T) *many {
	m := &many{Database: relaytest.Covered(t)}
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		if m.fails.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	m.cfg = config(m.Database)
	for i := range lane.Few + 20 {
		name := fmt.Sprintf("d%03d", i)
		d := to(rc.URL)
		d.Name, d.Retry.Schedule, d.Breaker.Disabled = name, []time.Duration{100 * time.Millisecond}, true
		m.cfg.Destinations = append(m.cfg.Destinations, d)
		m.cfg.Routes = append(m.cfg.Routes, Route{Event: name, To: []string{name}})
	}
	m.running = start(t, m.cfg)
	m.relayID()
	return m
}

// insert inserts an event for each of n destinations, from the first on.
func (m *many) insert(n int, key string) {
	m.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'd' || lpad(i::text, 3, '0'), '{}', $2 || i FROM generate_series(0, $1 - 1) i`, n, key)
}

func (m *many) delivered(n int, key string) {
	m.Helper()
	relaytest.Becomes(m.Database, n, `SELECT count(*)::int FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE d.status = 'delivered' AND e.idempotency_key LIKE $1 || '%'`, key)
}

func (m *many) rests() {
	m.Helper()
	relaytest.Eventually(m.t, "all lanes rest", func() bool { return len(m.lanes.Visited()) == 0 })
}

func (m *many) Helper() { m.t.Helper() }

// A lane that rests costs a turn nothing, and is found whenever something of its destination is
// due: an event, a retry, what other relays or operators made pending, what a paused destination
// held, what was there before the relay.
func TestLanesAtRestAreFound(t *testing.T) {
	t.Parallel()
	m := newMany(t)
	all := len(m.cfg.Destinations)
	m.insert(all, "event")
	m.delivered(all, "event")
	m.rests()

	m.fails.Store(true)
	m.insert(3, "retried")
	relaytest.Becomes(m.Database, 3, `SELECT count(*)::int FROM outbox_delivery WHERE attempts > 1`)
	m.fails.Store(false)
	m.delivered(3, "retried")
	m.rests()

	outbox := ops.New(m.Pool)
	_, err := outbox.Replay(t.Context(), ops.Selection{Destination: "d007", Statuses: []string{"delivered"}}, 0, nil)
	relaytest.Must(t, err)
	relaytest.Becomes(m.Database, 1, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'd007' AND replay AND status = 'delivered'`)

	_, err = outbox.Pause(t.Context(), "d001", "maintenance")
	relaytest.Must(t, err)
	m.insert(3, "paused")
	m.delivered(2, "paused")
	relaytest.Becomes(m.Database, 1, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'd001' AND status = 'pending' AND claimed_by IS NULL`)
	m.rests()
	_, err = outbox.Resume(t.Context(), "d001", false)
	relaytest.Must(t, err)
	m.delivered(3, "paused")
	m.rests()

	m.stop()
	m.insert(all, "before")
	m.running = start(t, m.cfg)
	m.delivered(all, "before")
	m.rests()
}

// Lanes that were many may become few, and the other way round, with something in flight, and none
// is forgotten.
func TestLanesBecomeFewAndManyAgain(t *testing.T) {
	t.Parallel()
	m := newMany(t)
	m.insert(len(m.cfg.Destinations), "event")
	m.rests()
	few := m.cfg
	few.Destinations, few.Routes = few.Destinations[:10], few.Routes[:10]
	m.reload(few)
	m.insert(10, "few")
	m.delivered(10, "few")
	m.reload(m.cfg)
	m.insert(len(m.cfg.Destinations), "many")
	m.delivered(len(m.cfg.Destinations), "many")
	m.rests()
}

// A destination that is down is probed, and recovers, although nothing else makes its lane work.
func TestLaneWithAnOpenBreakerWorks(t *testing.T) {
	t.Parallel()
	m := newMany(t)
	down := m.cfg
	down.Destinations = append([]Destination(nil), down.Destinations...)
	down.Destinations[0].Breaker = policy.BreakerPolicy{ProbeAfter: 10 * time.Millisecond, ProbeMax: 100 * time.Millisecond}
	m.reload(down)
	m.fails.Store(true)
	m.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'd000', '{}', 'down' || i FROM generate_series(1, 40) i`)
	relaytest.Becomes(m.Database, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'd000'), '')`)
	m.fails.Store(false)
	m.delivered(40, "down")
	m.rests()
}

// One of a thousand destinations is dead, or hangs: all events of the others arrive, and none of
// them spends an attempt.
func TestOneOfAThousandDestinations(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	hangs := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { <-r.Context().Done() })
	for what, bad := range map[string]string{"is dead": testkit.NewVacant(t).URL, "hangs": hangs.URL} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := relaytest.New(t)
			rc := relaytest.NewReceiver(t, nil)
			cfg := config(db)
			const all, each = 1000, 10
			for i := range all {
				d := to(rc.URL)
				d.Name = fmt.Sprintf("d%03d", i)
				if i == all/2 {
					d.URL, d.Timeout = bad, time.Second
				}
				cfg.Destinations = append(cfg.Destinations, d)
				cfg.Routes = append(cfg.Routes, Route{Event: d.Name, To: []string{d.Name}})
			}
			start(t, cfg).relayID()
			for n := range each {
				db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
					SELECT 'd' || lpad(i::text, 3, '0'), '{}', $2::text || '-' || i, CASE i % 2 WHEN 0 THEN i::text END FROM generate_series(0, $1 - 1) i`, all, strconv.Itoa(n))
			}
			relaytest.Becomes(db, (all-1)*each, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1 AND destination <> 'd500'`)
			testkit.Equal(t, "requests", rc.Total(), (all-1)*each)
			testkit.Equal(t, "failed attempts at the others", relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt WHERE destination <> 'd500' AND outcome <> 'delivered'`), 0)
			relaytest.Becomes(db, each, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND destination = 'd500'`)
			if n := relaytest.Row[int](db, `SELECT coalesce(sum(attempts), 0) FROM outbox_delivery WHERE destination = 'd500'`); n > policy.DefaultBreakerFailures {
				t.Errorf("%d attempts are spent at the one", n)
			}
		})
	}
}
