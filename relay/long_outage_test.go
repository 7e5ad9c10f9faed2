package relay

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// letPass lets time pass in the database: everything that it remembers happened so much earlier.
func letPass(db *relaytest.Database, d time.Duration) {
	db.Helper()
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = next_attempt_at - $1::interval,
		last_attempt_at = last_attempt_at - $1::interval WHERE status = 'pending' AND claimed_by IS NULL`, d)
	db.Exec(`UPDATE outbox_destination SET breaker_opened_at = breaker_opened_at - $1::interval,
		breaker_until = breaker_until - $1::interval WHERE breaker = 'open'`, d)
}

// A destination is down for 63 hours, in which everything is probed again and again and nothing
// fails. Then what is new goes before what has waited.
func TestOutageOfDays(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, down := range map[string]http.Handler{
		"nothing listens":       nil,
		"every answer is a 500": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }),
		"everything is a 404":   http.NotFoundHandler(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const waiting, fresh = 200, 20
			db := relaytest.Covered(t)
			rc := relaytest.NewReceiver(t, nil)
			var up atomic.Pointer[lane.Lane]
			front := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if l := up.Load(); l != nil {
					// What is live is waited for, as far as the lane has room: else what counts is
					// how fast it is claimed.
					relaytest.Eventually(t, "live deliveries", func() bool {
						db.Exec(keepLive)
						return fullOfLive(l) || relaytest.Row[bool](db, `SELECT coalesce(bool_and(claimed_by IS NOT NULL), true) FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id
							WHERE d.status = 'pending' AND e.idempotency_key LIKE 'fresh%'`)
					})
					rc.Config.Handler.ServeHTTP(w, r)
					return
				}
				down.ServeHTTP(w, r)
			})
			place := testkit.NewVacant(t)
			if down != nil {
				place.Open(t, front)
			}

			d := post.Destination{Name: "default", URL: place.URL, MaxInFlight: 8, Timeout: DefaultLease / 2} // which a slow machine does not reach
			d.Breaker = policy.BreakerPolicy{ProbeAfter: 5 * time.Millisecond, ProbeMax: 20 * time.Millisecond}
			db.Insert(waiting, "waiting")
			r := start(t, config(db, d))
			relaytest.Becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination), '')`)
			for range 21 {
				before := sees(r.observer, func(o *observer) int { return len(o.attempts) })
				letPass(db, 3*time.Hour)
				r.await(t, "a probe", func(o *observer) bool { return len(o.attempts) > before })
			}
			if !relaytest.Row[bool](db, `SELECT count(*) = $1 AND bool_and(status = 'pending') AND count(*) FILTER (WHERE attempts > 0) <= $2 AND max(attempts) <= $2
				FROM outbox_delivery`, waiting, policy.DefaultBreakerFailures) {
				t.Error(relaytest.Row[string](db, `SELECT string_agg(DISTINCT concat_ws(' ', status, attempts), ', ') FROM outbox_delivery`))
			}
			relaytest.Becomes(db, true, `SELECT count(*) >= 21 FROM outbox_attempt WHERE outcome = 'hold'`) // the hook reports an attempt before it is logged

			db.Insert(fresh, "fresh")
			up.Store(r.lane("default"))
			if down == nil {
				place.Open(t, front)
			}
			relaytest.Becomes(db, waiting+fresh, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
			last := 0
			for i, key := range rc.Keys() {
				if strings.HasPrefix(key, "fresh") {
					last = i
				}
			}
			// Eight of eleven are live while both wait, and what the first probes took stands
			// before them.
			if last > 3*fresh {
				t.Errorf("the last fresh event came as number %d of %d", last+1, rc.Total())
			}
			relaytest.Becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
		})
	}
}

// keepLive keeps fresh deliveries live until they are claimed, however long this machine takes for
// those before them.
const keepLive = `
UPDATE outbox_delivery d SET next_attempt_at = now()
FROM (SELECT event_id FROM outbox_delivery
      WHERE status = 'pending' AND claimed_by IS NULL AND attempts = 0 AND event_id IN (SELECT id FROM outbox WHERE idempotency_key LIKE 'fresh%')
      FOR UPDATE SKIP LOCKED) f
WHERE d.event_id = f.event_id`

// fullOfLive reports whether as many live deliveries are claimed as the lane sends at once.
func fullOfLive(l *lane.Lane) bool { return l.Counts()[lane.Live] >= l.State().Concurrency }
