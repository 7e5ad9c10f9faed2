package config

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const sample = "sample.yaml"

var sampleEnv = []string{
	"OUTBOX_DATABASE_URL=postgres://u:p@localhost/db", "SLACK_WEBHOOK_URL=https://hooks.slack.com/services/x",
	"LOGISTICS_SECRET=" + goodSecret, "LOGISTICS_TOKEN=token", "SMTP_PASSWORD=password",
}

// The sample mentions every setting and variable, and what it sets is the default.
func TestSample(t *testing.T) {
	t.Parallel()
	c := loadFrom(sources{Env: sampleEnv, Flags: map[string]string{"config": sample}, Hostname: "host"})
	testkit.Must(t, c.Err())
	text, err := os.ReadFile(sample)
	testkit.Must(t, err)
	own := writeFile(t, filepath.Join(t.TempDir(), "own.yaml"), string(text)) // as config init makes it: for its owner alone
	command(sampleEnv, "config", "check", "-c", own).expect(t, 0, own+" is valid; it delivers to logistics, analytics\nNot signed, since they have no signing_secrets: requests to analytics\n", "")
	plain := loadFrom(sources{Env: sampleEnv})
	for _, r := range c.table("").Rows {
		if key := r.Path[strings.LastIndexAny(r.Path, ".]")+1:]; key != "*" && !strings.Contains(string(text), key+":") {
			t.Errorf("the sample does not mention %s", r.Path)
		}
		if r.Env != "" && !strings.Contains(string(text), "OUTBOX_"+r.Env) {
			t.Errorf("the sample does not mention OUTBOX_%s", r.Env)
		}
		if r.Flag != "" && !strings.Contains(string(text), "--"+r.Flag) {
			t.Errorf("the sample does not mention --%s", r.Flag)
		}
		if r.Path == "environment" || r.Path == "relay.name" { // differ everywhere
			continue
		}
		want, standard := shownAt(t, plain, r.Path)
		got, origin := shownAt(t, c, r.Path)
		switch {
		case standard != "# default":
		case !strings.HasPrefix(origin, "# "+sample):
			t.Errorf("the sample does not set %s", r.Path)
		case got != want:
			t.Errorf("the sample sets %s to %s, the default is %s", r.Path, got, want)
		}
	}
}

