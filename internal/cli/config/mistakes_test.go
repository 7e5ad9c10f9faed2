package config

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

const (
	goodSecret  = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	otherSecret = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
)

// The environment that needs nothing else.
var twoSettings = []string{"OUTBOX_DATABASE_URL=postgres://u:p@localhost/db", "OUTBOX_DESTINATION_URL=https://logistics.internal/in"}

// settingsBeside returns the two settings, or one beside a file with destinations, where a URL is a
// mistake of its own.
func settingsBeside(file string) []string {
	if strings.Contains(file, "destinations:") {
		return slices.Clone(twoSettings[:1])
	}
	return slices.Clone(twoSettings)
}

// check runs config check on a file of that text, and returns its stderr without the file's
// directory.
func check(t *testing.T, file string, env []string, flags ...string) result {
	t.Helper()
	dir := t.TempDir()
	args := append([]string{"config", "check"}, flags...)
	if file != "" {
		args = append(args, "--config", writeFile(t, filepath.Join(dir, usualFile), file))
	}
	r := command(env, args...)
	r.stderr = strings.ReplaceAll(r.stderr, dir+"/", "")
	r.stdout = strings.ReplaceAll(r.stdout, dir+"/", "")
	return r
}

// mistakes returns what stderr must hold for these lines.
func mistakes(lines ...string) string {
	end := fmt.Sprintf("%d problems. Nothing starts with this configuration.\n", len(lines))
	if len(lines) == 1 {
		end = "1 problem. Nothing starts with this configuration.\n"
	}
	return strings.Join(append(lines, end), "\n")
}

