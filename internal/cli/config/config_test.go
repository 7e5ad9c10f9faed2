package config

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"
)

// result is what one command left behind.
type result struct {
	code           int
	stdout, stderr string
}

// command runs a program that has the commands of this package alone.
func command(env []string, args ...string) result {
	var stdout, stderr bytes.Buffer
	program := cli.Program{
		Grammar: &struct {
			Config Command `cmd:""`
		}{},
		Env: env, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr,
	}
	code := program.Run(args)
	return result{code, stdout.String(), stderr.String()}
}

func (r result) expect(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || r.stdout != stdout || r.stderr != stderr {
		t.Errorf("got exit code %d, stdout:\n%s\nstderr:\n%s\nwant %d, stdout:\n%s\nstderr:\n%s", r.code, r.stdout, r.stderr, code, stdout, stderr)
	}
}

// writeFile makes a file that only its owner reads.
func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	testkit.Must(t, os.WriteFile(name, []byte(content), 0o600))
	return name
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := writeFile(t, filepath.Join(dir, "secret"), goodSecret)
	testkit.Must(t, os.Chmod(open, 0o644))
	for name, test := range map[string]struct {
		env  []string
		file string
		want string
	}{
		"unknown variable": {env: []string{"OUTBOX_RELAY_LEASSE=1m"}, want: "warning: env OUTBOX_RELAY_LEASSE: is not a setting of this version; did you mean OUTBOX_RELAY_LEASE?\n"},
		"readable by all":  {env: []string{"OUTBOX_SIGNING_SECRET_FILE=" + open}, want: "warning: env OUTBOX_SIGNING_SECRET_FILE: DIR/secret is readable by everyone on this machine; run: chmod o-r DIR/secret\n"},
		"shrinking delays": {
			file: "destinations: {a: {url: 'http://a'}, b: {url: 'http://b'}}\ndefaults: {retry: {schedule: [30s, 5s]}}\n",
			want: "warning: outbox-relay.yaml:2: defaults.retry.schedule: has a delay that is shorter than the one before it\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := check(t, test.file, append(settingsBeside(test.file), test.env...))
			if got := strings.ReplaceAll(r.stderr, dir, "DIR"); r.code != 0 || got != test.want {
				t.Errorf("exit code %d, stderr:\n%s\nwant:\n%s", r.code, got, test.want)
			}
		})
	}
}

func TestUsualFile(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	command(twoSettings, "config", "check").expect(t, 0, "the configuration is valid; it delivers to default\nNot signed, since they have no signing_secrets: requests to default\n", "")
	writeFile(t, filepath.Join(dir, usualFile), "destinations: {a: {url: 'http://a'}}\n")
	command(twoSettings[:1], "config", "check").expect(t, 0, "outbox-relay.yaml is valid; it delivers to a\nNot signed, since they have no signing_secrets: requests to a\n", "")
	writeFile(t, filepath.Join(dir, "other.yaml"), "lo: {}\n")
	command(append(twoSettings, "OUTBOX_CONFIG=other.yaml"), "config", "check").expect(t, cli.ExitConfig, "", mistakes(`other.yaml:1: unknown key "lo"; did you mean "log"?`))
	command(append(twoSettings[:1:1], "OUTBOX_CONFIG=other.yaml"), "config", "check", "-c", usualFile).expect(t, 0, "outbox-relay.yaml is valid; it delivers to a\nNot signed, since they have no signing_secrets: requests to a\n", "")
}