// The name of a variable derives from the path, but for OUTBOX_SIGNING_SECRET. Only lists and names
// that a file chooses have none, but for OUTBOX_TRACES_HEADERS. Documents and deployments name no
// other variables.
func TestVariables(t *testing.T) {
	t.Parallel()
	table := new(Config).table("")
	known := map[string]string{"OUTBOX_CONFIG": "the file"}
	add := func(name, path string) {
		if other := known[name]; other != "" {
			t.Errorf("%s sets %s and %s", name, other, path)
		}
		known[name] = path
	}
	for _, r := range table.Rows {
		want := "OUTBOX_" + strings.ToUpper(strings.NewReplacer("destinations.*.", "destination_", "[]", "", ".", "_").Replace(r.Path))
		switch {
		case r.Path == "destinations.*.signing_secrets":
			want = "OUTBOX_SIGNING_SECRET"
		case r.Path == "traces.headers.*":
			want = "OUTBOX_TRACES_HEADERS"
		case strings.HasSuffix(r.Path, "*"), strings.HasPrefix(r.Path, "databases["), strings.HasPrefix(r.Path, "routes["):
			want = ""
		}
		got := table.Variable(r)
		testkit.Equal(t, r.Path, got, want)
		if got != "" {
			add(got, r.Path)
		}
		if r.FromFile {
			add(got+"_FILE", r.Path)
		}
	}
	variable := regexp.MustCompile(`\bOUTBOX_[A-Z_]+[A-Z]\b`)
	root := os.DirFS("../../..")
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/deploy/*.*", "docs/deploy/helm/*/*.*", "docs/deploy/helm/*/templates/*", "Dockerfile", "docker-compose.yml", ".ci/*.sh", "internal/cli/config/*.yaml"} {
		files, err := fs.Glob(root, pattern)
		testkit.Must(t, err)
		for _, file := range files {
			text, err := fs.ReadFile(root, file)
			testkit.Must(t, err)
			for _, name := range variable.FindAllString(string(text), -1) {
				if known[name] == "" {
					t.Errorf("%s names %s, which sets nothing", file, name)
				}
			}
		}
	}
}

// shownAt returns what config show prints at a path, and the comment beside it; nothing if the path
// is absent.
func shownAt(t *testing.T, c *Config, path string) (value, comment string) {
	t.Helper()
	text, err := c.Show()
	testkit.Must(t, err)
	var document yaml.Node
	testkit.Must(t, yaml.Unmarshal(text, &document))
	n := document.Content[0]
	for step := range strings.SplitSeq(path, ".") {
		i := slices.IndexFunc(n.Content, func(key *yaml.Node) bool { return key.Value == step })
		if i < 0 {
			return "", ""
		}
		n = n.Content[i+1]
	}
	comment = n.LineComment
	n.LineComment = ""
	line, err := yaml.Marshal(n)
	testkit.Must(t, err)
	return strings.TrimSpace(string(line)), comment
}

// sameForEach is what both destinations take from the defaults.
const sameForEach = `    responses:
      retry: [] # default
      fail: [404, 405] # outbox-relay.yaml:6
    rate_limit: 0 # default
    on_failure: block # default
    breaker:
      enabled: true # default
      failures: 5 # default
      probe_after: 1s # default
      probe_max: 5s # default
    format: raw # default
    event_headers: [content-*, traceparent, tracestate, baggage, ce-*, x-event-*] # default
    max_payload_bytes: 0 # default
    excerpts: problem # default
    tls:
      min_version: "1.2" # default
`

const wantShow = `environment: "" # default
database:
  url: postgres://billing:***@db.internal:5432/billing # env OUTBOX_DATABASE_URL
  pooler: auto # default
  schema: "" # default
  allow_superuser: false # default
relay:
  name: host # default
  poll_interval: 5s # default
  sleep_after: 1m # default
  lease: 1m30s # env OUTBOX_RELAY_LEASE
  drain_timeout: 20s # default
  max_in_flight: 100 # flag --max-in-flight
  history: true # default
  attempt_log: all # outbox-relay.yaml:2
defaults:
  timeout: 15s # outbox-relay.yaml:4
  max_in_flight: 64 # default
  retry:
    schedule: [5s, 30s, 5m, 30m, 4h] # default
    max_attempts: 8 # default
    jitter: 0 # outbox-relay.yaml:5
    retry_after_max: 24h # default
    not_after: 720h # default
  responses:
    retry: [] # default
    fail: [404, 405] # outbox-relay.yaml:6
  rate_limit: 0 # default
  on_failure: block # default
  breaker:
    enabled: true # default
    failures: 5 # default
    probe_after: 1s # default
    probe_max: 5s # default
  format: raw # default
  event_headers: [content-*, traceparent, tracestate, baggage, ce-*, x-event-*] # default
  max_payload_bytes: 0 # default
  excerpts: problem # default
  tls:
    min_version: "1.2" # default
destinations:
  logistics:
    url: https://logistics.internal/in?*** # outbox-relay.yaml:9
    signing_secrets: [whsec_***, whsec_***] # outbox-relay.yaml:10
    headers:
      Authorization: '***' # outbox-relay.yaml:12
      X-Number: '***' # outbox-relay.yaml:13
    timeout: 15s # outbox-relay.yaml:4
    max_in_flight: 64 # default
    retry:
      schedule: [1s, 1h30m] # outbox-relay.yaml:14
      max_attempts: 8 # default
      jitter: 0 # outbox-relay.yaml:5
      retry_after_max: 24h # default
      not_after: 720h # default
` + sameForEach + `  "1":
    url: http://10.0.0.1:8080 # outbox-relay.yaml:15
    timeout: 15s # outbox-relay.yaml:4
    max_in_flight: 64 # default
    retry:
      schedule: [5s, 30s, 5m, 30m, 4h] # default
      max_attempts: 8 # default
      jitter: 0 # outbox-relay.yaml:5
      retry_after_max: 24h # default
      not_after: 720h # default
` + sameForEach + `    bearer_token: '***' # outbox-relay.yaml:15
    proxy: http://***@proxy:3128 # outbox-relay.yaml:15
egress:
  allow_private: [10.0.0.0/8, 127.0.0.1/32] # outbox-relay.yaml:17
  proxy: http://proxy.internal:3128 # outbox-relay.yaml:17
routes:
  - event: '*' # default
    to: [logistics, "1"] # default
alerts:
  channels:
    - webhook: https://ops.internal/hooks # outbox-relay.yaml:16
    - slack: https://hooks.slack.com/*** # env OUTBOX_ALERTS_CHANNELS_SLACK_FILE
  after: 45s # default
  repeat: 1h # default
  lag_over: 10m # default
  vacuum_blocked_over: 5m # default
retention:
  archive_after: 720h # default
  delete_after: 8760h # default
  attempts: 2160h # default
  processed_events: 2160h # default
  schedule: 17 3 * * * # default
metrics:
  listen: 127.0.0.1:9464 # default
  destinations: 100 # default
traces:
  endpoint: http://collector:4318 # outbox-relay.yaml:18
  headers:
    Authorization: '***' # env OTEL_EXPORTER_OTLP_HEADERS
    x-tenant: '***' # env OTEL_EXPORTER_OTLP_HEADERS
  service_name: billing # env OTEL_SERVICE_NAME
  sample_ratio: 1 # default
admin:
  listen: 127.0.0.1:9465 # default
  behind_proxy: false # default
  public_url: "" # default
  path_prefix: "" # default
log:
  level: info # default
  format: auto # default
`

func TestShow(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := writeFile(t, filepath.Join(dir, usualFile), `relay:
  attempt_log: all
defaults:
  timeout: 15s
  retry: {jitter: 0}
  responses: {fail: [404, 405]}
destinations:
  logistics:
    url: https://logistics.internal/in?token=${TOKEN}
    signing_secrets: ["${SECRET}", `+otherSecret+`]
    headers:
      Authorization: Bearer ${TOKEN}
      X-Number: 2
    retry: {schedule: [1s, 90m]}
  1: {url: "http://10.0.0.1:8080", bearer_token: hunter2, proxy: "http://hunter2:hunter2@proxy:3128"}
alerts: {channels: [{slack: https://hooks.slack.com/replaced}, {webhook: https://ops.internal/hooks}]}
egress: {allow_private: [10.0.0.0/8, 127.0.0.1/32], proxy: "http://proxy.internal:3128"}
traces: {endpoint: "http://collector:4318"}
`)
	env := []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=http://elsewhere:4317", "OTEL_EXPORTER_OTLP_HEADERS=Authorization=Bearer%20hunter2,x-tenant=hunter2", "OTEL_SERVICE_NAME=billing",
		"OUTBOX_DATABASE_URL=postgres://billing:hunter2@db.internal/billing", "OUTBOX_RELAY_LEASE=90s", "TOKEN=hunter2", "SECRET=" + goodSecret,
		"OUTBOX_ALERTS_CHANNELS_SLACK_FILE=" + writeFile(t, filepath.Join(dir, "slack"), "https://hooks.slack.com/services/hunter2\n"),
	}
	r := command(env, "config", "show", "--config", file, "--max-in-flight", "100")
	hostname, err := os.Hostname()
	testkit.Must(t, err)
	r.stdout = strings.ReplaceAll(strings.Replace(r.stdout, "name: "+hostname, "name: host", 1), dir+"/", "")
	r.expect(t, 0, wantShow, "")
}
