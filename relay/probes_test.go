package relay

import (
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// The history counts as probes what was sent after the breaker had opened, as the row of the breaker does. The attempts that opened it
// are retried.
func TestHistoryCountsProbesAfterTheOpening(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	db.Insert(40, "key")
	cfg := config(db, to(rc.URL))
	cfg.History = history.New()
	r := prepared(t, cfg)
	r.begin()
	relaytest.Becomes(db, true, `SELECT EXISTS (SELECT FROM outbox_destination WHERE breaker = 'open')
		AND EXISTS (SELECT FROM outbox_attempt WHERE outcome = '`+string(policy.Hold)+`')`)
	var probes, attempts int64
	for _, c := range cfg.History.Unwritten() {
		probes, attempts = probes+c.Probes, attempts+c.Attempts()
	}
	if most := relaytest.Row[int64](db, `SELECT max(breaker_probes)::bigint FROM outbox_destination`); probes > most || attempts == 0 {
		t.Errorf("%d probes of %d attempts, and the breaker counts %d", probes, attempts, most)
	}
}
