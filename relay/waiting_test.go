package relay

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// What waits behind a failed head costs the other deliveries of its destination nothing: it leaves
// the index of what is due, and comes back, in order, when the head has ended.
func TestManyBehindAFailedHead(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, refusing("big-1", 1, http.StatusUnprocessableEntity))
	n := 500
	var claims atomic.Int64
	cfg := config(db, to(rc.URL))
	cfg.Hooks.ClaimRan = func(int, time.Duration) { claims.Add(1) }
	db.InsertKeyed("big", 1, n)
	r := start(t, cfg)
	r.settles(t, policy.Fail, 1)
	relaytest.Becomes(db, n-1, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND blocked_by = 1`)

	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'big-late', 'big'), ('t', '{}', 'free', NULL)`)
	r.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, n, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND blocked_by = 1`)
	before := claims.Load()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '{}', 'old', now() - interval '1 hour')`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour' WHERE status = 'pending' AND blocked_by IS NULL`)
	r.mailbox.post(agenda.CauseSweep)
	r.settles(t, policy.Delivered, 2)
	if made := claims.Load() - before; made > 50 {
		t.Errorf("%d claims before one that is due was found behind %d that wait", made, n)
	}

	_, err := ops.New(db.Pool).Discard(t.Context(), ops.Selection{EventIDs: []int64{1}}, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, n+2)
	if got := rc.Numbers("big"); got != "1 "+numbers(2, n) && got != "1 "+numbers(2, n)+" late" {
		t.Errorf("sent out of order: %.100s …", got)
	}
	if left := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE blocked_by IS NOT NULL`); left > 0 {
		t.Errorf("%d still wait", left)
	}
}

// Another relay died between the end of a head and the release of what waits behind it, or an
// operator changed rows by hand.
func TestStrandedDeliveriesAreReleased(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.InsertKeyed("k", 1, 40)
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id = 1`)
	db.Exec(`UPDATE outbox_delivery SET blocked_by = 1 WHERE event_id > 1`)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 39)
	wantSent(t, rc, "k", numbers(2, 40))
}

// A claim that finds ordering keys has found work, although the next one brings their deliveries:
// looks that follow notifications would become rare otherwise, up to 100 ms apart.
func TestFoundKeysAreWork(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := sessionOf(t, config(db, to("http://receiver.test/")))
	r.phases.Settling = t.Context()
	c := r.newClaimer()
	c.pace = agenda.Pace{Poll: time.Hour}
	db.InsertKeyed("k", 1, 1)
	turnOf(t, c)
	if c.pace.LastWork.IsZero() {
		t.Error("a key that was found counts as nothing")
	}
}
