package config

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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

// settingsBeside returns the two settings, or one beside a file with destinations, where a URL is a mistake of its own.
func settingsBeside(file string) []string {
	if strings.Contains(file, "destinations:") {
		return slices.Clone(twoSettings[:1])
	}
	return slices.Clone(twoSettings)
}

// check runs config check on a file of that text, and returns its stderr without the file's directory.
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
	end := fmt.Sprintf("%d problems. Nothing was started.\n", len(lines))
	if len(lines) == 1 {
		end = "1 problem. Nothing was started.\n"
	}
	return strings.Join(append(lines, end), "\n")
}

func TestFileMistakes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		file string // with the two settings from the environment
		want []string
	}{
		// The text as such.
		"UTF-16":                 {"\xff\xfel\x00o\x00g\x00", []string{`outbox-relay.yaml: is encoded in UTF-16; save it as UTF-8`}},
		"UTF-16 without a mark":  {"l\x00o\x00g\x00", []string{`outbox-relay.yaml:1: contains a NUL byte; save it as UTF-8 text`}},
		"Latin-1":                {"log:\n  level: caf\xe9\n", []string{`outbox-relay.yaml:2: is not valid UTF-8`}},
		"tabs":                   {"log:\n\tlevel: info\n", []string{`outbox-relay.yaml:2: is indented with a tab; YAML allows only spaces`}},
		"syntax":                 {"log: {level: info\n", []string{`outbox-relay.yaml:1: is not YAML: did not find expected ',' or '}'`}},
		"colon in a value":       {"relay:\n  name: a: b\n", []string{`outbox-relay.yaml:2: is not YAML: mapping values are not allowed in this context`}},
		"second document":        {"log: {level: info}\n---\nlog: {}\n", []string{`outbox-relay.yaml:2: begins a second document ("---"); write one`}},
		"broken second document": {"log: {level: info}\n---\n[", []string{`outbox-relay.yaml:3: is not YAML: did not find expected node content`}},
		"a list":                 {"- log\n", []string{`outbox-relay.yaml:1: is not a section; write settings such as "database:"`}},
		"a text":                 {"hello\n", []string{`outbox-relay.yaml:1: is not a section; write settings such as "database:"`}},
		"unknown anchor":         {"log: *x\n", []string{`outbox-relay.yaml: is not YAML: unknown anchor 'x' referenced`}},
		"tag":                    {"log: {level: !!str info}\n", []string{`outbox-relay.yaml:1: log.level: has a tag ("!!str"); remove it`}},
		"tag on a section":       {"log: !x {}\n", []string{`outbox-relay.yaml:1: log: has a tag ("!x"); remove it`}},
		"merge key": {"defaults: &d {timeout: 5s}\ndestinations:\n  a:\n    <<: *d\n    url: http://a\n", []string{
			`outbox-relay.yaml:4: destinations.a: merge keys ("<<") are not supported; write what destinations share under defaults`,
		}},
		"a key that is a list":      {"? [a]\n: b\n", []string{`outbox-relay.yaml:1: has a key that is not a name`}},
		"more than a file can hold": {strings.Repeat("# comment\n", 110_000), []string{`flag --config: cannot read outbox-relay.yaml: it is larger than 1024 KiB`}},
		"aliases that multiply": {
			"alerts: {channels: [{slack: &u https://a}]}\nroutes:\n- &r {event: x, to: [" + strings.Repeat("default,", 1000) + "]}\n" + strings.Repeat("- *r\n", 1000),
			[]string{`outbox-relay.yaml:3: holds more than 100000 values, counting an alias as often as it is used`},
		},

		// Keys.
		"unknown key":                    {"defaults:\n  retry: {shedule: [5s]}\n", []string{`outbox-relay.yaml:2: unknown key "defaults.retry.shedule"; did you mean "schedule"?`}},
		"unknown key at the top":         {"destinatons: {}\n", []string{`outbox-relay.yaml:1: unknown key "destinatons"; did you mean "destinations"?`}},
		"unknown key without a likeness": {"log: {colour: blue}\n", []string{`outbox-relay.yaml:1: unknown key "log.colour"`}},
		"a key in the wrong section":     {"timeout: 5s\n", []string{`outbox-relay.yaml:1: unknown key "timeout"; did you mean "defaults.timeout"?`}},
		"wrong indentation":              {"defaults:\nretry:\n  max_attempts: 3\n", []string{`outbox-relay.yaml:2: unknown key "retry"; did you mean "defaults.retry"?`}},
		"a key with control characters":  {"\"a\\x1b[31m\": 1\n", []string{`outbox-relay.yaml:1: unknown key "a\x1b[31m"`}},
		"a key of a list's syntax":       {"routes:\n- {\"[]\": x, event: a, to: [default]}\n", []string{`outbox-relay.yaml:2: unknown key "routes[0].[]"`}},
		"a repeated key":                 {"log: {level: info}\nrelay: {}\nlog: {format: json}\n", []string{`outbox-relay.yaml:3: log: stands here a second time; the first is in line 1`}},
		"a repeated destination":         {"destinations:\n  a: {url: http://a}\n  a: {url: http://b}\n", []string{`outbox-relay.yaml:3: destinations.a: stands here a second time; the first is in line 2`}},
		"an open page": {
			"admin: {listen: '0.0.0.0:9465'}\n",
			[]string{
				`outbox-relay.yaml:1: admin.listen: 0.0.0.0:9465 can be reached from other hosts; set admin.token (OUTBOX_ADMIN_TOKEN), made with: openssl rand -base64 32; ` +
					`and set admin.tls, as a token would travel in clear text, or admin.behind_proxy: true where a proxy ends TLS; or listen on 127.0.0.1:9465`,
			},
		},
		"half of the page's TLS":        {"admin: {tls: {key_file: /etc/tls.key}}\n", []string{`outbox-relay.yaml:1: admin.tls.key_file: is set without the other file of tls; set both`}},
		"a prefix that is no path":      {"admin: {path_prefix: outbox/}\n", []string{`outbox-relay.yaml:1: admin.path_prefix: "outbox/" is not a path; write one such as "/outbox", without a slash at its end`}},
		"a prefix that no browser asks": {"admin: {path_prefix: /a/../b}\n", []string{`outbox-relay.yaml:1: admin.path_prefix: "/a/../b" is not a path; write one such as "/outbox", without a slash at its end`}},
		"a short token":                 {"admin: {token: secret}\n", []string{`outbox-relay.yaml:1: admin.token: is shorter than 16 characters; make one with: openssl rand -base64 32`}},

		"an address that is none": {"metrics: {listen: 9464}\n", []string{`outbox-relay.yaml:1: metrics.listen: "9464" is not an address; write host and port such as "127.0.0.1:9464", ":9464" for all addresses of the host, or off`}},
		"a port that is none":     {"metrics: {listen: ':http'}\n", []string{`outbox-relay.yaml:1: metrics.listen: ":http" is not an address; write host and port such as "127.0.0.1:9464", ":9464" for all addresses of the host, or off`}},
		"an address with a name":  {"metrics: {listen: 'relay.internal:9464'}\n", []string{`outbox-relay.yaml:1: metrics.listen: "relay.internal:9464" names a host; write an IP address of this machine`}},

		// Types.
		"a section that is a text":  {"log: info\n", []string{`outbox-relay.yaml:1: log: is not a section; write its settings on the lines below it, indented`}},
		"a section that is a list":  {"destinations:\n- a\n", []string{`outbox-relay.yaml:1: destinations: is not a section; write its settings on the lines below it, indented`}},
		"a list that is a section":  {"routes: {event: a}\n", []string{`outbox-relay.yaml:1: routes: is not a list; write entries that begin with "- "`}},
		"a list that is a value":    {"routes:\n- {event: a, to: default}\n", []string{`outbox-relay.yaml:2: routes[0].to: is not a list; write one such as [logistics]`}},
		"a value that is a list":    {"log: {level: [info]}\n", []string{`outbox-relay.yaml:1: log.level: is not a single value; write one such as info`}},
		"a value that is a section": {"relay: {lease: {seconds: 5}}\n", []string{`outbox-relay.yaml:1: relay.lease: is not a single value; write one such as 60s`}},
		"an item that is a list":    {"defaults: {retry: {schedule: [[5s]]}}\n", []string{`outbox-relay.yaml:1: defaults.retry.schedule[0]: is not a single value`}},
		"a value left out":          {"relay:\n  lease:\n  name: x\n", []string{`outbox-relay.yaml:2: relay.lease: has no value; write one such as 60s, or remove the key`}},
		"an item left out":          {"defaults:\n  retry:\n    schedule:\n    - 5s\n    -\n", []string{`outbox-relay.yaml:5: defaults.retry.schedule[1]: has no value`}},
		"a word for a number":       {"relay: {max_in_flight: ten}\n", []string{`outbox-relay.yaml:1: relay.max_in_flight: "ten" is not a whole number`}},
		"a fraction for a number":   {"relay: {max_in_flight: 1.5}\n", []string{`outbox-relay.yaml:1: relay.max_in_flight: "1.5" is not a whole number`}},
		"a number beyond":           {"relay: {max_in_flight: 99999999999}\n", []string{`outbox-relay.yaml:1: relay.max_in_flight: "99999999999" is not a whole number`}},
		"zero for a number":         {"relay: {max_in_flight: 0}\n", []string{`outbox-relay.yaml:1: relay.max_in_flight: "0" is too small; write 1 or more`}},
		"a negative number":         {"defaults: {max_in_flight: -1}\n", []string{`outbox-relay.yaml:1: defaults.max_in_flight: "-1" is too small; write 1 or more`}},
		"too large a number":        {"relay: {max_in_flight: 1000000}\n", []string{`outbox-relay.yaml:1: relay.max_in_flight: 1000000 is out of range; write 1 to 100000`}},
		"yes for true":              {"relay: {log_delivered: yes}\n", []string{`outbox-relay.yaml:1: relay.log_delivered: "yes" is neither true nor false`}},
		"a control character":       {"relay: {name: \"a\\nb\"}\n", []string{`outbox-relay.yaml:1: relay.name: contains a control character, such as a line break`}},

		// Durations.
		"no unit":            {"\nrelay:\n\n  lease: 30\n", []string{`outbox-relay.yaml:4: relay.lease: "30" has no unit; write "30s"`}},
		"no unit, as a text": {"relay: {lease: '30'}\n", []string{`outbox-relay.yaml:1: relay.lease: "30" has no unit; write "30s"`}},
		"a blank":            {"relay: {lease: 60 s}\n", []string{`outbox-relay.yaml:1: relay.lease: "60 s" is not a duration; write "60s"`}},
		"an upper-case unit": {"relay: {lease: 60S}\n", []string{`outbox-relay.yaml:1: relay.lease: "60S" is not a duration; write "60s"`}},
		"days":               {"defaults: {retry: {schedule: [5s, 3d]}}\n", []string{`outbox-relay.yaml:1: defaults.retry.schedule[1]: "3d" uses a unit longer than hours; write "72h"`}},
		"weeks":              {"defaults: {retry: {retry_after_max: 2w}}\n", []string{`outbox-relay.yaml:1: defaults.retry.retry_after_max: "2w" uses a unit longer than hours; write "336h"`}},
		"for ever":           {"relay: {lease: ∞}\n", []string{`outbox-relay.yaml:1: relay.lease: "∞" is not a duration; write one such as "5s", "15m" or "24h"`}},
		"an empty text":      {"relay: {lease: ''}\n", []string{`outbox-relay.yaml:1: relay.lease: is empty; write a duration such as "5s"`}},
		"zero":               {"relay: {lease: 0s}\n", []string{`outbox-relay.yaml:1: relay.lease: "0s" is not more than zero; write a duration such as "5s"`}},
		"negative":           {"alerts: {window: -15m}\n", []string{`outbox-relay.yaml:1: alerts.window: "-15m" is not more than zero; write a duration such as "5s"`}},
		"an overflow":        {"relay: {lease: 9999999h}\n", []string{`outbox-relay.yaml:1: relay.lease: "9999999h" is too long; the longest duration is 2562047h`}},
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
		"kept for less than nothing": {"retention: {attempts: -1h}\n", []string{`outbox-relay.yaml:1: retention.attempts: "-1h" is not more than zero; write a duration such as "5s"`}},

		// Retries.
		"an empty schedule":             {"defaults: {retry: {schedule: []}}\n", []string{`outbox-relay.yaml:1: defaults.retry.schedule: is an empty list; write one such as [5s, 30s, 5m], or remove the key`}},
		"a schedule with a wrong delay": {"defaults:\n  retry:\n    schedule:\n    - 5s\n    - 30\n", []string{`outbox-relay.yaml:5: defaults.retry.schedule[1]: "30" has no unit; write "30s"`}},
		"a schedule with a delay beyond": {"defaults:\n  retry:\n    schedule:\n    - 5s\n    - 1000h\n", []string{
			`outbox-relay.yaml:3: defaults.retry.schedule[1]: 1000h0m0s is out of range; write more than 0 and at most 720h0m0s`,
		}},
		"a schedule without end": {"defaults: {retry: {schedule: [" + strings.Repeat("5s,", 101) + "]}}\n", []string{
			`outbox-relay.yaml:1: defaults.retry.schedule: 101 entries are too many; the last one repeats, so write at most 100`,
		}},
		"jitter":            {"defaults: {retry: {jitter: 2}}\n", []string{`outbox-relay.yaml:1: defaults.retry.jitter: 2 is out of range; write 0 to 1`}},
		"jitter of no size": {"defaults: {retry: {jitter: .nan}}\n", []string{`outbox-relay.yaml:1: defaults.retry.jitter: ".nan" is not a number; write one from 0 to 1`}},
		"a not_after before the last attempt": {"defaults:\n  retry:\n    not_after: 100h\n", []string{
			`outbox-relay.yaml:3: defaults.retry.not_after: 100h0m0s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (168h9m20s), so that deliveries would fail before their last attempt; write 169h or more, or shorten those`,
		}},
		"a schedule beyond the default not_after": {"defaults: {retry: {max_attempts: 1000}}\n", []string{
			`defaults.retry.not_after: 720h0m0s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (23995h26m40s), so that deliveries would fail before their last attempt; write 23996h or more, or shorten those`,
		}},
		"not_after in days":         {"defaults: {retry: {not_after: 30d}}\n", []string{`outbox-relay.yaml:1: defaults.retry.not_after: "30d" uses a unit longer than hours; write "720h"`}},
		"not_after of nothing":      {"defaults: {retry: {not_after: 0s}}\n", []string{`outbox-relay.yaml:1: defaults.retry.not_after: "0s" is not more than zero; write a duration such as "5s"`}},
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
		"traces": {"traces: {endpoint: 'http://u:hunter2@h:4318', headers: hunter2, sample_ratio: 1.5}\n", []string{
			`outbox-relay.yaml:1: traces.endpoint: holds a user, a query or a fragment; write the URL without it, and credentials into traces.headers`,
			`outbox-relay.yaml:1: traces.headers: is not a list of headers; write name=value, several separated by commas, such as "Authorization=Bearer%20…"`,
			`outbox-relay.yaml:1: traces.sample_ratio: "1.5" is out of range; write a number from 0 to 1`,
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
		"a level misspelled":           {"log: {level: inof}\n", []string{`outbox-relay.yaml:1: log.level: "inof" is not known; did you mean "info"?`}},
		"a format that does not exist": {"log: {format: logfmt}\n", []string{`outbox-relay.yaml:1: log.format: "logfmt" is not known; write one of auto, json, console`}},
		"an unknown pooler":            {"database: {pooler: session}\n", []string{`outbox-relay.yaml:1: database.pooler: "session" is not known; write one of auto, none, transaction`}},
		"a pooler with a typo":         {"database: {pooler: transactions}\n", []string{`outbox-relay.yaml:1: database.pooler: "transactions" is not known; did you mean "transaction"?`}},
		"a listen_url of another kind": {"database: {listen_url: mysql://u:hunter2@h/db}\n", []string{`outbox-relay.yaml:1: database.listen_url: begins with another scheme than postgres://; write one such as postgres://user:password@localhost:5432/app`}},
		"a schema of PostgreSQL":       {"database: {schema: pg_catalog}\n", []string{`outbox-relay.yaml:1: database.schema: "pg_catalog" belongs to PostgreSQL itself`}},
		"a schema too long":            {"database: {schema: " + strings.Repeat("x", 64) + "}\n", []string{`outbox-relay.yaml:1: database.schema: is longer than 63 bytes, which PostgreSQL would cut off`}},

		// References.
		"an unset variable": {"relay:\n  name: ${POD}\n", []string{`outbox-relay.yaml:2: relay.name: ${POD} is not set; set POD, or write ${POD:-default}`}},
		"an empty variable": {"relay:\n  name: a-${EMPTY}\n", []string{`outbox-relay.yaml:2: relay.name: ${EMPTY} is empty; write ${EMPTY:-} if that is meant`}},
		"an open reference": {"relay:\n  name: ${POD\n", []string{`outbox-relay.yaml:2: relay.name: has "${" without "}"; write $$ for a dollar sign`}},
		"no reference":      {"relay:\n  name: ${a b}\n", []string{`outbox-relay.yaml:2: relay.name: has a ${…} that names no variable; write ${NAME}, or $$ for a dollar sign`}},
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
	empty := writeFile(t, filepath.Join(dir, "empty"), "\n")
	secretFile := writeFile(t, filepath.Join(dir, "secret"), goodSecret+"\n")
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
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
		"no unit":               {env: []string{"OUTBOX_LEASE=30"}, want: []string{`env OUTBOX_LEASE: "30" has no unit; write "30s"`}},
		"too short":             {env: []string{"OUTBOX_LEASE=10s"}, want: []string{`env OUTBOX_LEASE: 10s must be at least 5s longer than destinations.default.timeout (10s); write 15s or more, or lower the timeout`}},
		"empty":                 {env: []string{"OUTBOX_LEASE="}, want: []string{`env OUTBOX_LEASE: is set but empty; unset it or give it a value`}},
		"an empty destination":  {env: []string{"OUTBOX_DESTINATION_URL="}, want: []string{`env OUTBOX_DESTINATION_URL: is set but empty; unset it or give it a value`}},
		"an empty secret":       {env: []string{"OUTBOX_SIGNING_SECRET="}, want: []string{`env OUTBOX_SIGNING_SECRET: is set but empty; unset it or give it a value`}},
		"a wrong list":          {env: []string{"OUTBOX_RETRY_SCHEDULE=5s,,30"}, want: []string{`env OUTBOX_RETRY_SCHEDULE: entry 2: is empty; write a duration such as "5s"`, `env OUTBOX_RETRY_SCHEDULE: entry 3: "30" has no unit; write "30s"`}},
		"a wrong second secret": {env: []string{"OUTBOX_SIGNING_SECRET=" + goodSecret + ",hunter2"}, want: []string{`env OUTBOX_SIGNING_SECRET: entry 2: a signing secret starts with "whsec_"; make one with: echo "whsec_$(openssl rand -base64 32)"`}},
		"a wrong URL":           {env: []string{"OUTBOX_DESTINATION_URL=https://h/#hunter2"}, want: []string{`env OUTBOX_DESTINATION_URL: contains a fragment (#…), which is never sent; remove it`}},
		"a wrong level":         {env: []string{"OUTBOX_LOG_LEVEL=warning"}, want: []string{`env OUTBOX_LOG_LEVEL: "warning" is not known; did you mean "warn"?`}},
		"a wrong channel":       {env: []string{"OUTBOX_SLACK_WEBHOOK_URL=hunter2"}, want: []string{`env OUTBOX_SLACK_WEBHOOK_URL: is not a URL that starts with https:// or http://`}},
		"a secret that signs nothing": {
			env: []string{"-", twoSettings[0], "OUTBOX_SIGNING_SECRET=" + goodSecret}, file: "destinations: {a: {url: 'http://a'}}\n",
			want: []string{`env OUTBOX_SIGNING_SECRET: signs only the destination "default", and there is none; write signing_secrets: ["${OUTBOX_SIGNING_SECRET}"] for each destination`},
		},

		"both a value and a file": {env: []string{"OUTBOX_SIGNING_SECRET=" + goodSecret, "OUTBOX_SIGNING_SECRET_FILE=" + secretFile}, want: []string{`env OUTBOX_SIGNING_SECRET: is set, and so is OUTBOX_SIGNING_SECRET_FILE; unset one of them`}},
		"a file that is missing":  {env: []string{"OUTBOX_SIGNING_SECRET_FILE=DIR/none"}, want: []string{`env OUTBOX_SIGNING_SECRET_FILE: cannot read DIR/none: no such file or directory`}},
		"a file without name":     {env: []string{"OUTBOX_SIGNING_SECRET_FILE="}, want: []string{`env OUTBOX_SIGNING_SECRET_FILE: is set but empty; unset it or name a file`}},
		"a file that is empty":    {env: []string{"OUTBOX_SIGNING_SECRET_FILE=" + empty}, want: []string{`env OUTBOX_SIGNING_SECRET_FILE: DIR/empty is empty`}},
		"a directory":             {env: []string{"OUTBOX_SIGNING_SECRET_FILE=DIR"}, want: []string{`env OUTBOX_SIGNING_SECRET_FILE: cannot read DIR: it is a directory`}},
		"a FIFO":                  {env: []string{"OUTBOX_SIGNING_SECRET_FILE=" + fifo}, want: []string{`env OUTBOX_SIGNING_SECRET_FILE: cannot read DIR/fifo: it is not a regular file`}},
		"a reference to what is broken": {
			env: []string{"OUTBOX_SLACK_WEBHOOK_URL_FILE=DIR/none"}, file: "alerts: {channels: [{slack: '${OUTBOX_SLACK_WEBHOOK_URL}'}]}\n",
			want: []string{
				`outbox-relay.yaml:1: alerts.channels[0].slack: ${OUTBOX_SLACK_WEBHOOK_URL} has a problem of its own`,
				`env OUTBOX_SLACK_WEBHOOK_URL_FILE: cannot read DIR/none: no such file or directory`,
			},
		},

		"a configuration that is missing":     {env: []string{"OUTBOX_CONFIG=DIR/none.yaml"}, want: []string{`env OUTBOX_CONFIG: cannot read DIR/none.yaml: no such file or directory`}},
		"a configuration without name":        {env: []string{"OUTBOX_CONFIG="}, want: []string{`env OUTBOX_CONFIG: is empty; name a file, or leave it out`}},
		"a configuration that is a FIFO":      {flags: []string{"--config=" + fifo}, want: []string{`flag --config: cannot read DIR/fifo: it is not a regular file`}},
		"a configuration that never ends":     {flags: []string{"--config=/dev/zero"}, want: []string{`flag --config: cannot read /dev/zero: it is not a regular file`}},
		"a configuration that is a directory": {flags: []string{"-c", dir}, want: []string{`flag --config: cannot read DIR: it is a directory`}},

		"a flag":          {flags: []string{"--lease", "30"}, want: []string{`flag --lease: "30" has no unit; write "30s"`}},
		"an empty flag":   {flags: []string{"--name="}, want: []string{`flag --name: is empty`}},
		"a flag's number": {flags: []string{"--max-in-flight=0"}, want: []string{`flag --max-in-flight: "0" is too small; write 1 or more`}},
		"all sources at once": {
			file: "relay: {poll_interval: 5}\nlog: {level: loud}\n", env: []string{"OUTBOX_TIMEOUT=5", "OUTBOX_MAX_ATTEMPTS=x"}, flags: []string{"--drain-timeout=1"},
			want: []string{
				`outbox-relay.yaml:1: relay.poll_interval: "5" has no unit; write "5s"`,
				`outbox-relay.yaml:2: log.level: "loud" is not known; write one of debug, info, warn, error`,
				`env OUTBOX_MAX_ATTEMPTS: "x" is not a whole number`,
				`env OUTBOX_TIMEOUT: "5" has no unit; write "5s"`,
				`flag --drain-timeout: "1" has no unit; write "1s"`,
			},
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
			file: "destinations: {a: {url: 'http://a'}, b: {url: 'http://b'}}\n", env: []string{"-", twoSettings[0], "OUTBOX_MAX_ATTEMPTS=2000"},
			want: []string{`env OUTBOX_MAX_ATTEMPTS: 2000 is out of range; write 1 to 1000`},
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
