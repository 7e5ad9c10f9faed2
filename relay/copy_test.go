package relay

import (
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// knows makes an address one that relays have been accepted under, for tests in which the next
// relay finds no living relay to vouch for it. Some relay must have recorded the database before.
func knows(db *relaytest.Database, dsn string) {
	db.Helper()
	if db.Exec(`UPDATE outbox_identity SET addresses = addresses || $1::text`, identity.Address(settings(db, dsn).ConnConfig)) != 1 {
		db.Fatal("no relay has recorded this database yet")
	}
}

// written is everything that a relay may write but the row that shows it and its alert.
const written = `
SELECT md5(string_agg(line, '|' ORDER BY line)) FROM (
    SELECT 'delivery ' || d::text AS line FROM outbox_delivery d
    UNION ALL SELECT 'route ' || r::text FROM outbox_route r
    UNION ALL SELECT 'attempt ' || a::text FROM outbox_attempt a
    UNION ALL SELECT 'destination ' || d::text FROM outbox_destination d
    UNION ALL SELECT 'identity ' || i::text FROM outbox_identity i
    UNION ALL SELECT 'alert ' || a::text FROM outbox_alert a WHERE rule <> 'quarantined'
    UNION ALL SELECT 'relay ' || r::text FROM outbox_relay r WHERE quarantined IS NULL
    UNION ALL SELECT 'event ' || e.id::text FROM outbox e) everything`

// A copy of a database in which a relay ran, with deliveries claimed by a relay that is dead in the
// copy, parked ones that have a route, and an alert that was not sent: the relay on the copy, which
// has the configuration of the original, sends nothing and changes nothing. Once the copy is
// accepted the relay works.
func TestCopyIsLeftAlone(t *testing.T) {
	t.Parallel()
	const events = 20
	db := relaytest.Covered(t)
	first := start(t, config(db, to("http://receiver.test/")))
	first.relayID()
	first.stop()
	db.Insert(events, "key")
	db.Exec(`INSERT INTO outbox_relay (name, version, session_pid) VALUES ('original', 'v1', 0)`)
	db.Exec(`UPDATE outbox_delivery SET claimed_by = (SELECT id FROM outbox_relay), lease_expires_at = now() + interval '1 second' WHERE event_id < 10`)
	db.Exec(`UPDATE outbox_delivery SET destination = '' WHERE event_id = 10`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, first_error) VALUES ('failed', 'default', 'of the original')`)
	copied := db.FromTemplate()
	before := relaytest.Row[string](copied, written)

	rc, slack := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	cfg := config(copied, to(rc.URL))
	cfg.Destinations = append(cfg.Destinations, post.Destination{Name: "new", URL: rc.URL}) // a route to write
	cfg.Alerts.Channels = []alert.Channel{alert.Slack(slack.URL, direct)}
	var mu sync.Mutex
	var reasons []string
	cfg.Hooks.Quarantined = func(reason string) {
		mu.Lock()
		defer mu.Unlock()
		reasons = append(reasons, reason)
	}
	r := start(t, cfg)
	r.await(t, "the alert", func(o *observer) bool { return len(o.notices) == 1 })
	testkit.Contains(t, "the alert", string(slack.All()[0].Body), "quarantine", "outbox-relay identity accept")
	signal(r.signals.parked) // as the session does when a route was added
	signal(r.signals.alerts)
	beat := relaytest.Row[string](copied, `SELECT heartbeat_at::text FROM outbox_relay WHERE quarantined IS NOT NULL`)
	relaytest.Becomes(copied, true, `SELECT heartbeat_at > $1::timestamptz FROM outbox_relay WHERE quarantined IS NOT NULL`, beat)
	testkit.Equal(t, "the copy has changed", relaytest.Row[string](copied, written), before)
	if rc.Total() != 0 || slack.Total() != 1 {
		t.Errorf("%d requests and %d messages from a copy", rc.Total(), slack.Total())
	}
	if failures := sees(r.observer, func(o *observer) int { return len(o.failures) }); failures != 0 {
		t.Errorf("statements failed: %v", r.failures)
	}

	_, err := ops.New(copied.Pool).AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	relaytest.Becomes(copied, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	if rc.Total() < events {
		t.Errorf("%d requests for %d events", rc.Total(), events)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(reasons) != 2 || !strings.Contains(reasons[0], "database oid") || reasons[1] != "" {
		t.Errorf("the hook was told %q", reasons)
	}
}
