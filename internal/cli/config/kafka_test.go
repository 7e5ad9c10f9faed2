package config

import (
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
)

func TestKafkaMistakes(t *testing.T) {
	t.Parallel()
	const usable = "url: 'kafka://a', topic: invoices"
	for settings, want := range map[string]string{
		usable: "",
		"url: 'kafka+ssl://a:9093,b', topic: 'outbox.{type}', tls: {server_name: a}": "",
		usable + ", key: idempotency_key, headers: {X-Tenant: a}, proxy: none":       "",
		usable + ", basic_auth: {username: u, password: p}, sasl: scram-sha-512":     "",
		usable + ", bearer_token: x, format: cloudevents, cloudevents_source: /a":    "",
		"url: 'kafka://a'":                                        `topic: is not set; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a', topic: 'a.{tpye}'":                     `topic: "a.{tpye}" holds a { that begins neither {type} nor {destination}; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a', topic: 'a b'":                          `topic: "a b" is not 1 to 249 letters, digits, '.', '_' and '-'; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a,,b', topic: a":                           "url: names a server that cannot be used: has no host; write host:port",
		usable + ", key: event_type":                              `key: "event_type" is not known; write one of ordering_key, idempotency_key`,
		"url: 'kafka://a', topic: '..'":                           `topic: ".." is not a name of a topic; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://a', topic: " + strings.Repeat("a", 250):    `topic: "` + strings.Repeat("a", 250) + `" is not 1 to 249 letters, digits, '.', '_' and '-'; write one such as "invoices" or "outbox.{type}"`,
		"url: 'kafka://', topic: a":                               "url: names a server that cannot be used: has no host; write host:port",
		"url: 'kafka+ssl:a', topic: a":                            "url: names no server; write one such as kafka+ssl://kafka.internal",
		"url: 'kafka://u:hunter2@a', topic: a":                    "url: contains user info; move it to basic_auth, bearer_token, credentials_file or nkey_file",
		usable + ", basic_auth: {username: u, password: hunter2}": "sasl: is not set beside basic_auth; write plain, scram-sha-256 or scram-sha-512, as the brokers have it",
		usable + ", bearer_token: hunter2, sasl: plain":           "sasl: has no effect on bearer_token, which is sent by the mechanism oauthbearer; remove it",
		usable + ", sasl: plain":                                  `sasl: is set without basic_auth; write {username: …, password: "${…}"} there`,
		usable + ", sasl: gssapi":                                 `sasl: "gssapi" is not known; write one of plain, scram-sha-256, scram-sha-512`,
		usable + ", subject: x":                                   "subject: is for destinations of NATS, whose url begins with nats:// or tls://; remove it",
		"url: 'nats://a', subject: s, stream: s, topic: a":        "topic: is for destinations of Kafka, whose url begins with kafka:// or kafka+ssl://; remove it",
		"url: 'nats://a', subject: 's.{partition}', stream: s":    "partitions: is not set, and the subject holds {partition}; write as many as readers shall work at once, such as 16",
		"url: 'nats://a', subject: s, stream: s, partitions: 16":  "partitions: has no effect: the subject holds no {partition}",
		"url: 'http://a', topic: a":                               "topic: is for destinations of Kafka, whose url begins with kafka:// or kafka+ssl://; remove it",
		usable + ", headers: {authorization: hunter2}":            "headers.authorization: does not identify the relay to Kafka; write basic_auth or bearer_token",
		usable + ", tls: {server_name: a}":                        "tls.server_name: has no effect, as the url begins with kafka://; write kafka+ssl://, or remove tls",
	} {
		t.Run(settings, func(t *testing.T) {
			t.Parallel()
			r := check(t, "destinations:\n  a: {"+settings+"}\n", twoSettings[:1])
			switch {
			case want == "" && r.code != 0:
				t.Errorf("exit code %d\n%s", r.code, r.stderr)
			case want != "":
				r.expect(t, cli.ExitConfig, "", mistakes("outbox-relay.yaml:2: destinations.a."+want))
			}
			if strings.Contains(r.stderr, "hunter2") {
				t.Error("the secret is repeated")
			}
		})
	}
}
