package metrics

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"
)

func TestHealthOfARelay(t *testing.T) {
	t.Parallel()
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer receiver.Close()
	db := relaytest.Covered(t)
	m := start(t, config(t, db, to("default", receiver.URL)))
	m.healthBecomes("/readyz", http.StatusOK, "")
	m.healthBecomes("/healthz", http.StatusOK, "")

	stop(m.metrics)
	m.healthBecomes("/readyz", http.StatusServiceUnavailable, "the relay is stopping")
	m.healthBecomes("/healthz", http.StatusOK, "")
}

// A relay that runs on a copy of its database is alive, and not ready.
func TestHealthOfAQuarantinedRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := config(t, db, to("default", "http://receiver.test/CANARY"))
	cfg.Environment = "production"
	first := start(t, cfg)
	first.healthBecomes("/readyz", http.StatusOK, "")
	first.stop()
	cfg.Environment = "staging"
	m := start(t, cfg)
	m.healthBecomes("/readyz", http.StatusServiceUnavailable, "quarantined: this is not the database that relays were accepted on; run outbox-relay identity show")
	m.healthBecomes("/healthz", http.StatusOK, "")
	m.becomes(1, "outbox_relay_quarantined")
	m.becomes(0, "outbox_relay_registered")
}

func TestReasonsOfHealth(t *testing.T) {
	t.Parallel()
	now := time.Now()
	const interval = 5 * time.Second
	turned := now.Add(-time.Second)
	for name, test := range map[string]struct {
		state       relay.State
		before      func(*Metrics)
		live, ready string
	}{
		"starting":             {state: relay.State{}, ready: "the relay is starting: it is not registered in its database yet"},
		"working":              {state: relay.State{Turned: turned, Beat: turned, Registered: true}},
		"the claimer stands":   {state: relay.State{Turned: now.Add(-interval - turnMargin - time.Second), Beat: turned, Registered: true}, live: "the claimer has not begun a turn for 1m36s; restart the relay and report this as a defect", ready: "the claimer has not begun a turn for 1m36s; restart the relay and report this as a defect"},
		"the claimer waits":    {state: relay.State{Turned: now.Add(-interval - turnMargin), Beat: turned, Registered: true}},
		"a heartbeat hangs":    {state: relay.State{Turned: turned, Beat: now.Add(-11 * time.Second), Registered: true}, ready: "the database has taken no heartbeat for 11s"},
		"the database is away": {state: relay.State{Turned: turned, Beat: now.Add(-time.Minute)}, ready: "the relay is not registered in its database; it tries again by itself, and its log says why"},
		"claims fail": {
			state: relay.State{Turned: turned, Beat: turned, Registered: true, StuckSince: now.Add(-20 * time.Second)}, ready: "every claim has failed for 20s; the log says why",
		},
		"a claim failed": {state: relay.State{Turned: turned, Beat: turned, Registered: true, StuckSince: turned}},
		"a hint": {
			state: relay.State{Turned: turned}, before: func(m *Metrics) { m.health.failed(now, &pgconn.PgError{Code: "28P01", Message: "CANARY"}) },
			ready: "the relay cannot use its database, and tries again by itself: the server refuses this login: check user and password in database.url",
		},
		"an error without a hint": {
			state: relay.State{Turned: turned}, before: func(m *Metrics) { m.health.failed(now, errors.New("CANARY")) },
			ready: "the relay is not registered in its database; it tries again by itself, and its log says why",
		},
		"quarantined": {state: relay.State{Turned: turned}, before: func(m *Metrics) { m.Hooks().Quarantined("CANARY") }, ready: "quarantined: this is not the database that relays were accepted on; run outbox-relay identity show"},
		"stopping":    {state: relay.State{Turned: now.Add(-time.Hour)}, before: stop, ready: "the relay is stopping"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := New(Config{PollInterval: interval})
			if test.before != nil {
				test.before(m)
			}
			testkit.Equal(t, "live", strings.Join(m.live(now, test.state), "; "), test.live)
			testkit.Equal(t, "ready", strings.Join(m.ready(now, test.state), "; "), test.ready)
		})
	}
}

func TestOnlyGetIsServed(t *testing.T) {
	t.Parallel()
	m := serve(t, New(Config{}))
	response, err := m.client.Post(m.url+"/metrics", "text/plain", nil)
	relaytest.Must(t, err)
	_ = response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Error(response.Status)
	}
	if code, _ := m.get("/other"); code != http.StatusNotFound {
		t.Error(code)
	}
}

func stop(m *Metrics) { m.StopsWhen(func() bool { return true }) }
