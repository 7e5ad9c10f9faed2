package relay

import (
	"net/http"
	"net/http/httputil"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

const canaryQuery = "zqxwQuery0123456789jvkp"

// What post masks in an answer stands in no other place either: not in the database, nor the log, nor an alert.
func TestEchoedSecretsAreKeptNowhere(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	rc.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		dump, _ := httputil.DumpRequest(r, true)
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = w.Write(dump)
	})
	slack, hook := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	var log relaytest.Buffer
	d := to(rc.URL + "/?key=" + canaryQuery)
	d.Headers = map[string]string{"X-Custom": "zqxwCustomjvkp"}
	d.Wire = post.Wire{Excerpts: post.ExcerptsText, Authorization: func() string { return "Bearer zqxwTokenjvkp" }}
	cfg := config(db, d)
	cfg.Log = zerolog.New(&log)
	cfg.Alerts.Channels = []alert.Channel{alert.Slack(slack.URL, direct), alert.Webhook(hook.URL, direct)}
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, headers) VALUES ('t', '{}', 'k', '{"X-Event-A": "zqxwEventjvkp"}')`)
	r := start(t, cfg)
	r.settles(t, policy.Fail, 1)
	r.await(t, "both alerts", func(o *observer) bool { return len(o.notices) >= 2 })
	kept := map[string]string{
		"log": log.String(), "slack": string(slack.All()[0].Body), "webhook": string(hook.All()[0].Body),
		"delivery": relaytest.Row[string](db, `SELECT last_error FROM outbox_delivery`), "attempt": relaytest.Row[string](db, `SELECT error FROM outbox_attempt`),
		"alert": relaytest.Row[string](db, `SELECT concat_ws(' ', first_error, detail) FROM outbox_alert`),
	}
	for where, text := range kept {
		if strings.Contains(text, "zqxw") || strings.Contains(text, "jvkp") || !strings.Contains(text, "[masked]") {
			t.Errorf("%s: %s", where, text)
		}
	}
}