func TestFileMistakes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		file string // with the two settings from the environment
		want []string
	}{
		"a list": {"- log\n", []string{`outbox-relay.yaml:1: is not a section; write settings such as "database:"`}},

		// Keys.
		"unknown key at the top":     {"destinatons: {}\n", []string{`outbox-relay.yaml:1: unknown key "destinatons"; did you mean "destinations"?`}},
		"a key in the wrong section": {"timeout: 5s\n", []string{`outbox-relay.yaml:1: unknown key "timeout"; did you mean "defaults.timeout"?`}},
		"wrong indentation":          {"defaults:\nretry:\n  max_attempts: 3\n", []string{`outbox-relay.yaml:2: unknown key "retry"; did you mean "defaults.retry"?`}},
		"keys of a section below": {"destinations: {a: {url: 'http://a',\n  stream: s,\n  cloudevents_source: /a}}\n", []string{
			`outbox-relay.yaml:2: unknown key "destinations.a.stream"; did you mean "nats.stream"?`,
			`outbox-relay.yaml:3: unknown key "destinations.a.cloudevents_source"; did you mean "cloudevents.source"?`,
		}},
		"an open page": {
			"admin: {listen: '0.0.0.0:9465'}\n",
			[]string{
				`outbox-relay.yaml:1: admin.listen: 0.0.0.0:9465 can be reached from other hosts; set admin.token (OUTBOX_ADMIN_TOKEN), made with: openssl rand -base64 32; ` +
					`and set admin.tls, as a token would travel in clear text, or admin.behind_proxy: true where a proxy ends TLS; or listen on 127.0.0.1:9465`,
			},
		},
		"half of the page's TLS":        {"admin: {tls: {key_file: /etc/tls.key}}\n", []string{`outbox-relay.yaml:1: admin.tls.key_file: is set without tls.cert_file; set both`}},
		"a prefix that is no path":      {"admin: {path_prefix: outbox/}\n", []string{`outbox-relay.yaml:1: admin.path_prefix: "outbox/" is not a path; write one such as "/outbox", without a slash at its end`}},
		"a prefix that no browser asks": {"admin: {path_prefix: /a/../b}\n", []string{`outbox-relay.yaml:1: admin.path_prefix: "/a/../b" is not a path; write one such as "/outbox", without a slash at its end`}},
		"a short token":                 {"admin: {token: secret}\n", []string{`outbox-relay.yaml:1: admin.token: is shorter than 16 characters; make one with: openssl rand -base64 32`}},

		"an address that is none": {"metrics: {listen: 9464}\n", []string{`outbox-relay.yaml:1: metrics.listen: "9464" is not an address; write host and port such as "127.0.0.1:9464", ":9464" for all addresses of the host, or none`}},
		"a port that is none":     {"metrics: {listen: ':http'}\n", []string{`outbox-relay.yaml:1: metrics.listen: ":http" is not an address; write host and port such as "127.0.0.1:9464", ":9464" for all addresses of the host, or none`}},
		"an address with a name":  {"metrics: {listen: 'relay.internal:9464'}\n", []string{`outbox-relay.yaml:1: metrics.listen: "relay.internal:9464" names a host; write an IP address of this machine`}},

		// Numbers and durations.
		"too large a number": {"relay: {max_in_flight: 1000000}\n", []string{`outbox-relay.yaml:1: relay.max_in_flight: 1000000 is out of range; write 1 to 100000`}},
		"a poll too often":   {"relay: {poll_interval: 10ms}\n", []string{`outbox-relay.yaml:1: relay.poll_interval: 10ms is too short; write at least 1s`}},
		"a lease shorter than a timeout": {"relay:\n  lease: 12s\n", []string{
			`outbox-relay.yaml:2: relay.lease: 12s must be at least 5s longer than destinations.default.timeout (10s); write 15s or more, or lower the timeout`,
		}},
		"a timeout longer than the default lease": {"defaults: {timeout: 90s}\n", []string{
			`relay.lease: 1m0s must be at least 5s longer than destinations.default.timeout (1m30s); write 1m35s or more, or lower the timeout`,
		}},

		// Retention.
		"a memory shorter than the retries": {"retention:\n  processed_events: 100h\n", []string{
			`outbox-relay.yaml:2: retention.processed_events: 100h0m0s is shorter than destinations.default.retry.not_after (720h0m0s), until when a duplicate may come, and would be processed again; write 720h or more, or 0 for ever, or a shorter not_after`,
		}},
		"dropped before it is archived": {"retention: {archive_after: 1000h, delete_after: 720h}\n", []string{
			`outbox-relay.yaml:1: retention.delete_after: 720h0m0s is shorter than retention.archive_after (1000h0m0s), so that what is archived would be dropped at once; write 1000h0m0s or more, or 0 for ever`,
		}},
		"archived sooner than the database allows": {"retention: {archive_after: 1h}\n", []string{
			`outbox-relay.yaml:1: retention.archive_after: 1h0m0s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`,
		}},
		"a schedule of six fields": {"retention: {schedule: 0 17 3 * * *}\n", []string{
			`outbox-relay.yaml:1: retention.schedule: "0 17 3 * * *" is not a schedule; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`,
		}},

		// Retries.
		"a schedule with a delay beyond": {"defaults:\n  retry:\n    schedule:\n    - 5s\n    - 1000h\n", []string{
			`outbox-relay.yaml:5: defaults.retry.schedule[1]: 1000h0m0s is out of range; write more than 0 and at most 720h0m0s`,
		}},
		"a schedule without end": {"defaults: {retry: {schedule: [" + strings.Repeat("5s,", 101) + "]}}\n", []string{
			`outbox-relay.yaml:1: defaults.retry.schedule: 101 entries are too many; the last one repeats, so write at most 100`,
		}},
		"jitter": {"defaults: {retry: {jitter: 2}}\n", []string{`outbox-relay.yaml:1: defaults.retry.jitter: 2 is out of range; write 0 to 1`}},
		"a not_after before the last attempt": {"defaults:\n  retry:\n    not_after: 100h\n", []string{
			`outbox-relay.yaml:3: defaults.retry.not_after: 100h0m0s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (168h9m20s), so that deliveries would fail before their last attempt; write 169h or more, or shorten those`,
		}},
		"a schedule beyond the default not_after": {"defaults: {retry: {max_attempts: 1000}}\n", []string{
			`defaults.retry.not_after: 720h0m0s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (23995h26m40s), so that deliveries would fail before their last attempt; write 23996h or more, or shorten those`,
		}},
		"attempts":                  {"defaults: {retry: {max_attempts: 1001}}\n", []string{`outbox-relay.yaml:1: defaults.retry.max_attempts: 1001 is out of range; write 1 to 1000`}},
		"a status that cannot move": {"defaults: {responses: {retry: [200]}}\n", []string{`outbox-relay.yaml:1: defaults.responses.retry: 200 is not a status code that can be moved; write 300 to 599`}},
		"a status in both lists":    {"defaults: {responses: {retry: [404], fail: [404]}}\n", []string{`outbox-relay.yaml:1: defaults.responses: 404 stands in both lists`}},

		// Destinations.
		"a destination without URL": {"destinations: {a: {}}\n", []string{`outbox-relay.yaml:1: destinations.a.url: is empty; write one such as https://logistics.internal/webhooks/finance`}},
		"two wrong destinations": {"destinations:\n  A: {url: 'http://a'}\n  b: {url: 'http:///b'}\n", []string{
			`outbox-relay.yaml:2: destinations.A: the name "A" is not usable; write lower-case letters, digits, '-' and '_', starting with a letter or digit, at most 63`,
			`outbox-relay.yaml:3: destinations.b.url: has no host; write one such as https://logistics.internal/webhooks/finance`,
		}},
		"a name that is a path": {"destinations: {../a: {url: 'http://a'}}\n", []string{
			`outbox-relay.yaml:1: destinations.../a: the name "../a" is not usable; write lower-case letters, digits, '-' and '_', starting with a letter or digit, at most 63`,
		}},
		"user info": {"destinations: {a: {url: 'https://u:hunter2@h/'}}\n", []string{`outbox-relay.yaml:1: destinations.a.url: contains user info; move it to headers.Authorization`}},
		"disguised loopback": {"destinations: {a: {url: 'http://①②⑦.0.0.1/'}}\n", []string{
			`outbox-relay.yaml:1: destinations.a.url: host "①②⑦.0.0.1" is neither a DNS name nor an IP address in its usual spelling`,
		}},
		"reserved header": {"destinations:\n  a:\n    url: http://a\n    headers:\n      X-Idempotency-Key: x\n", []string{
			`outbox-relay.yaml:5: destinations.a.headers.X-Idempotency-Key: is set by the relay or by HTTP itself; remove it`,
		}},
		"header names": {"destinations:\n  a:\n    url: http://a\n    headers:\n      a b: x\n      '': y\n", []string{
			`outbox-relay.yaml:5: destinations.a.headers.a b: is not a header name (letters, digits and hyphens)`,
			`outbox-relay.yaml:6: destinations.a.headers.: is not a header name (letters, digits and hyphens)`,
		}},
		"header values": {"destinations:\n  a:\n    url: http://a\n    headers:\n      A: \"x\\r\\ny\"\n      B: é\n      C: ''\n", []string{
			`outbox-relay.yaml:5: destinations.a.headers.A: contains a control character, such as a line break`,
			`outbox-relay.yaml:6: destinations.a.headers.B: has a value with characters beyond printable ASCII`,
			`outbox-relay.yaml:7: destinations.a.headers.C: is empty`,
		}},
		"traces": {"traces: {endpoint: 'http://u:hunter2@h:4318', headers: {a b: hunter2}, sample_ratio: 1.5}\n", []string{
			`outbox-relay.yaml:1: traces.endpoint: holds a user, a query or a fragment; write the URL without it, and credentials into traces.headers`,
			`outbox-relay.yaml:1: traces.sample_ratio: "1.5" is out of range; write a number from 0 to 1`,
			`outbox-relay.yaml:1: traces.headers.a b: is not a name that a header can have`,
		}},
		"secrets": {"destinations:\n  a:\n    url: http://a\n    signing_secrets:\n    - hunter2\n    - whsec_" + goodSecret + "\n    - whsec_aHVudGVyMg==\n", []string{
			`outbox-relay.yaml:5: destinations.a.signing_secrets[0]: a signing secret starts with "whsec_"; make one with: echo "whsec_$(openssl rand -base64 32)"`,
			`outbox-relay.yaml:6: destinations.a.signing_secrets[1]: what follows "whsec_" is not standard base64; make a secret with: echo "whsec_$(openssl rand -base64 32)"`,
			`outbox-relay.yaml:7: destinations.a.signing_secrets[2]: the secret holds 7 bytes; Standard Webhooks wants 24 to 64`,
		}},

		// Routes, alerts, log.
		"a route to nowhere": {"routes:\n- {event: 'invoice.*', to: [logistic]}\n- {event: '*', to: [default]}\n", []string{`outbox-relay.yaml:2: routes[0].to: there is no destination "logistic"`}},
		"a route without pattern": {"routes:\n- to: [default]\n", []string{
			`outbox-relay.yaml:2: routes[0].event: "" is not an event type or pattern; write one such as "invoice.paid", "invoice.*" or "*"`,
		}},
		"a route without destinations": {"routes:\n- {event: a}\n- {event: b, to: [default]}\n", []string{`outbox-relay.yaml:2: routes[0].to: names no destination`}},
		"a channel without URL":        {"alerts:\n  channels:\n  - {}\n", []string{`outbox-relay.yaml:3: alerts.channels[0]: names no channel; write {slack: "https://…"}, {webhook: "https://…"} or {service: "smtp://…"}`}},
		"a channel with two":           {"alerts:\n  channels:\n  - {slack: 'https://a', webhook: 'https://b'}\n", []string{`outbox-relay.yaml:3: alerts.channels[0]: names two channels; write an entry for each`}},
		"a channel twice":              {"alerts:\n  channels:\n  - {slack: 'https://a'}\n  - {slack: 'https://a'}\n", []string{`outbox-relay.yaml:4: alerts.channels[1]: repeats the URL of another channel`}},
		"an unknown channel":           {"alerts:\n  channels:\n  - {slak: 'https://a'}\n", []string{`outbox-relay.yaml:3: unknown key "alerts.channels[0].slak"; did you mean "slack"?`}},
		"channel URLs": {"alerts:\n  channels:\n  - {slack: hooks.slack.com/hunter2}\n  - {webhook: 'https://'}\n  - {webhook: 'https://a/%zz'}\n", []string{
			`outbox-relay.yaml:3: alerts.channels[0].slack: is not a URL that starts with https:// or http://`,
			`outbox-relay.yaml:4: alerts.channels[1].webhook: has no host`,
			`outbox-relay.yaml:5: alerts.channels[2].webhook: is not a URL`,
		}},
		"a listen_url of another kind": {"database: {listen_url: mysql://u:hunter2@h/db}\n", []string{`outbox-relay.yaml:1: database.listen_url: begins with another scheme than postgres://; write one such as postgres://user:password@localhost:5432/app`}},
		"a schema of PostgreSQL":       {"database: {schema: pg_catalog}\n", []string{`outbox-relay.yaml:1: database.schema: "pg_catalog" belongs to PostgreSQL itself`}},
		"a schema too long":            {"database: {schema: " + strings.Repeat("x", 64) + "}\n", []string{`outbox-relay.yaml:1: database.schema: is longer than 63 bytes, which PostgreSQL would cut off`}},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 4)
			t.Parallel()
			r := check(t, test.file, append(settingsBeside(test.file), "EMPTY="))
			r.expect(t, cli.ExitConfig, "", mistakes(test.want...))
		})
	}
}

