package relay

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// While live events, a backlog and replays wait, each gets its share of the lane, whichever came
// first.
func TestClassesShareALane(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const each = 600
	const stayLive = `UPDATE outbox_delivery SET next_attempt_at = now() WHERE status = 'pending' AND claimed_by IS NULL
		AND next_attempt_at < now() - interval '2 seconds' AND event_id IN (SELECT id FROM outbox WHERE idempotency_key LIKE 'live-%')`
	db := relaytest.Covered(t)
	g := relaytest.NewGate(t)
	var sender *lane.Lane
	answered := 0 // one after the other
	rc := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) {
		if r.Key == "plug" {
			g.Pass(r)
		}
		if answered++; answered <= each { // in which no class comes to its end
			relaytest.Eventually(t, "something of each class", func() bool {
				db.Exec(stayLive) // or they would become backlog after liveWindow, which a busy machine needs for less
				held := sender.Counts()
				return !slices.Contains(held[:], 0)
			})
		}
	})
	d := to(rc.URL)
	d.MaxInFlight = 1
	r := start(t, config(db, d))
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'plug')`)
	sender = r.lane("default")
	<-g.Arrived // nothing else is sent before all three wait
	for prefix, change := range map[string]string{"replay": "replay = true", "backlog": "next_attempt_at = now() - interval '1 hour'"} {
		db.Exec(fmt.Sprintf(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', '%[1]s-' || i FROM generate_series(1, %[2]d) i;
			UPDATE outbox_delivery SET %[3]s WHERE event_id IN (SELECT id FROM outbox WHERE idempotency_key LIKE '%[1]s-%%')`, prefix, each, change)) // in one transaction
	}
	db.Insert(each, "live")
	r.mailbox.post(agenda.CauseSweep)
	g.Open()
	r.settles(t, policy.Delivered, 3*each+1)

	count := map[string]int{}
	for _, key := range rc.Keys()[1 : each+1] {
		class, _, _ := strings.Cut(key, "-")
		count[class]++
	}
	for class, weight := range map[string]int{"live": 8, "backlog": 3, "replay": 1} {
		// A class that is out of deliveries for a moment, between two sendings, begins to count
		// again.
		if want := each * weight / 12; count[class] < want-want/10 || count[class] > want+want/10 {
			t.Errorf("of the first %d, %d are %s, want %d", each, count[class], class, want)
		}
	}
	for _, got := range rc.All() {
		if replay := got.Header.Get("X-Outbox-Replay") == "true"; replay != strings.HasPrefix(got.Key, "replay-") {
			t.Errorf("%s: X-Outbox-Replay %q", got.Key, got.Header.Get("X-Outbox-Replay"))
		}
	}
}
