package rulestest

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var grafana = flag.String("grafana", "", "check the dashboard by Grafana's types; `directory` has the packages that .ci/npm/grafana names")

// TestDashboardHasGrafanasTypes checks every field of the dashboard by the types that Grafana
// publishes: `json.Unmarshal` would ignore a misspelt one, as Grafana does.
func TestDashboardHasGrafanasTypes(t *testing.T) {
	t.Parallel()
	if *grafana == "" {
		t.Skip("Grafana's types are not installed; make test-dashboard installs them")
	}
	types, err := os.ReadFile("dashboard.ts")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../grafana-dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string][2]string{
		"as-it-is":                      {},
		"misspelt-field":                {`"refresh": "30s"`, `"refreshes": "30s"`},
		"misspelt-field-of-a-panel":     {`"description": "Deliveries that`, `"descriptions": "Deliveries that`},
		"misspelt-option-of-a-stat":     {`"graphMode": "area"`, `"graphModes": "area"`},
		"unknown-mode-of-a-stat":        {`"graphMode": "area"`, `"graphMode": "areas"`},
		"misspelt-calculation":          {`"reduceOptions": {`, `"reduceOption": {`},
		"misspelt-option-of-a-legend":   {`"displayMode": "`, `"displayModes": "`},
		"unknown-mode-of-a-legend":      {`"displayMode": "`, `"displayMode": "large`},
		"misspelt-field-of-a-query":     {`"legendFormat": "delivered"`, `"legendFormats": "delivered"`},
		"text-for-a-switch":             {`"range": true`, `"range": "true"`},
		"misspelt-field-of-a-value":     {`"unit": "ops"`, `"units": "ops"`},
		"misspelt-style":                {`"fillOpacity": `, `"fillOpaqueness": `},
		"text-for-a-width":              {`"w": 24`, `"w": "24"`},
		"misspelt-field-of-a-variable":  {`"includeAll": true`, `"includesAll": true`},
		"unknown-kind-of-a-variable":    {`"type": "query"`, `"type": "queries"`},
		"unknown-refresh-of-a-variable": {`"refresh": 2`, `"refresh": 7`},
		"unknown-kind-of-a-panel":       {`"type": "timeseries"`, `"type": "graph"`},
	}
	dir := t.TempDir()
	args := []string{
		filepath.Join(*grafana, "node_modules/typescript/lib/tsc.js"), "--noEmit", "--strict", "--skipLibCheck", "--pretty", "false",
		"--target", "es2022", "--module", "nodenext", "--moduleResolution", "nodenext",
	}
	for name, change := range cases {
		changed := strings.Replace(string(text), change[0], change[1], 1)
		if change[0] != "" && changed == string(text) {
			t.Errorf("%s: nothing is changed", name)
		}
		if err := os.WriteFile(filepath.Join(dir, name+".ts"), []byte(string(types)+changed+";\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, name+".ts")
	}
	modules, err := filepath.Abs(filepath.Join(*grafana, "node_modules"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	compiler := exec.CommandContext(t.Context(), "node", args...)
	compiler.Dir = dir
	out, _ := compiler.CombinedOutput() // it fails: most of the dashboards are wrong
	var refused []string
	for line := range strings.Lines(string(out)) {
		if name, _, found := strings.Cut(line, ".ts("); found {
			refused = append(refused, name)
		}
	}
	for name, change := range cases {
		if slices.Contains(refused, name) != (change[0] != "") {
			t.Errorf("%s: refused is %v", name, change[0] == "")
		}
	}
	if t.Failed() || len(refused) == 0 {
		t.Errorf("the compiler says:\n%s", out)
	}
}
