package kafkatest

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

const relayProgram = "../../bin/outbox-relay"

// Each row of the first table in docs/kafka.md.
func TestMistakesInSettings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	none, empty := filepath.Join(dir, "none"), filepath.Join(dir, "empty")
	must(t, os.WriteFile(empty, nil, 0o600))
	const usable = "url: 'kafka://a', topic: invoices"
	address, _ := start(t, "")
	password := func(file string) string {
		return usable + ", sasl: plain, basic_auth: {username: u, password_file: " + file + "}"
	}
	relaytest.CheckMistakes(t, relayProgram, "url: 'kafka://"+address+"', topic: "+topic, map[string]relaytest.Unready{
		"scheme":            {Settings: "url: 'kafka+tls://a'", Mistake: `url: scheme "kafka+tls" is not supported; it may be http://`},
		"no brokers":        {Settings: "url: 'kafka://', topic: a", Mistake: "url: names a server that cannot be used: has no host"},
		"an empty broker":   {Settings: "url: 'kafka://a,,b', topic: a", Mistake: "url: names a server that cannot be used: has no host"},
		"a password in it":  {Settings: "url: 'kafka://u:p@a', topic: a", Mistake: "url: contains user info; move it to basic_auth"},
		"no topic":          {Settings: "url: 'kafka://a'", Mistake: "topic: is not set"},
		"sign in a topic":   {Settings: "url: 'kafka://a', topic: a b", Mistake: `topic: "a b" is not 1 to 249 letters`},
		"dots":              {Settings: "url: 'kafka://a', topic: '..'", Mistake: `topic: ".." is not a name of a topic`},
		"a long topic":      {Settings: "url: 'kafka://a', topic: " + strings.Repeat("a", 250), Mistake: `topic: "` + strings.Repeat("a", 250) + `" is not 1 to 249 letters`},
		"a subject":         {Settings: usable + ", subject: s", Mistake: "subject: is for destinations of NATS"},
		"key":               {Settings: usable + ", key: event_type", Mistake: `key: "event_type" is not known; write one of ordering_key, idempotency_key`},
		"no sasl":           {Settings: usable + ", basic_auth: {username: u, password: p}", Mistake: "sasl: is not set beside basic_auth; write plain, scram-sha-256 or scram-sha-512"},
		"sasl alone":        {Settings: usable + ", sasl: plain", Mistake: "sasl: is set without basic_auth"},
		"sasl unknown":      {Settings: usable + ", sasl: gssapi", Mistake: `sasl: "gssapi" is not known; write one of plain, scram-sha-256, scram-sha-512`},
		"password missing":  {Settings: password(none), Mistake: "basic_auth.password_file: cannot read " + none + ": no such file or directory"},
		"password empty":    {Settings: password(empty), Mistake: "basic_auth.password_file: " + empty + " is empty"},
		"password a dir":    {Settings: password(dir), Mistake: "basic_auth.password_file: cannot read " + dir + ": it is a directory"},
		"tls settings":      {Settings: usable + ", tls: {server_name: a}", Mistake: "tls.server_name: has no effect, as the url begins with kafka://; write kafka+ssl://"},
		"authority missing": {Settings: "url: 'kafka+ssl://a', topic: a, tls: {ca_file: " + none + "}", Mistake: "tls.ca_file: cannot read " + none},
	})
}

// client returns one that is not the relay's.
func client(t *testing.T, address string, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append(options, kgo.SeedBrokers(address))...)
	must(t, err)
	t.Cleanup(c.Close)
	return c
}

