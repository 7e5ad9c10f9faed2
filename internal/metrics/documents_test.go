package metrics

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

const docs = "../../docs/"

func readText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	relaytest.Must(t, err)
	return string(text)
}

// golden returns type, labels and help of every metric.
func golden(t *testing.T) map[string][3]string {
	t.Helper()
	all := map[string][3]string{}
	for line := range strings.Lines(readText(t, "testdata/metrics.txt")) {
		part := strings.Split(strings.TrimSuffix(line, "\n"), "|")
		all[part[0]] = [3]string{part[1], part[2], part[3]}
	}
	return all
}

// The reference has a line for each metric, in the words of the endpoint.
func TestEveryMetricIsDocumented(t *testing.T) {
	t.Parallel()
	text := readText(t, docs+"reference.md")
	for name, m := range golden(t) {
		labels := ""
		if m[1] != "" {
			labels = "`" + strings.ReplaceAll(m[1], ",", "`, `") + "`"
		}
		if row := fmt.Sprintf("| `%s` | %s | %s | %s |", name, m[0], labels, m[2]); !strings.Contains(text, row) {
			t.Errorf("docs/reference.md lacks: %s", row)
		}
	}
}

var metricName = regexp.MustCompile(`\boutbox_\w+`)

// unknownMetrics returns the names in an expression that the endpoint does not have.
func unknownMetrics(known map[string][3]string, expr string) (unknown []string) {
	for _, name := range metricName.FindAllString(expr, -1) {
		if _, plain := known[name]; plain && known[name][0] != "histogram" {
			continue
		}
		of := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if of == name || known[of][0] != "histogram" {
			unknown = append(unknown, name)
		}
	}
	return unknown
}

// Each rule asks for metrics that exist, and leads to a heading of the runbook.
func TestRulesLeadToTheRunbook(t *testing.T) {
	t.Parallel()
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	decoder := yaml.NewDecoder(strings.NewReader(readText(t, docs+"deploy/prometheus-rules.yaml")))
	decoder.KnownFields(true)
	relaytest.Must(t, decoder.Decode(&file))
	known, runbook, rules := golden(t), readText(t, docs+"operations.md"), 0
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			rules++
			if unknown := unknownMetrics(known, rule.Expr); len(unknown) > 0 || !metricName.MatchString(rule.Expr) {
				t.Errorf("%s: unknown metrics %q in %s", rule.Alert, unknown, rule.Expr)
			}
			anchor, found := strings.CutPrefix(rule.Annotations["runbook"], "docs/operations.md#alert-")
			if !found || !strings.Contains(runbook, "\n## Alert: "+anchor+"\n") {
				t.Errorf("%s: docs/operations.md has no heading for %q", rule.Alert, rule.Annotations["runbook"])
			}
			if rule.Annotations["summary"] == "" || rule.Labels["severity"] == "" {
				t.Errorf("%s: lacks a summary or a severity", rule.Alert)
			}
		}
	}
	if rules < 10 {
		t.Errorf("%d rules", rules)
	}
	if got := unknownMetrics(known, "outbox_lag_seconds + outbox_lag + outbox_claim_duration_seconds + outbox_claim_duration_seconds_bucket"); fmt.Sprint(got) != "[outbox_lag outbox_claim_duration_seconds]" {
		t.Errorf("found %q", got)
	}
}

// A dashboard as Grafana imports it: what its schema requires of the parts that are used here.
func TestDashboardAsksForMetricsThatExist(t *testing.T) {
	t.Parallel()
	var dashboard struct {
		UID, Title    string
		SchemaVersion int
		Panels        []struct {
			ID          int
			Type, Title string
			Description string
			GridPos     struct{ H, W, X, Y int }
			FieldConfig struct{ Defaults struct{ Unit string } }
			Targets     []struct {
				RefID, Expr, LegendFormat string
				Datasource                struct{ UID string }
			}
			Datasource struct{ UID string }
		}
		Templating struct {
			List []struct {
				Name, Type string
				Query      json.RawMessage
			}
		}
	}
	relaytest.Must(t, json.Unmarshal([]byte(readText(t, docs+"deploy/grafana-dashboard.json")), &dashboard))
	known, ids, asked := golden(t), map[int]bool{}, map[string]bool{}
	if dashboard.UID == "" || dashboard.Title == "" || dashboard.SchemaVersion < 39 || len(dashboard.Templating.List) != 2 {
		t.Errorf("%s %s, schema %d", dashboard.UID, dashboard.Title, dashboard.SchemaVersion)
	}
	for _, p := range dashboard.Panels {
		if ids[p.ID] || p.ID == 0 || p.Title == "" || p.GridPos.W <= 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d %q lies at %+v, or its number is taken", p.ID, p.Title, p.GridPos)
		}
		ids[p.ID] = true
		if p.Type != "row" && (len(p.Targets) == 0 || p.Datasource.UID != "${datasource}") {
			t.Errorf("%s: asks nothing, or another data source", p.Title)
		}
		if p.Type != "row" && (p.Description == "" || p.FieldConfig.Defaults.Unit == "") {
			t.Errorf("%s: lacks a description, or the unit %q", p.Title, p.FieldConfig.Defaults.Unit)
		}
		for _, target := range p.Targets {
			if unknown := unknownMetrics(known, target.Expr); len(unknown) > 0 || target.RefID == "" || target.LegendFormat == "" || target.Datasource.UID != "${datasource}" || !metricName.MatchString(target.Expr) {
				t.Errorf("%s: unknown metrics %q in %s", p.Title, unknown, target.Expr)
			}
			for _, name := range metricName.FindAllString(target.Expr, -1) {
				asked[name] = true
			}
		}
	}
	for _, v := range dashboard.Templating.List {
		if unknown := unknownMetrics(known, string(v.Query)); len(unknown) > 0 {
			t.Errorf("variable %s: %q", v.Name, unknown)
		}
	}
	if len(asked) < 20 {
		t.Errorf("it shows %d metrics", len(asked))
	}
}