func TestEnvironmentAndFlagMistakes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, test := range map[string]struct {
		file  string
		env   []string // beside the two settings
		flags []string
		want  []string
	}{
		"nothing set": {env: []string{"-"}, want: []string{
			`database.url: is not set; set OUTBOX_DATABASE_URL, or OUTBOX_DATABASE_URL_FILE`,
			`destinations: there is none; set OUTBOX_DESTINATION_URL or add one`,
		}},
		"an empty file":         {env: []string{"-"}, file: "# nothing\n", want: []string{`database.url: is not set; set OUTBOX_DATABASE_URL, or OUTBOX_DATABASE_URL_FILE`, `destinations: there is none; set OUTBOX_DESTINATION_URL or add one`}},
		"too short":             {env: []string{"OUTBOX_RELAY_LEASE=10s"}, want: []string{`env OUTBOX_RELAY_LEASE: 10s must be at least 5s longer than destinations.default.timeout (10s); write 15s or more, or lower the timeout`}},
		"a wrong second secret": {env: []string{"OUTBOX_SIGNING_SECRET=" + goodSecret + ",hunter2"}, want: []string{`env OUTBOX_SIGNING_SECRET: entry 2: a signing secret starts with "whsec_"; make one with: echo "whsec_$(openssl rand -base64 32)"`}},
		"a wrong URL":           {env: []string{"OUTBOX_DESTINATION_URL=https://h/#hunter2"}, want: []string{`env OUTBOX_DESTINATION_URL: contains a fragment (#…), which is never sent; remove it`}},
		"wrong headers":         {env: []string{"OUTBOX_TRACES_HEADERS=hunter2"}, want: []string{`env OUTBOX_TRACES_HEADERS: is not a list of headers; write name=value, several separated by commas, such as "Authorization=Bearer%20…"`}},
		"a wrong channel":       {env: []string{"OUTBOX_ALERTS_CHANNELS_SLACK=hunter2"}, want: []string{`env OUTBOX_ALERTS_CHANNELS_SLACK: is not a URL that starts with https:// or http://`}},
		"a secret that signs nothing": {
			env: []string{"-", twoSettings[0], "OUTBOX_SIGNING_SECRET=" + goodSecret}, file: "destinations: {a: {url: 'http://a'}}\n",
			want: []string{`env OUTBOX_SIGNING_SECRET: is only for the destination "default", and there is none; write signing_secrets for each destination that needs it`},
		},

		"a URL beside destinations": {
			file: "destinations: {a: {url: 'http://a'}, b: {url: 'http://b'}}\n",
			want: []string{`env OUTBOX_DESTINATION_URL: stands beside the destinations of outbox-relay.yaml (a, b): every event would go to both; unset it, or write its URL into the file`},
		},
		"a URL as a flag beside destinations": {
			file: "destinations: {a: {url: 'http://a'}}\n", env: []string{"-", twoSettings[0]}, flags: []string{"--destination-url=http://c"},
			want: []string{`flag --destination-url: stands beside the destinations of outbox-relay.yaml (a): every event would go to both; unset it, or write its URL into the file`},
		},
		"a shared default, told once": {
			file: "destinations: {a: {url: 'http://a'}, b: {url: 'http://b'}}\n", env: []string{"-", twoSettings[0], "OUTBOX_DEFAULTS_RETRY_MAX_ATTEMPTS=2000"},
			want: []string{`env OUTBOX_DEFAULTS_RETRY_MAX_ATTEMPTS: 2000 is out of range; write 1 to 1000`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			var env []string
			for i, entry := range append([]string{}, test.env...) {
				if i == 0 && entry == "-" {
					continue
				}
				env = append(env, strings.ReplaceAll(entry, "DIR", dir))
			}
			if len(test.env) == 0 || test.env[0] != "-" {
				env = append(append([]string{}, twoSettings...), env...) // the last entry of a name wins
			}
			r := check(t, test.file, env, test.flags...)
			r.stderr = strings.ReplaceAll(r.stderr, dir, "DIR")
			r.expect(t, cli.ExitConfig, "", mistakes(test.want...))
		})
	}
}
