package metrics

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"
)

var update = flag.Bool("update", false, "write the golden list of metrics again")

// idle follows a relay that does nothing, with one destination and a sample.
func idle(m *Metrics) {
	m.Follow(func() relay.State {
		return relay.State{Registered: true, Lanes: []relay.LaneView{{LaneState: relay.LaneState{Destination: "shop", Breaker: "closed"}}}}
	}, nil)
	m.sampler.keep(sample{watch.Backlog{Lanes: []watch.LaneBacklog{{Destination: "shop"}}}, time.Now(), time.Millisecond})
}

// Dashboards, rules and runbooks of others stand on names and labels: a change of this list is a
// change of the interface.
func TestNamesAndLabelsAreStable(t *testing.T) {
	t.Parallel()
	m := serve(t, New(Config{Version: "v1", Destinations: []string{"shop"}}))
	idle(m.metrics)
	families := m.scrape()
	var list strings.Builder
	for _, name := range slices.Sorted(maps.Keys(families)) {
		if !strings.HasPrefix(name, "outbox_") {
			continue
		}
		f := families[name]
		labels := map[string]bool{}
		for _, series := range f.GetMetric() {
			for _, pair := range series.GetLabel() {
				labels[pair.GetName()] = true
				if !slices.Contains([]string{"destination", "outcome", "result", "reason", "cause", "class"}, pair.GetName()) && name != "outbox_build_info" {
					t.Errorf("%s has the label %s", name, pair.GetName())
				}
			}
		}
		fmt.Fprintf(&list, "%s|%s|%s|%s\n", name, strings.ToLower(f.GetType().String()), strings.Join(slices.Sorted(maps.Keys(labels)), ","), f.GetHelp())
	}
	const golden = "testdata/metrics.txt"
	if *update {
		relaytest.Must(t, os.WriteFile(golden, []byte(list.String()), 0o600))
	}
	want, err := os.ReadFile(golden)
	relaytest.Must(t, err)
	if list.String() != string(want) {
		t.Errorf("metrics differ from %s (write it again with -update):\n%s", golden, &list)
	}
}

// Prometheus does not see a counter grow that begins at 1.
func TestEverySeriesBeginsAtZero(t *testing.T) {
	t.Parallel()
	m := serve(t, New(Config{Destinations: []string{"shop", "mail"}}))
	families := m.scrape()
	for _, name := range []string{"outbox_claimed_deliveries_total", "outbox_settled_deliveries_total", "outbox_attempt_duration_seconds", "outbox_delivery_latency_seconds", "outbox_delivery_due_latency_seconds"} {
		for _, destination := range []string{"shop", "mail"} {
			if got, have := value(families, name, "destination="+destination); got != 0 || !have {
				t.Errorf("%s of %s is %v, there: %v", name, destination, got, have)
			}
		}
	}
	for _, reason := range policy.Reasons() {
		for _, outcome := range policy.Outcomes() {
			_, have := value(families, "outbox_settled_deliveries_total", "destination=shop", "outcome="+string(outcome), "reason="+string(reason))
			if want := (outcome == policy.Delivered) == (reason == policy.ReasonOK); have != want {
				t.Errorf("%s for %s is there: %v", outcome, reason, have)
			}
		}
	}
	for name, f := range families {
		for _, series := range f.GetMetric() {
			if f.GetType() == dto.MetricType_COUNTER && strings.HasPrefix(name, "outbox_") && series.GetCounter().GetValue() != 0 {
				t.Errorf("%s begins at %v", name, series)
			}
		}
	}
	if _, have := value(families, "outbox_backlog_deliveries"); have {
		t.Error("a backlog is shown before there was a sample")
	}
}

// deadURL leads to a port where nothing listens, and which is kept from others.
func deadURL(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	relaytest.Must(t, err)
	address := l.Addr().String()
	relaytest.Must(t, l.Close())
	return "http://" + address
}