func TestPrecedence(t *testing.T) {
	t.Parallel()
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), `
relay: {lease: 61s, drain_timeout: 61s, max_in_flight: 61, name: file}
destinations: {default: {url: 'http://file', signing_secrets: [`+goodSecret+`], timeout: 7s}}
alerts: {channels: [{slack: 'https://slack/file'}, {webhook: 'https://hook/file'}]}
`)
	c := loadFrom(sources{
		Env: []string{
			"OUTBOX_DATABASE_URL=postgres://u:p@h/db", "OUTBOX_RELAY_DRAIN_TIMEOUT=62s", "OUTBOX_RELAY_MAX_IN_FLIGHT=62", "OUTBOX_RELAY_NAME=env", "OUTBOX_DESTINATION_URL=http://env",
			"OUTBOX_SIGNING_SECRET=" + goodSecret + ", " + otherSecret, "OUTBOX_ALERTS_CHANNELS_SLACK=https://slack/env", "OUTBOX_DEFAULTS_TIMEOUT=62s",
		},
		Flags:    map[string]string{"config": file, "max-in-flight": "63", "name": "flag"},
		Hostname: "host",
	})
	testkit.Must(t, c.Err())
	for path, want := range map[string]string{
		"relay.poll_interval":                     "5s # default",
		"relay.lease":                             "1m1s # FILE:2",
		"relay.drain_timeout":                     "1m2s # env OUTBOX_RELAY_DRAIN_TIMEOUT",
		"relay.max_in_flight":                     "63 # flag --max-in-flight",
		"relay.name":                              "flag # flag --name",
		"destinations.default.url":                "http://env # env OUTBOX_DESTINATION_URL",
		"destinations.default.signing_secrets":    "[whsec_***, whsec_***] # env OUTBOX_SIGNING_SECRET",
		"destinations.default.timeout":            "7s # FILE:3",
		"defaults.timeout":                        "1m2s # env OUTBOX_DEFAULTS_TIMEOUT",
		"destinations.default.retry.max_attempts": "8 # default",
	} {
		value, origin := shownAt(t, c, path)
		if got := strings.ReplaceAll(value+" "+origin, file, "FILE"); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
	var channels []string
	for _, channel := range c.Relay.Alerts.Channels {
		channels = append(channels, channel.Name())
	}
	if want := []string{alert.ChannelName("webhook", "https://hook/file"), alert.ChannelName("slack", "https://slack/env")}; !slices.Equal(channels, want) {
		t.Errorf("channels are %s, want %s", channels, want)
	}
}

// A variable that the file refers to acts there and nowhere else, so that a file may give a
// destination its own name.
func TestReferredVariablesActOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := writeFile(t, filepath.Join(dir, usualFile), `
database: {url: "${OUTBOX_DATABASE_URL}"}
destinations:
  logistics: {url: "${OUTBOX_DESTINATION_URL}", signing_secrets: ["${OUTBOX_SIGNING_SECRET}"]}
alerts: {channels: [{webhook: "${OUTBOX_ALERTS_CHANNELS_SLACK}"}]}
`)
	c := loadFrom(sources{
		Env: append([]string{
			"OUTBOX_SIGNING_SECRET_FILE=" + writeFile(t, filepath.Join(dir, "secret"), goodSecret+","+otherSecret+"\r\n"),
			"OUTBOX_ALERTS_CHANNELS_SLACK=https://x",
		}, twoSettings...),
		Flags: map[string]string{"config": file}, Hostname: "host",
	})
	testkit.Must(t, c.Err())
	cfg := c.Relay
	if len(cfg.Destinations) != 1 || cfg.Destinations[0].Name != "logistics" || len(cfg.Destinations[0].SigningSecrets) != 2 || len(cfg.Alerts.Channels) != 1 {
		t.Errorf("destinations %v, channels %v", cfg.Destinations, cfg.Alerts.Channels)
	}
}

// A destination from the environment takes every type, also beside routes of a file that do not
// know it.
func TestDefaultDestinationBesideAFile(t *testing.T) {
	t.Parallel()
	const refused = "stands beside the destinations of outbox-relay.yaml (a)"
	for name, test := range map[string]struct{ file, routes, problem string }{
		"no file":               {"", "[{* [default]}]", ""},
		"only routes":           {"routes: [{event: x, to: [default]}]\n", "[{x [default]}]", ""},
		"one of that name":      {"destinations: {a: {url: 'http://a'}, default: {timeout: 5s}}\n", "[{* [a default]}]", ""},
		"others":                {"destinations: {a: {url: 'http://a'}}\n", "", refused},
		"others with routes":    {"destinations: {a: {url: 'http://a'}}\nroutes: [{event: x, to: [a]}]\n", "", refused},
		"others and a route to": {"destinations: {a: {url: 'http://a'}}\nroutes: [{event: x, to: [a, default]}]\n", "", refused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			flags, dir := map[string]string{}, t.TempDir()
			if test.file != "" {
				flags["config"] = writeFile(t, filepath.Join(dir, usualFile), test.file)
			}
			c := loadFrom(sources{Env: twoSettings, Flags: flags, Hostname: "host"})
			err := c.Err()
			if test.problem != "" {
				if err == nil || !strings.Contains(strings.ReplaceAll(c.Problems[len(c.Problems)-1].String(), dir+"/", ""), test.problem) {
					t.Errorf("the problems are %v", c.Problems)
				}
				return
			}
			if got := fmt.Sprint(c.Relay.Routes); err != nil || got != test.routes {
				t.Errorf("routes are %s, want %s: %v", got, test.routes, err)
			}
		})
	}
}

