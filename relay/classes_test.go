package relay

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// While live events, a backlog and replays wait, each gets its share of the lane, whichever came first.
func TestClassesShareALane(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const each = 600
	const stayLive = `UPDATE outbox_delivery SET next_attempt_at = now() WHERE status = 'pending' AND claimed_by IS NULL
		AND next_attempt_at < now() - interval '2 seconds' AND event_id IN (SELECT id FROM outbox WHERE idempotency_key LIKE 'live-%')`
	db := newDatabase(t)
	g := newGate(t)
	var sender *lane
	answered := 0 // one after the other
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.key == "plug" {
			g.pass(r)
		}
		if answered++; answered <= each { // in which no class comes to its end
			eventually(t, "something of each class", func() bool {
				db.exec(stayLive) // or they would become backlog after liveWindow, which a busy machine needs for less
				return sender.allWait()
			})
		}
	})
	d := to(rc.URL)
	d.MaxInFlight = 1
	r := start(t, db.config(d))
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'plug')`)
	sender = r.lane("default")
	<-g.arrived // nothing else is sent before all three wait
	for prefix, change := range map[string]string{"replay": "replay = true", "backlog": "next_attempt_at = now() - interval '1 hour'"} {
		db.exec(fmt.Sprintf(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{}', '%[1]s-' || i FROM generate_series(1, %[2]d) i;
			UPDATE outbox_delivery SET %[3]s WHERE event_id IN (SELECT id FROM outbox WHERE idempotency_key LIKE '%[1]s-%%')`, prefix, each, change)) // in one transaction
	}
	db.insert(each, "live")
	r.wake.notify(true)
	g.open()
	r.settles(t, policy.Delivered, 3*each+1)

	count := map[string]int{}
	for _, key := range rc.keys()[1 : each+1] {
		class, _, _ := strings.Cut(key, "-")
		count[class]++
	}
	for class, weight := range map[string]int{"live": 8, "backlog": 3, "replay": 1} {
		// A class that is out of deliveries for a moment, between two sendings, begins to count anew.
		if want := each * weight / 12; count[class] < want-want/10 || count[class] > want+want/10 {
			t.Errorf("of the first %d, %d are %s, want %d", each, count[class], class, want)
		}
	}
	for _, got := range rc.all() {
		if replay := got.header.Get("X-Outbox-Replay") == "true"; replay != strings.HasPrefix(got.key, "replay-") {
			t.Errorf("%s: X-Outbox-Replay %q", got.key, got.header.Get("X-Outbox-Replay"))
		}
	}
}

// allWait reports whether something of each class waits to be sent.
func (l *lane) allWait() bool { return l.waits(live) && l.waits(backlog) && l.waits(replays) }

// waits reports whether something of a class waits to be sent.
func (l *lane) waits(c class) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.queues[c].empty()
}

// A replay that stands before a live event of its ordering key is sent with it, and does not make it wait among the replays.
func TestReplaysDoNotSlowTheirKey(t *testing.T) {
	t.Parallel()
	const replayed = 600
	db := newDatabase(t)
	g := newGate(t)
	var sender *lane
	var ended atomic.Bool
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		switch r.key {
		case "plug":
			g.pass(r)
		case "k-2":
			ended.Store(true)
		case "k-1":
		default: // no replay is faster than the claim of what follows k-1
			eventually(t, "the next of the key", func() bool { return ended.Load() || sender.waits(live) })
		}
	})
	d := to(rc.URL)
	d.MaxInFlight = 1
	db.insert(replayed, "replay")
	db.keyed("k", 1, 1)
	db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now()`)
	cfg := db.config(d)
	cfg.Lease = time.Hour
	r := prepared(t, cfg)
	l := r.lane("default")
	sender = l
	l.rate = policy.Throughput{PerSecond: 10_000, Since: time.Now().Add(time.Hour)} // which stays, so that all replays are claimed ahead
	r.begin()
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'plug')`)
	<-g.arrived
	done, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{Statuses: []string{"delivered"}}, 0, nil)
	must(t, err)
	if done.Done != replayed+1 {
		t.Fatalf("replayed %+v", done)
	}
	becomes(db, replayed+2, `SELECT count(*) FROM outbox_delivery WHERE claimed_by IS NOT NULL`)
	db.keyed("k", 2, 2)
	eventually(t, "the key among live deliveries", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.queues[live].taken > 1
	})
	g.open()
	r.settles(t, policy.Delivered, replayed+3)
	rc.wantSent(t, "k", "1 2")
	before := slices.Index(rc.keys(), "k-2")
	if before > replayed/10 {
		t.Errorf("the live event was sent after %d others", before)
	}
}