func insert(db *relaytest.Database, kind, key string) {
	db.Helper()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ($1, '{"n": "CANARY-payload"}', $2)`, kind, key)
}

func TestValuesOfAStagedRun(t *testing.T) {
	t.Parallel()
	var slow atomic.Bool
	release := make(chan struct{})
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch key := r.Header.Get("X-Idempotency-Key"); {
		case strings.HasPrefix(key, "bad"):
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = io.WriteString(w, "CANARY-answer")
		case strings.HasPrefix(key, "again") && r.Header.Get("X-Outbox-Attempt") == "1":
			w.WriteHeader(http.StatusConflict)
		case strings.HasPrefix(key, "slow"):
			slow.Store(true)
			<-release
		}
	}))
	defer receiver.Close()
	db := relaytest.Covered(t, "shop")
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route VALUES ('shop.*', 'shop'), ('down.*', 'down'), ('left.*', 'left')`)
	db.Exec(`INSERT INTO outbox_relay (name, version, session_pid) VALUES ('dead', '', 1)`)
	shop := to("shop", receiver.URL+"/CANARY-path?token=CANARY-query")
	shop.Headers = map[string]string{"Authorization": "Bearer CANARY-header"}
	cfg := config(t, db, shop, to("down", deadURL(t)), to("quiet", receiver.URL))
	for _, name := range []string{"shop", "down", "quiet"} {
		cfg.Routes = append(cfg.Routes, relay.Route{Event: name + ".*", To: []string{name}})
	}
	insert(db, "left.paid", "unserved-1") // before the route goes with the dead relay
	m := start(t, cfg)

	for i := range 3 {
		insert(db, "shop.paid", fmt.Sprint("ok-", i))
	}
	insert(db, "shop.paid", "again-1")
	insert(db, "shop.paid", "bad-1")
	insert(db, "down.paid", "held-1")
	insert(db, "unrouted", "parked-1")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('shop.paid', '{}', 'bad-2', 'CANARY-key'), ('shop.paid', '{}', 'behind-2', 'CANARY-key')`)

	m.becomes(4, "outbox_settled_deliveries_total", "destination=shop", "outcome=delivered")
	m.becomes(1, "outbox_settled_deliveries_total", "destination=shop", "outcome=retry", "reason=transient")
	m.becomes(2, "outbox_settled_deliveries_total", "destination=shop", "outcome=fail", "reason=rejected")
	m.becomes(4, "outbox_attempt_duration_seconds", "destination=shop", "outcome=delivered")
	m.becomes(4, "outbox_delivery_latency_seconds", "destination=shop", "class=live")
	m.becomes(4, "outbox_delivery_due_latency_seconds", "destination=shop", "class=live")
	m.becomes(1, "outbox_rescues_total")
	m.becomes(2, "outbox_breaker_state", "destination=down")
	m.becomes(1, "outbox_held_deliveries", "destination=down")
	m.becomes(0, "outbox_held_deliveries", "destination=shop")
	m.becomes(1, "outbox_backlog_deliveries", "destination=down")
	m.becomes(1, "outbox_backlog_deliveries", "destination=shop")
	m.becomes(2, "outbox_failed_deliveries", "destination=shop")
	m.becomes(1, "outbox_blocked_keys", "destination=shop")
	m.becomes(1, "outbox_parked_deliveries")
	m.becomes(1, "outbox_unserved_destinations")
	m.becomes(0, "outbox_untaken_events")
	m.becomes(1, "outbox_relay_registered")
	m.becomes(0, "outbox_in_flight_deliveries", "destination=shop")
	insert(db, "shop.paid", "slow-1")
	m.becomes(1, "outbox_in_flight_deliveries", "destination=shop")
	close(release)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('quiet', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	m.becomes(1, "outbox_destination_paused", "destination=quiet")

	families := m.scrape()
	if held, _ := value(families, "outbox_settled_deliveries_total", "destination=down", "outcome=hold", "reason=connect"); held == 0 {
		t.Error("no hold was counted")
	}
	for _, name := range []string{
		"outbox_claim_duration_seconds", "outbox_claim_size_deliveries", "outbox_settle_duration_seconds", "outbox_settle_size_deliveries", "outbox_wakeups_total",
	} {
		if n, _ := value(families, name); n == 0 {
			t.Errorf("%s was not observed", name)
		}
	}
	if left, have := value(families, "outbox_backlog_deliveries", "destination=left"); have {
		t.Errorf("a destination that is not configured has a series: %v", left)
	}
	for _, path := range []string{"/metrics", "/healthz", "/readyz", "/", "/CANARY-request"} {
		if _, text := m.get(path); strings.Contains(strings.ReplaceAll(text, "/CANARY-request", ""), "CANARY") {
			t.Errorf("%s shows a canary:\n%s", path, text)
		}
	}
}

// Latencies are those of the database's clock, however its time differs from that of this process.
func TestLatencyCountsFromFirstDueAndFromDue(t *testing.T) {
	t.Parallel()
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer receiver.Close()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at, available_at)
		VALUES ('t', '{}', 'old', now() - interval '3 hours', now() - interval '2 hours')`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '20 minutes', replay = true`)
	m := start(t, config(t, db, to("default", receiver.URL)))
	m.becomes(1, "outbox_delivery_latency_seconds", "destination=default", "class=replay")
	families := m.scrape()
	for name, want := range map[string]float64{"outbox_delivery_latency_seconds": 7200, "outbox_delivery_due_latency_seconds": 1200} {
		for _, series := range families[name].GetMetric() {
			if h := series.GetHistogram(); h.GetSampleCount() == 1 && (h.GetSampleSum() < want || h.GetSampleSum() > want+relaytest.Patience.Seconds()) {
				t.Errorf("%s is %v, want %v", name, h.GetSampleSum(), want)
			}
		}
	}
}

// A count stops at the limit, which the relay shows beside it.
func TestCountsStopAtTheLimit(t *testing.T) {
	t.Parallel()
	testkit.Equal(t, "sample of one destination", sampleLimit(1), sampleMost)
	testkit.Equal(t, "sample of 40 destinations", sampleLimit(40), 2000)
	testkit.Equal(t, "sample of many destinations", sampleLimit(100_000), sampleLeast)
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	db.Insert(7, "key")
	m := start(t, config(t, db, to("default", deadURL(t))))
	m.becomes(7, "outbox_backlog_deliveries")
	b, err := m.relay.CountBacklog(t.Context(), 5)
	if err != nil || b.Limit != 5 || b.Lanes[0].Pending != 5 {
		t.Errorf("%+v, %v", b, err)
	}
}

// Without scrapes the relay samples once, so that an idle one asks nothing.
func TestSamplesFollowScrapes(t *testing.T) {
	t.Parallel()
	taken := make(chan struct{})
	m := New(Config{SampleInterval: time.Millisecond})
	m.Follow(func() relay.State { return relay.State{Registered: true} }, func(ctx context.Context, _ int) (watch.Backlog, error) {
		select {
		case taken <- struct{}{}:
		case <-ctx.Done():
		}
		return watch.Backlog{}, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); m.Sample(ctx) }()
	<-taken // the first one
	relaytest.Eventually(t, "a sample", func() bool { _, have := m.sampler.recent(time.Now()); return have })
	select {
	case <-taken:
		t.Error("it samples although nothing scrapes")
	default:
	}
	m.sampler.scraped(t.Context())
	<-taken
	<-taken
	cancel()
	<-ended
	if _, recent := m.sampler.recent(time.Now().Add(staleSample)); recent {
		t.Error("an old sample is shown")
	}
}

// The first scrape after a rest shows what is true then, and not the sample of the relay's start.
func TestFirstScrapeIsFresh(t *testing.T) {
	t.Parallel()
	var pending atomic.Int64
	m := serve(t, New(Config{SampleInterval: time.Millisecond, Destinations: []string{"shop"}}))
	m.metrics.Follow(func() relay.State { return relay.State{Registered: true} }, func(context.Context, int) (watch.Backlog, error) {
		return watch.Backlog{Lanes: []watch.LaneBacklog{{Destination: "shop", Pending: int(pending.Load())}}}, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); m.metrics.Sample(ctx) }()
	relaytest.Eventually(t, "a rest", func() bool {
		m.metrics.sampler.mu.Lock()
		defer m.metrics.sampler.mu.Unlock()
		return m.metrics.sampler.rests != nil
	})
	pending.Store(7)
	testkit.Equal(t, "the first scrape", m.scrape()["outbox_backlog_deliveries"].GetMetric()[0].GetGauge().GetValue(), 7)
	cancel()
	<-ended
}

// What hooks do runs beside each delivery.
func TestHooksDoNotAllocate(t *testing.T) {
	m := New(Config{Destinations: []string{"shop"}})
	h := m.Hooks()
	n := testing.AllocsPerRun(100, func() {
		h.Claimed("shop", 3)
		h.ClaimRan(3, time.Millisecond)
		h.Woken(relay.WakeNotify)
		h.Attempted(relay.Attempt{Destination: "shop", Outcome: policy.Delivered, Reason: policy.ReasonOK, Class: "live", Duration: time.Second, SinceFirstDue: time.Second})
		h.Settled("shop", policy.Delivered, policy.ReasonOK, 3)
		h.SettleRan(3, time.Millisecond)
	})
	testkit.Equal(t, "allocations", n, 0)
}