// A variable holds all headers for the collector, and replaces those of the file; that of
// OpenTelemetry counts where nothing else sets any.
func TestTraceHeaders(t *testing.T) {
	t.Parallel()
	const own, other = "OUTBOX_TRACES_HEADERS=a=own%20one,c=3", "OTEL_EXPORTER_OTLP_HEADERS=d=4"
	for name, test := range map[string]struct {
		file string
		env  []string
		want map[string]string
	}{
		"file":           {"{headers: {a: x y, b: 100%}}", []string{other}, map[string]string{"a": "x y", "b": "100%"}},
		"variable":       {"{headers: {a: x y, b: 100%}}", []string{own, other}, map[string]string{"a": "own one", "c": "3"}},
		"other variable": {"{}", []string{other}, map[string]string{"d": "4"}},
		"none":           {"{headers: {}}", []string{other}, nil},
	} {
		file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "destinations: {a: {url: http://a}}\ntraces: "+test.file+"\n")
		c := loadFrom(sources{Env: append(test.env, twoSettings[:1]...), Flags: map[string]string{"config": file}, Hostname: "host"})
		testkit.Must(t, c.Err())
		testkit.Equal(t, name, c.Traces.Headers, test.want)
	}
}

// Where none is a value, off says the same, and so does false, which YAML 1.1 makes of an off
// without quotes.
func TestNone(t *testing.T) {
	t.Parallel()
	for _, none := range []string{"none", "off", "false"} {
		file := writeFile(t, filepath.Join(t.TempDir(), usualFile), strings.ReplaceAll(`
database: {url: postgres://u:p@h/db, pooler: NONE}
destinations: {a: {url: http://a, proxy: NONE, excerpts: NONE}}
metrics: {listen: NONE}
admin: {listen: NONE}
traces: {endpoint: NONE}
`, "NONE", none))
		c := loadFrom(sources{Flags: map[string]string{"config": file}, Hostname: "host"})
		testkit.Must(t, c.Err())
		wire := c.Relay.Destinations[0].Wire
		got := []any{c.Relay.Pooler.Mode, wire.Proxy, wire.Excerpts, c.MetricsListen, c.Admin.Listen, c.Traces.Endpoint == nil}
		testkit.Equal(t, none, got, []any{relay.PoolerNone, relay.NoProxy, relay.ExcerptsNone, "", "", true})
	}
}

