package rulestest

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
)

// series load 41 samples, one every 30 seconds. In every pair the first fires the rule at the end,
// the second does not.
var cases = map[string][2]string{
	"OutboxRelayMissing": { // another job's relay does not hide it
		"outbox_relay_registered{job=\"a\"} 1x10\noutbox_relay_registered{job=\"b\"} 1x40", `outbox_relay_registered{instance="a"} 0x40`,
	},
	"OutboxRelayNotRegistered": {"outbox_relay_registered{instance=\"a\"} 0x40\noutbox_relay_quarantined{instance=\"a\"} 0x40", "outbox_relay_registered{instance=\"a\"} 0x40\noutbox_relay_quarantined{instance=\"a\"} 1x40"},
	"OutboxRelayQuarantined":   {`outbox_relay_quarantined{instance="a"} 1x40`, `outbox_relay_quarantined{instance="a"} 0x40`},
	"OutboxSampleMissing": {
		"outbox_relay_registered{instance=\"a\",job=\"j\"} 1x40\noutbox_sample_timestamp_seconds{instance=\"b\",job=\"j\"} 1x40",
		"outbox_relay_registered{instance=\"a\",job=\"j\"} 1x40\noutbox_sample_timestamp_seconds{instance=\"a\",job=\"j\"} 1x40",
	},
	"OutboxDeliveriesFailed": {
		`outbox_settled_deliveries_total{destination="shop",outcome="fail",reason="rejected"} 0x30 1x9`,
		`outbox_settled_deliveries_total{destination="shop",outcome="retry",reason="timeout"} 0+1x40`,
	},
	"OutboxLag": {
		"outbox_lag_seconds{destination=\"shop\",job=\"a\"} 601x40\noutbox_held_deliveries{destination=\"shop\",job=\"a\"} 0x40\n" +
			"outbox_held_deliveries{destination=\"shop\",job=\"b\"} 5x40",
		"outbox_lag_seconds{destination=\"shop\"} 601x40\noutbox_held_deliveries{destination=\"shop\"} 5x40\noutbox_lag_seconds{destination=\"mail\"} 600x40",
	},
	"OutboxBreakerOpen": { // and not where one relay is refused alone
		"outbox_breaker_state{destination=\"shop\",instance=\"a\"} 2x40\noutbox_breaker_state{destination=\"shop\",instance=\"b\"} 2x40",
		"outbox_breaker_state{destination=\"shop\",instance=\"a\"} 2x40\noutbox_breaker_state{destination=\"shop\",instance=\"b\"} 0x40",
	},
	"OutboxParked":            {`outbox_parked_deliveries 1x40`, `outbox_parked_deliveries 0x40`},
	"OutboxUnserved":          {`outbox_unserved_destinations 1x40`, `outbox_unserved_destinations 0x40`},
	"OutboxBlockedKeys":       {`outbox_blocked_keys{destination="shop"} 1x40`, `outbox_blocked_keys{destination="shop"} 0x40`},
	"OutboxUndeliveredEvents": {`outbox_undelivered_events 1x40`, `outbox_undelivered_events 0x40`},
	"OutboxRescueStorm": {
		"outbox_rescues_total{instance=\"a\"} 0x20 1x4 2x14\noutbox_rescues_total{instance=\"b\"} 0x20 2x19", "outbox_rescues_total{instance=\"a\"} 0x20 1x19",
	},
	"OutboxAlertsNotSent": {`outbox_alert_notifications_total{result="failure"} 0+1x40`, `outbox_alert_notifications_total{result="success"} 0+1x40`},
}

func TestRules(t *testing.T) {
	t.Parallel()
	groups, errs := rulefmt.ParseFile("../prometheus-rules.yaml", false)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	known := map[string]bool{}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			known[rule.Alert] = true
			series, ok := cases[rule.Alert]
			if !ok {
				t.Errorf("%s has no test", rule.Alert)
				continue
			}
			for i, want := range []bool{true, false} {
				if fires := evaluate(t, rule.Expr, series[i]); fires != want {
					t.Errorf("%s with\n%s\nfires: %v", rule.Alert, series[i], fires)
				}
			}
		}
	}
	for name := range cases {
		if !known[name] {
			t.Errorf("there is no rule %s", name)
		}
	}
}

// evaluate reports whether an expression has a result after the series.
func evaluate(t *testing.T, expr, series string) bool {
	t.Helper()
	storage := promqltest.LoadedStorage(t, "load 30s\n\t"+strings.ReplaceAll(series, "\n", "\n\t")+"\n")
	defer storage.Close()
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	query, err := engine.NewInstantQuery(t.Context(), storage, nil, expr, time.Unix(0, 0).Add(20*time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	defer query.Close()
	vector, err := query.Exec(t.Context()).Vector()
	if err != nil {
		t.Fatalf("%s: %v", expr, err)
	}
	return len(vector) > 0
}

// Grafana fills in its variables before it asks.
func TestExpressionsOfTheDashboard(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../grafana-dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			expr := strings.NewReplacer("$__rate_interval", "5m", "$destination", ".*").Replace(target.Expr)
			if _, err := parser.ParseExpr(expr); err != nil {
				t.Errorf("%s: %s: %v", panel.Title, expr, err)
			}
			checked++
		}
	}
	if checked < 25 {
		t.Errorf("%d expressions", checked)
	}
}
