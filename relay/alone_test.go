package relay

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// guarded is a receiver that accepts one token at one path, and no signature by another secret.
func guarded(t testing.TB) (rc *relaytest.Receiver, url string) {
	rc = relaytest.NewReceiver(t, nil)
	signing := secret(t, testSecret)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil && r.Header.Get(webhook.Signature) != "" {
			_, err = webhook.Verify(r.Header, body, time.Now(), time.Minute, signing)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		switch {
		case r.URL.Path != "/events":
			w.WriteHeader(http.StatusNotFound)
		case err != nil || r.Header.Get("Authorization") != "Bearer right":
			w.WriteHeader(http.StatusUnauthorized)
		default:
			rc.Config.Handler.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(front.Close)
	return rc, front.URL
}

const refusedRelays = `SELECT coalesce(string_agg(r.name || ': ' || d.refused_error, ', ' ORDER BY r.name), '')
	FROM outbox_relay_destination d JOIN outbox_relay r ON r.id = d.relay_id WHERE d.refused_at IS NOT NULL`

// Of two relays, one is refused: it leaves the destination to the other one, spends the attempts
// that it needs to be sure, and is accepted as soon as its configuration is corrected. An alert
// names it.
func TestOneRelayIsRefused(t *testing.T) {
	t.Parallel()
	for name, wrong := range map[string]struct {
		change func(d *post.Destination)
		spends int // attempts
		says   string
	}{
		"wrong secret": {func(d *post.Destination) { d.Headers = map[string]string{"Authorization": "Bearer wrong"} }, policy.DefaultBreakerFailures, "401"},
		"wrong signature": {func(d *post.Destination) {
			d.SigningSecrets = []webhook.Secret{secret(t, "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")}
		}, policy.DefaultBreakerFailures, "401"},
		"wrong path":          {func(d *post.Destination) { d.URL = strings.TrimSuffix(d.URL, "/events") }, policy.DefaultBreakerFailures, "404"},
		"nothing listens":     {func(d *post.Destination) { d.URL = testkit.NewVacant(t).URL }, 0, "connection refused"},
		"no such name":        {func(d *post.Destination) { d.URL = "http://does-not-exist.invalid/" }, 0, "does-not-exist.invalid"},
		"another certificate": {func(d *post.Destination) { d.URL = unreachable(t)[policy.ReasonTLS] }, 0, "certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.New(t)
			rc, url := guarded(t)
			d := to(url + "/events")
			d.Headers = map[string]string{"Authorization": "Bearer right"}
			d.SigningSecrets = []webhook.Secret{secret(t, testSecret)}
			d.Retry.Schedule = []time.Duration{time.Second} // by then, this relay knows
			alerts := relaytest.NewReceiver(t, nil)
			a := config(db, d)
			a.Name, a.Alerts.AfterByRule[alert.RuleRelayRefused] = "a", 0
			a.Alerts.Channels = []alert.Channel{alert.Slack(alerts.URL, direct)}
			wrong.change(&d)
			b := a
			b.Name, b.Destinations = "b", []post.Destination{d}
			refused := start(t, b)
			refused.relayID()
			start(t, a).relayID()

			const delivered = `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`
			events := 0
			insert := func(n int) {
				db.Insert(n, fmt.Sprintf("part-%d", events))
				events += n
				relaytest.Becomes(db, events, delivered)
			}
			// Twenty at once: a lone event may be at fault itself. The other relay may take some
			// twenties whole.
			for known := false; !known; known = relaytest.Row[bool](db, `SELECT count(*) = 1 FROM (`+refusedRelays+`) r (who) WHERE who LIKE $1`, "b: %"+wrong.says+"%") {
				insert(20)
			}
			relaytest.Eventually(t, "the alert", func() bool {
				return slices.ContainsFunc(alerts.All(), func(r relaytest.Request) bool {
					_, reason, found := strings.Cut(string(r.Body), "to the others: `only relay b`: `")
					return found && strings.Contains(reason, wrong.says)
				})
			})
			for range 10 {
				insert(1)
			}
			insert(200)
			for range 10 {
				insert(1)
			}
			if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt WHERE outcome <> 'hold'`); n > wrong.spends {
				t.Errorf("%d attempts are spent, want %d at most", n, wrong.spends)
			}
			testkit.Equal(t, "all relays hold the destination", relaytest.Row[int](db, `SELECT count(*) FROM outbox_destination WHERE breaker <> 'closed'`), 0)
			testkit.Equal(t, "the breaker was alerted", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert WHERE rule = $1`, alert.RuleBreakerOpen), 0)
			if rc.Total() != events {
				t.Errorf("%d requests for %d events", rc.Total(), events)
			}

			b.Destinations = a.Destinations
			_, err := refused.Reload(b)
			relaytest.Must(t, err)
			relaytest.Becomes(db, "", refusedRelays) // without another event: what was refused was another configuration
			before := sees(refused.observer, func(o *observer) int { return o.outcomes[policy.Delivered] })
			for sees(refused.observer, func(o *observer) int { return o.outcomes[policy.Delivered] }) == before {
				insert(10)
			}
		})
	}
}

