package relay

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// While live events, a backlog and replays wait, each gets its share of the lane, whichever came first.
func TestClassesShareALane(t *testing.T) {
	t.Parallel()
	const each = 600
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.key == "plug" {
			g.pass(r)
		}
	})
	d := to(rc.URL)
	d.MaxInFlight = 1
	r := start(t, db.config(d))
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'plug')`)
	<-g.arrived // nothing else is sent before all three wait
	for prefix, change := range map[string]string{"replay": "replay = true", "backlog": "next_attempt_at = now() - interval '1 hour'"} {
		db.exec(fmt.Sprintf(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', '%[1]s-' || i FROM generate_series(1, %[2]d) i;
			UPDATE outbox_delivery SET %[3]s WHERE event_id IN (SELECT id FROM outbox WHERE idempotency_key LIKE '%[1]s-%%')`, prefix, each, change)) // in one transaction
	}
	db.insert(each, "live")
	r.wake.notify(true)
	becomes(db, true, `SELECT count(*) FILTER (WHERE claimed_by IS NOT NULL AND replay) > 0
		AND count(*) FILTER (WHERE claimed_by IS NOT NULL AND next_attempt_at < now() - interval '30 minutes') > 0
		AND count(*) FILTER (WHERE claimed_by IS NOT NULL AND NOT replay AND next_attempt_at > now() - interval '30 minutes') > 1 FROM outbox_delivery`)
	g.open()
	r.settles(t, Delivered, 3*each+1)

	count := map[string]int{}
	for _, key := range rc.keys()[1 : each+1] {
		class, _, _ := strings.Cut(key, "-")
		count[class]++
	}
	t.Logf("of the first %d: %v", each, count)
	// 8 : 3 : 1, less what a class misses while its next batch is on its way.
	if count["live"] < each/3 || count["live"] <= count["backlog"] || count["backlog"] <= count["replay"] || count["replay"] < each/24 {
		t.Errorf("of the first %d: %v", each, count)
	}
	for _, got := range rc.all() {
		if replay := got.header.Get("X-Outbox-Replay") == "true"; replay != strings.HasPrefix(got.key, "replay-") {
			t.Errorf("%s: X-Outbox-Replay %q", got.key, got.header.Get("X-Outbox-Replay"))
		}
	}
}
