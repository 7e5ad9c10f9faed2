package relay

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// When a head fails as a crash loop, what follows it has not become suspect with it.
func TestFollowersOfACrashLoopAreSpared(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("k", 1, 10)
	for range capacity.AloneFrom {
		s, relayID := registered(db)
		s.claimKey(db, relayID, "k")
		db.Exec(session.RescueRelay, relayID)
	}
	db.Exec(`UPDATE outbox_delivery SET rescues = $1 WHERE event_id = 1`, capacity.CrashLoop)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Fail, 1)
	_, err := ops.New(db.Pool).Discard(t.Context(), ops.Selection{EventIDs: []int64{1}}, nil)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 9)
	wantSent(t, rc, "k", numbers(2, 10))
}

// A key whose deliveries take long takes no room from others: what stands in its run waits for the
// one before it, and for no sender.
func TestRunsTakeNoRoomFromOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g := relaytest.NewGate(t)
	rc := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) {
		if strings.HasSuffix(r.Key, "slow-1") {
			g.Pass(r)
		}
	})
	for _, key := range []string{"a-slow", "b-slow", "c-slow"} {
		db.InsertKeyed(key, 1, 40)
	}
	d := to(rc.URL)
	d.MaxInFlight = 4
	r := start(t, config(db, d))
	for range 3 {
		<-g.Arrived
	}
	db.Insert(200, "free")
	db.InsertKeyed("quick", 1, 40)
	r.settles(t, policy.Delivered, 240)
	wantSent(t, rc, "quick", numbers(1, 40))
	g.Open()
	r.settles(t, policy.Delivered, 360)
	for _, key := range []string{"a-slow", "b-slow", "c-slow"} {
		wantSent(t, rc, key, numbers(1, 40))
	}
	if _, followers := r.lane("default").RunBounds(time.Minute); followers != lane.MaxBehind {
		t.Errorf("%d are thought to be in runs", lane.MaxBehind-followers)
	}
}