// keysIn returns the idempotency keys that a topic holds, once there are six.
func keysIn(t *testing.T, address, topic string, options ...kgo.Opt) (keys []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), relaytest.Patience)
	defer cancel()
	c := client(t, address, append(options, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	for found := map[string]bool{}; len(found) < 6; {
		fetched := c.PollFetches(ctx)
		if ctx.Err() != nil {
			return keys
		}
		fetched.EachRecord(func(r *kgo.Record) {
			for _, h := range r.Headers {
				if h.Key == "X-Idempotency-Key" {
					found[string(h.Value)] = true
					keys = append(keys, string(h.Value))
				}
			}
		})
	}
	return keys
}

func createTopic(t *testing.T, c *kgo.Client, name string) {
	t.Helper()
	createTopicWith(t, c, name, "cleanup.policy", "delete")
}

// createTopicWith creates a topic with a setting.
func createTopicWith(t *testing.T, c *kgo.Client, name, setting, value string) {
	t.Helper()
	request := kmsg.NewPtrCreateTopicsRequest()
	wanted := kmsg.NewCreateTopicsRequestTopic()
	wanted.Topic, wanted.NumPartitions, wanted.ReplicationFactor = name, 4, 1
	own := kmsg.NewCreateTopicsRequestTopicConfig()
	own.Name, own.Value = setting, kmsg.StringPtr(value)
	wanted.Configs = append(wanted.Configs, own)
	request.Topics = append(request.Topics, wanted)
	answer, err := request.RequestWith(t.Context(), c)
	must(t, err)
	must(t, kerr.ErrorForCode(answer.Topics[0].ErrorCode))
}

func alterTopic(t *testing.T, c *kgo.Client, name, setting, value string) {
	t.Helper()
	request := kmsg.NewPtrIncrementalAlterConfigsRequest()
	resource := kmsg.NewIncrementalAlterConfigsRequestResource()
	resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, name
	change := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
	change.Name, change.Value = setting, kmsg.StringPtr(value)
	resource.Configs = append(resource.Configs, change)
	request.Resources = append(request.Resources, resource)
	answer, err := request.RequestWith(t.Context(), c)
	must(t, err)
	must(t, kerr.ErrorForCode(answer.Resources[0].ErrorCode))
}

// allowWriting gives the relay's user the right to write to a topic.
func allowWriting(t *testing.T, c *kgo.Client, name string) {
	t.Helper()
	request := kmsg.NewPtrCreateACLsRequest()
	right := kmsg.NewCreateACLsRequestCreation()
	right.ResourceType, right.ResourceName, right.ResourcePatternType = kmsg.ACLResourceTypeTopic, name, kmsg.ACLResourcePatternTypeLiteral
	right.Principal, right.Host, right.Operation, right.PermissionType = "User:relay", "*", kmsg.ACLOperationWrite, kmsg.ACLPermissionTypeAllow
	request.Creations = append(request.Creations, right)
	answer, err := request.RequestWith(t.Context(), c)
	must(t, err)
	must(t, kerr.ErrorForCode(answer.Results[0].ErrorCode))
}

// Each row of the second table in docs/kafka.md: a relay reports it when it starts, goes on with other destinations, and loses nothing.
func TestUnreadyDestinations(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	to := func(address, topic string) string { return "url: 'kafka://" + address + "', topic: " + topic }
	good, _ := start(t, "")
	owner := client(t, good)
	createTopicWith(t, owner, "small", "max.message.bytes", "3000")
	rows := map[string]relaytest.Unready{
		"missing": {
			Settings: to(good, "missing"), Problem: `there is no topic "missing", or the user may not see it; create it`,
			Mend: func() string { createTopic(t, owner, "missing"); return "" }, Stored: func() []string { return keysIn(t, good, "missing") },
		},
		"small": {
			Settings: to(good, "small"), Warning: "at most 3000 bytes, and an event may have 1048576", Refused: "raise its max.message.bytes",
			Mend:   func() string { alterTopic(t, owner, "small", "max.message.bytes", "2000000"); return "" },
			Stored: func() []string { return keysIn(t, good, "small") },
		},
	}
	dead := freeAddress(t)
	rows["dead"] = relaytest.Unready{
		Settings: to(dead, topic), Problem: "connection refused", Mend: func() string { startAt(t, dead, ""); return "" },
		Stored: func() []string { return keysIn(t, dead, topic) },
	}
	guarded, _ := start(t, "acl")
	root := kgo.SASL(plain.Auth{User: "root", Pass: "r"}.AsMechanism())
	rows["no-right"] = relaytest.Unready{
		Settings: to(guarded, topic) + ", sasl: plain, basic_auth: {username: relay, password: right}", Problem: `allow the user to write to topic "invoices"`,
		Mend: func() string { allowWriting(t, client(t, guarded, root), topic); return "" }, Stored: func() []string { return keysIn(t, guarded, topic, root) },
	}
	password := write("password", "wrong")
	login, _ := start(t, "sasl")
	rows["password"] = relaytest.Unready{
		Settings: to(login, topic) + ", sasl: scram-sha-256, basic_auth: {username: relay, password_file: " + password + "}",
		Problem:  "the broker closed the connection while the relay logged in: correct basic_auth", Mend: func() string { write("password", "right"); return "" },
		Stored: func() []string {
			return keysIn(t, login, topic, kgo.SASL(plain.Auth{User: "relay", Pass: "right"}.AsMechanism()))
		},
	}
	secure, _ := start(t, "tls")
	conn, err := tls.Dial("tcp", secure, &tls.Config{InsecureSkipVerify: true})
	must(t, err)
	certificate := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: conn.ConnectionState().PeerCertificates[0].Raw}))
	must(t, conn.Close())
	other := selfSigned()
	authority := write("ca", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other.Certificate[0]})))
	overTLS := kgo.DialTLSConfig(&tls.Config{InsecureSkipVerify: true})
	rows["authority"] = relaytest.Unready{
		Settings: fmt.Sprintf("url: 'kafka+ssl://%s', topic: %s, tls: {ca_file: %s}", secure, topic, authority), Problem: "set tls.ca_file to the authority's certificate",
		Mend: func() string { write("ca", certificate); return "" }, Stored: func() []string { return keysIn(t, secure, topic, overTLS) },
	}
	// Those below are mended by the settings of a broker that works.
	replicas, _ := start(t, "replicas")
	refuses, _ := start(t, "refuses")
	for name, row := range map[string]relaytest.Unready{
		"needs-tls":   {Settings: to(secure, topic), Problem: "the broker closed the connection at once: it may want TLS, kafka+ssl://"},
		"no-tls":      {Settings: "url: 'kafka+ssl://" + good + "', topic: " + topic, Problem: "the broker speaks no TLS at this port: write kafka://"},
		"no-replicas": {Settings: to(replicas, topic), Attempt: "too few replicas are in sync"},
		"unknown":     {Settings: to("kafka.invalid", topic), Problem: "no such host"},
		"refused":     {Settings: to(refuses, topic) + ", sasl: plain, basic_auth: {username: relay, password: right}", Problem: "the brokers refuse the relay's user; correct basic_auth"},
	} {
		createTopic(t, owner, name)
		row.Mend = func() string { return to(good, name) }
		row.Stored = func() []string { return keysIn(t, good, name) }
		rows[name] = row
	}
	relaytest.CheckUnready(t, relayProgram, to(good, topic), rows)
}