// Every setting that reaches the relay, in one file.
func TestRelayConfig(t *testing.T) {
	t.Parallel()
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), `
database: {url: postgres://u:p@h/db, listen_url: postgres://u:p@h2/db, pooler: none, schema: Billing}
relay: {name: n, poll_interval: 2s, lease: 3m, drain_timeout: 4s, max_in_flight: 5, attempt_log: all}
defaults: {timeout: 6s, max_in_flight: 7, rate_limit: 24, on_failure: skip, breaker: {failures: 25, probe_after: 26s, probe_max: 27s}, retry: {schedule: [8s, 9s], max_attempts: 10, jitter: 0, retry_after_max: 11h, not_after: 500h}, responses: {retry: [], fail: [404]}, format: cloudevents, cloudevents: {source: /s}, event_headers: [x-a, x-b-*], max_payload_bytes: 19, excerpts: none, tls: {min_version: "1.3"}}
destinations:
  a: {url: http://a, headers: {Authorization: x, X-Y: z}, signing_secrets: [`+goodSecret+`]}
  b: {url: https://b, format: raw, cloudevents: {source: /t}, event_headers: [], max_payload_bytes: 20, excerpts: text, tls: {server_name: n}, proxy: 'http://p:22', timeout: 12s, max_in_flight: 13, rate_limit: 0.5, on_failure: block, breaker: {enabled: false, failures: 28, probe_after: 29s, probe_max: 30s}, retry: {schedule: [14s], max_attempts: 15, jitter: 0.5, retry_after_max: 16h, not_after: 600h}, responses: {retry: [501], fail: []}}
routes: [{event: x.*, to: [a, b]}, {event: y, to: [b]}]
egress: {allow_private: [10.0.0.0/8, fd00::/8], proxy: http://p:21}
alerts: {after: 17s, after_by_rule: {lag: 0s}, repeat: 0s, lag_over: 18m, vacuum_blocked_over: 23m, channels: [{slack: 'https://s'}, {webhook: 'https://w'}]}
retention: {archive_after: 0, delete_after: 9000h, attempts: 24h, processed_events: 2000h, schedule: '@daily'}
`)
	c := loadFrom(sources{Flags: map[string]string{"config": file}, Hostname: "host"})
	testkit.Must(t, c.Err())
	got := c.Relay
	none, half := 0.0, 0.5
	want := relay.Config{
		Pool: c.Pool, Pooler: relay.Pooler{Mode: relay.PoolerNone, Session: c.Direct}, Schema: "Billing", Name: "n", PollInterval: 2 * time.Second, Lease: 3 * time.Minute, DrainTimeout: 4 * time.Second, MaxInFlight: 5, LogDelivered: true,
		Destinations: []relay.Destination{
			{
				Name: "a", URL: "http://a", Timeout: 6 * time.Second, MaxInFlight: 7, Headers: map[string]string{"Authorization": "x", "X-Y": "z"},
				SigningSecrets: got.Destinations[0].SigningSecrets,
				RateLimit:      24, OnFailure: policy.SkipFailed, Breaker: policy.BreakerPolicy{Failures: 25, ProbeAfter: 26 * time.Second, ProbeMax: 27 * time.Second},
				Retry:     policy.RetryPolicy{Schedule: []time.Duration{8 * time.Second, 9 * time.Second}, MaxAttempts: 10, Jitter: &none, RetryAfterMax: 11 * time.Hour, NotAfter: 500 * time.Hour},
				Responses: policy.Responses{Retry: []int{}, Fail: []int{404}},
				Wire:      relay.Wire{Format: relay.FormatCloudEvents, Source: "/s", EventHeaders: []string{"x-a", "x-b-*"}, MaxPayloadBytes: 19, Excerpts: relay.ExcerptsNone},
			},
			{
				Name: "b", URL: "https://b", Timeout: 12 * time.Second, MaxInFlight: 13,
				RateLimit: 0.5, OnFailure: policy.BlockFailed, Breaker: policy.BreakerPolicy{Disabled: true, Failures: 28, ProbeAfter: 29 * time.Second, ProbeMax: 30 * time.Second},
				Retry:     policy.RetryPolicy{Schedule: []time.Duration{14 * time.Second}, MaxAttempts: 15, Jitter: &half, RetryAfterMax: 16 * time.Hour, NotAfter: 600 * time.Hour},
				Responses: policy.Responses{Retry: []int{501}, Fail: []int{}},
				Wire: relay.Wire{
					Format: relay.FormatRaw, Source: "/t", EventHeaders: []string{}, MaxPayloadBytes: 20, Excerpts: relay.ExcerptsText, Proxy: "http://p:22",
					TLS: relay.TLS{MinVersion: tls.VersionTLS13, ServerName: "n"},
				},
			},
		},
		Routes:    []relay.Route{{Event: "x.*", To: []string{"a", "b"}}, {Event: "y", To: []string{"b"}}},
		Egress:    relay.Egress{AllowPrivate: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}, Proxy: "http://p:21"},
		Alerts:    alert.Config{After: 17 * time.Second, AfterByRule: map[string]time.Duration{alert.RuleLag: 0}, Repeat: -1, LagOver: 18 * time.Minute, VacuumBlockedOver: 23 * time.Minute, Channels: got.Alerts.Channels},
		Retention: archive.Retention{DeleteAfter: 9000 * time.Hour, Attempts: 24 * time.Hour, ProcessedEvents: 2000 * time.Hour, Schedule: "@daily"},
	}
	if got.History == nil {
		t.Error("there is no history")
	}
	got.History = nil
	if !reflect.DeepEqual(got, want) { // which follows pointers
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
	if len(got.Alerts.Channels) != 2 || len(got.Destinations[0].SigningSecrets) != 1 {
		t.Errorf("channels %v, secrets %v", got.Alerts.Channels, got.Destinations[0].SigningSecrets)
	}
}

