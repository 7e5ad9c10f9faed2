package config

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
)

// A user's credentials as nsc writes them, of an account that exists nowhere.
const (
	natsJWT  = "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.eyJuYW1lIjoidGVzdCJ9.c2lnbmF0dXJl"
	natsSeed = "SUADAMJSGM2DKNRXHA4TAMJSGM2DKNRXHA4TAMJSGM2DKNRXHA4TAMMLDU"
	natsFile = "-----BEGIN NATS USER JWT-----\n" + natsJWT + "\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n" + natsSeed + "\n------END USER NKEY SEED------\n"
)

func TestNATSMistakes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "creds"), natsFile)
	writeFile(t, filepath.Join(dir, "nk"), natsSeed+"\n")
	writeFile(t, filepath.Join(dir, "text"), "hunter2\n")
	const usable = "url: 'nats://a', subject: 'outbox.{type}', stream: EVENTS"
	for settings, want := range map[string]string{
		usable: "",
		"url: 'tls://a:4222,tls://b', subject: 'outbox.{destination}.{type}', stream: EVENTS, tls: {server_name: a}": "",
		usable + ", credentials_file: DIR/creds":                                                         "",
		usable + ", nkey_file: DIR/nk, inbox_prefix: _INBOX_a.b, headers: {X-Tenant: a}, proxy: none":    "",
		usable + ", format: cloudevents, cloudevents_source: /a, basic_auth: {username: u, password: p}": "",
		"url: 'kafak://a'":                                          `url: scheme "kafak" is not supported; it may be http:// or https://, nats:// or tls:// (NATS), kafka:// or kafka+ssl:// (Kafka): write one such as https://logistics.internal/webhooks/finance`,
		"url: 'nats:a', subject: s, stream: s":                      "url: names no server; write one such as nats://nats.internal",
		"url: 'nats://', subject: s, stream: s":                     "url: names a server that cannot be used: has no host; write host:port",
		"url: 'nats://u:hunter2@a', subject: s, stream: s":          "url: contains user info; move it to basic_auth, bearer_token, credentials_file or nkey_file",
		"url: 'nats://a,tls://b', subject: s, stream: s":            "url: names servers with another scheme than the first; write one scheme, and a comma between servers",
		"url: 'nats://a/b', subject: s, stream: s":                  "url: has something behind the servers, which would be ignored; remove it",
		"url: 'nats://a,169.254.169.254', subject: s, stream: s":    "url: names a server that cannot be used: address 169.254.169.254 is never dialled: it is link-local, a cloud's metadata service, or otherwise not a host's own",
		"url: 'nats://a:99999', subject: s, stream: s":              "url: names a server that cannot be used: port 99999 is out of range; write 1 to 65535",
		"url: 'nats://a', stream: s":                                `subject: is not set; write one such as "outbox.{type}"`,
		"url: 'nats://a', subject: 'a.{tpye}', stream: s":           `subject: "a.{tpye}" holds a { that begins neither {type}, {destination} nor {partition}; write one such as "outbox.{type}"`,
		"url: 'nats://a', subject: 'a.>', stream: s":                `subject: "a.>" holds a wildcard, '*' or '>'; write one such as "outbox.{type}"`,
		"url: 'nats://a', subject: '$JS.{type}', stream: s":         `subject: "$JS.{type}" begins with a sign of the server's own subjects, '$' or '_'; write one such as "outbox.{type}"`,
		"url: 'nats://a', subject: 'a b', stream: s":                `subject: "a b" holds a blank or a character beyond printable ASCII; write one such as "outbox.{type}"`,
		"url: 'nats://a', subject: 'a..b', stream: s":               `subject: "a..b" has an empty word between its dots; write one such as "outbox.{type}"`,
		"url: 'nats://a', subject: s":                               "stream: is not set; write the name of the stream that stores the events",
		"url: 'nats://a', subject: s, stream: a.b":                  `stream: "a.b" is not the name of a stream: it holds a blank, '.', '*', '>' or a slash`,
		usable + ", inbox_prefix: 'a.>'":                            `inbox_prefix: "a.>" is not usable; write words of letters, digits, '-' and '_' with dots between them`,
		usable + ", credentials_file: DIR/none":                     "credentials_file: cannot read DIR/none: no such file or directory",
		usable + ", credentials_file: DIR/text":                     "credentials_file: DIR/text holds no user's JWT (-----BEGIN NATS USER JWT-----); write it with: nsc generate creds",
		usable + ", nkey_file: DIR/text":                            "nkey_file: DIR/text holds no seed of a user's NKey, which begins with SU; write one with: nsc generate nkey --user",
		usable + ", credentials_file: DIR/creds, nkey_file: DIR/nk": "nkey_file: is set beside credentials_file, and a connection can have one identity; remove one of them",
		usable + ", credentials_file: DIR/creds, bearer_token: x":   "credentials_file: is set beside basic_auth or bearer_token, and a connection can have one identity; remove one of them",
		usable + ", headers: {authorization: hunter2}":              "headers.authorization: does not identify the relay to NATS; write credentials_file, nkey_file, basic_auth or bearer_token",
		usable + ", headers: {nats-rollup: all}":                    "headers.nats-rollup: is a command to the server; remove it",
		usable + ", proxy: 'http://p:1'":                            "proxy: has no effect: NATS is not reached through a proxy of HTTP; remove it",
		usable + ", responses: {fail: [404]}":                       "responses.fail: has no effect: NATS answers without a status code of HTTP; remove it",
		usable + ", excerpts: text":                                 "excerpts: has no effect: NATS and Kafka answer without a body; remove it",
		usable + ", tls: {server_name: a}":                          "tls.server_name: has no effect, as the url begins with nats://; write tls://, or remove tls",
		"url: 'http://a', subject: s":                               "subject: is for destinations of NATS, whose url begins with nats:// or tls://; remove it",
		"url: 'http://a', credentials_file: DIR/creds":              "credentials_file: is for destinations of NATS, whose url begins with nats:// or tls://; remove it",
	} {
		t.Run(settings, func(t *testing.T) {
			t.Parallel()
			file := "defaults: {responses: {fail: [404]}, excerpts: text, tls: {min_version: \"1.3\"}}\ndestinations:\n  a: {" + strings.ReplaceAll(settings, "DIR", dir) + "}\n"
			r := check(t, file, twoSettings[:1])
			r.stderr = strings.ReplaceAll(r.stderr, dir, "DIR")
			switch {
			case want == "" && r.code != 0:
				t.Errorf("exit code %d\n%s", r.code, r.stderr)
			case want != "":
				r.expect(t, cli.ExitConfig, "", mistakes("outbox-relay.yaml:3: destinations.a."+want))
			}
			if strings.Contains(r.stderr, "hunter2") {
				t.Error("the secret is repeated")
			}
		})
	}
	for file, want := range map[string]string{
		"egress: {proxy: 'http://p:1'}\ndestinations: {a: {" + usable + "}}":                              "destinations.a.proxy: is not none, although egress.proxy names a proxy through which NATS is not reached; write proxy: none to connect directly",
		"egress: {allow_private: []}\ndestinations: {a: {url: 'nats://10.1.2.3', subject: s, stream: s}}": "destinations.a.url: names a server that cannot be used: address 10.1.2.3 is private and not within egress.allow_private",
	} {
		if r := check(t, file+"\n", twoSettings[:1]); r.code != cli.ExitConfig || !strings.Contains(r.stderr, ": "+want+"\n") {
			t.Errorf("%s: exit code %d\n%s", file, r.code, r.stderr)
		}
	}
	r := check(t, "destinations: {a: {url: 'http://a'}}\n", append(twoSettings[:1:1], "OUTBOX_DESTINATION_STREAM=EVENTS"))
	r.expect(t, cli.ExitConfig, "", mistakes(`env OUTBOX_DESTINATION_STREAM: is that of the destination "default", and there is none; write stream for each destination that needs it`))
}
