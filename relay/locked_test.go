package relay

import (
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// keepsLocked is what the log says of rows that a settle met locked more than once.
const keepsLocked = "another session keeps deliveries locked"

// Another relay's claim began before this one's, and finds deliveries that this one has claimed
// meanwhile. It leaves them, but keeps their rows locked until it commits, which a slow machine may
// put off. That is no failure of the database, and nothing is sent twice.
func TestClaimOfAnotherRelayFailsNoSettle(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(3, "key")
	slow := db.Locker(`SET LOCAL application_name = 'slow'`)
	relayID, err := session.Register(t.Context(), db.Pool, false, "slow", "", time.Hour)
	relaytest.Must(t, err)
	rescuer := db.Locker(`SELECT FROM outbox_relay WHERE name = 'slow' FOR UPDATE`) // the claim waits for it when it has its snapshot
	claimed := make(chan struct{})
	var result claim.Result
	go func() {
		defer close(claimed)
		request := claim.Request{Destination: "default", Scans: []lane.Scan{{Free: 10}}}
		result, err = claims{slow}.Claim(t.Context(), relayID, time.Hour, []claim.Request{request})
	}()
	relaytest.Becomes(db, true, `SELECT count(*) = 1 FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'slow' AND wait_event_type = 'Lock'`)
	logged := &relaytest.Buffer{}
	cfg := config(db, to(rc.URL))
	cfg.Log = zerolog.New(logged)
	r := start(t, cfg)
	for range 3 {
		<-g.Arrived
	}
	_, errRescuer := rescuer.Exec(t.Context(), `ROLLBACK`)
	relaytest.Must(t, errRescuer)
	within(t, "the other claim", claimed)
	if relaytest.Must(t, err); len(result.Deliveries) != 0 {
		t.Fatalf("it claimed %d deliveries that were claimed already", len(result.Deliveries))
	}
	g.Open()
	relaytest.Eventually(t, "vain settles", func() bool { return strings.Contains(logged.String(), keepsLocked) })
	_, err = slow.Exec(t.Context(), `COMMIT`)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 3)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1 AND rescues = 0`); n != 3 || rc.Total() != 3 {
		t.Errorf("%d of 3 are delivered at the first attempt, %d requests", n, rc.Total())
	}
	if sees(r.observer, func(o *observer) int { return o.stale + len(o.failures) }) != 0 {
		t.Errorf("stale %d, failed %v", r.stale, r.failures)
	}
}