// Every flag of the table is one of run, and nothing else is: a row whose flag no command has, and
// a flag without a row, would do nothing.
func TestFlagsAreSettings(t *testing.T) {
	t.Parallel()
	want := []string{"config", "database", "help"}
	for _, r := range new(Config).table("").Rows {
		if r.Flag != "" {
			want = append(want, r.Flag)
		}
	}
	parser, err := kong.New(&struct {
		Run struct{ SettingFlags } `cmd:""`
	}{})
	testkit.Must(t, err)
	run := slices.IndexFunc(parser.Model.Children, func(n *kong.Node) bool { return n.Name == "run" })
	var got []string
	for _, group := range parser.Model.Children[run].AllFlags(false) {
		for _, flag := range group {
			got = append(got, flag.Name)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("run has the flags %s, want %s", got, want)
	}
}

// The checks name settings by their path. A path that no row has would never be found, and the
// check would do nothing.
func TestChecksNameSettings(t *testing.T) {
	t.Parallel()
	var paths strings.Builder
	for _, r := range new(Config).table("").Rows {
		paths.WriteString("." + r.Path + ".")
	}
	path := regexp.MustCompile(`^"\.?[a-z]+([._][a-z]+)*"$`)
	found := 0
	for _, name := range []string{"config.go", "check.go", "wire.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		testkit.Must(t, err)
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Recv == nil {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				literal, ok := n.(*ast.BasicLit)
				if !ok || !path.MatchString(literal.Value) {
					return true
				}
				found++
				if key := strings.Trim(literal.Value, `".`); !strings.Contains(paths.String(), "."+key+".") && !strings.Contains(paths.String(), "."+key+"[]") {
					t.Errorf("%s: there is no setting or section %s", name, literal.Value)
				}
				return true
			})
		}
	}
	if found < 20 {
		t.Errorf("found only %d paths", found)
	}
}

// config init writes what config check takes, and nothing over a file that is there.
func TestConfigInit(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "relay.yaml")
	if r := command(nil, "config", "init", file); r.code != 0 || !strings.Contains(r.stdout, "outbox-relay config check -c ") {
		t.Errorf("%+v", r)
	}
	if r := command(sampleEnv, "config", "check", "-c", file); r.code != 0 || !strings.HasPrefix(r.stdout, file+" is valid; it delivers to ") {
		t.Errorf("%+v", r)
	}
	if r := command(nil, "config", "init", file); r.code != cli.ExitFailed || !strings.Contains(r.stderr, "is there already") {
		t.Errorf("%+v", r)
	}
	minimal := filepath.Join(t.TempDir(), "minimal.yaml")
	if r := command(nil, "config", "init", "--minimal", minimal); r.code != 0 {
		t.Errorf("%+v", r)
	}
	for _, env := range [][]string{nil, {"OUTBOX_DATABASE_URL=postgres://h/db", "OUTBOX_DESTINATION_URL=http://h/", "OUTBOX_SIGNING_SECRET=" + goodSecret}} {
		if r := command(env, "config", "check", "-c", minimal); r.code != 0 {
			t.Errorf("%+v", r)
		}
	}
	if r := command(nil, "config", "init", "-"); r.code != 0 || r.stdout != string(sampleFile) {
		t.Errorf("%+v", r)
	}
	strict := command(twoSettings, "config", "check", "--strict")
	strict.expect(t, cli.ExitConfig, "the configuration is valid; it delivers to default\nNot signed, since they have no signing_secrets: requests to default\n",
		"outbox-relay: 1 warning above; without --strict they are no mistakes\n")
}
