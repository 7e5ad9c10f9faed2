package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Single sessions are killed all the time, of statements in flight too.
func TestKilledBackendsLoseNothing(t *testing.T) {
	t.Parallel()
	events := testsize.Of(3000, 1000)
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(events, "key")
	d := to(rc.URL)
	d.Timeout = 5 * time.Second
	cfg := config(db, d)
	cfg.Lease = 10 * time.Second
	r := start(t, cfg)
	for kills := 1; kills <= 10; kills++ {
		r.await(t, "progress", func(o *observer) bool { return o.outcomes[policy.Delivered] >= kills*events/20 })
		db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'
			AND (state = 'active' OR $1::int % 3 = 0)`, kills)
	}
	relaytest.Becomes(db, events, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts >= 1`)
}