// A destination that refuses each of two relays is down: both hold it, and neither is named alone.
// The one that recovers closes the breaker, and the other one, which knows that it is refused,
// spends no attempt to learn it again.
func TestAllRelaysAreRefused(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	_, url := guarded(t)
	d := to(url + "/events")
	d.Headers = map[string]string{"Authorization": "Bearer old"}
	d.Breaker = policy.BreakerPolicy{ProbeAfter: 50 * time.Millisecond, ProbeMax: 50 * time.Millisecond}
	cfg := config(db, d)
	cfg.Name = "a"
	a := start(t, cfg)
	other := cfg
	other.Name = "b"
	b := start(t, other)
	a.relayID()
	b.relayID()
	db.Insert(100, "key")
	relaytest.Becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'default'), '')`)
	relaytest.Becomes(db, "", refusedRelays)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = $1 AND resolved_at IS NULL`, alert.RuleBreakerOpen)
	// One relay may have opened the breaker before the other was refused. Both probe, and learn
	// that they are.
	relaytest.Becomes(db, 2, `SELECT count(*) FROM (SELECT relay_id FROM outbox_attempt GROUP BY relay_id HAVING count(*) >= $1 AND count(DISTINCT event_id) >= $2) learnt`,
		policy.DefaultBreakerFailures, policy.BreakerEvents)
	spent := relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt WHERE outcome <> 'hold'`)
	if spent > 2*policy.DefaultBreakerFailures {
		t.Errorf("%d attempts are spent, want %d at most", spent, 2*policy.DefaultBreakerFailures)
	}
	d.Headers = map[string]string{"Authorization": "Bearer right"}
	cfg.Destinations = []post.Destination{d}
	_, err := a.Reload(cfg)
	relaytest.Must(t, err)
	relaytest.Becomes(db, 100, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_alert WHERE rule = $1 AND resolved_at IS NULL`, alert.RuleBreakerOpen)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt WHERE outcome <> 'hold'`); n != spent {
		t.Errorf("%d attempts are spent after the recovery", n-spent)
	}
}

// When the relay that was accepted has gone, the one that is refused holds the destination for all,
// and it is alerted.
func TestRefusedRelayIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	_, url := guarded(t)
	d := to(url + "/events")
	d.Headers = map[string]string{"Authorization": "Bearer right"}
	cfg := config(db, d)
	cfg.Name = "a"
	a := start(t, cfg)
	d.URL = testkit.NewVacant(t).URL
	other := config(db, d)
	other.Name = "b"
	b := start(t, other)
	a.relayID()
	b.relayID()
	for i := 0; relaytest.Row[string](db, refusedRelays) == ""; i++ {
		db.Insert(1, fmt.Sprintf("key-%d", i))
		relaytest.Becomes(db, i+1, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	}
	a.stop()
	db.Insert(1, "last")
	relaytest.Becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'default'), '')`)
	relaytest.Becomes(db, "", refusedRelays)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_alert WHERE rule = $1 AND resolved_at IS NULL`, alert.RuleBreakerOpen)
}
