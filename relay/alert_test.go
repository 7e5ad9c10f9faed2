package relay

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// direct is the transport of alerts where nothing is configured.
var direct = alert.NewTransport(post.Egress{})

// failing returns a relay's configuration whose destination refuses everything, told to the given
// channels.
func failing(t testing.TB, db *relaytest.Database, channels ...alert.Channel) Config {
	t.Helper()
	refusing := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = w.Write([]byte("<no> & " + r.Key))
	})
	cfg := config(db, to(refusing.URL))
	cfg.Destinations[0].Wire.Excerpts = post.ExcerptsText
	cfg.Alerts.Channels = channels
	return cfg
}

// Deliveries that fail for good are alerted with the first of them and their number, and a channel
// that hangs meanwhile delays no delivery.
func TestFailuresAreAlerted(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g := relaytest.NewGate(t)
	slack := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { g.Pass(r) })
	db.Insert(1, "first")
	r := start(t, failing(t, db, alert.Slack(slack.URL, direct)))
	if message := <-g.Arrived; !strings.Contains(string(message.Body), "event 1: `422 Unprocessable Entity: \\u0026lt;no\\u0026gt; \\u0026amp; first-1`") {
		t.Errorf("the alert is %s", message.Body)
	}
	db.Insert(50, "more")
	r.settles(t, policy.Fail, 51)
	relaytest.Becomes(db, 51, `SELECT count FROM outbox_alert WHERE subject = 'default'`)
	g.Open()
	r.await(t, "the end of the message", func(o *observer) bool { return len(o.notices) == 1 })
	// 51 were told if the message had to wait so long that it was given up, and sent again.
	relaytest.Becomes(db, true, `SELECT notified_count IN (1, 51) FROM outbox_alert`)
	db.Exec(`UPDATE outbox_alert SET notified_count = count`)
	db.Insert(1, "later") // which channels are told of, too: it counts, and the first remains the first
	relaytest.Becomes(db, true, `SELECT count = 52 AND first_event_id = 1 FROM outbox_alert`)
	db.Exec(`UPDATE outbox_alert SET resolved_at = now()`)
	db.Insert(1, "again")
	relaytest.Becomes(db, true, `SELECT count - counted_before = 1 AND first_event_id = (SELECT max(id) FROM outbox) FROM outbox_alert`)
}

// A relay that is started while its database is away tells so, and that it has come.
func TestDatabaseAwayAtTheStartIsAlerted(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	l := newLink(t, db.DSN)
	l.block(true)
	slack := relaytest.NewReceiver(t, nil)
	cfg := failing(t, db, alert.Slack(slack.URL, direct))
	cfg.Pool = settings(t, l.dsn)
	cfg.Alerts.AfterByRule = map[string]time.Duration{alert.RuleDatabase: 0}
	r := start(t, cfg)
	r.await(t, "the alert", func(o *observer) bool { return len(o.notices) == 1 })
	l.block(false)
	r.await(t, "the recovery", func(o *observer) bool { return len(o.notices) == 2 })
	for i, what := range []string{"has trouble with its database", "works with its database again"} {
		testkit.Contains(t, "the message", string(slack.All()[i].Body), what)
	}
}
