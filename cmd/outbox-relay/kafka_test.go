package main

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/localkafka"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

const topic = localkafka.Topic

// programFile returns the path of a script that runs the test binary as the program.
func programFile(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	pgtest.Must(t, err)
	path := filepath.Join(t.TempDir(), "outbox-relay")
	pgtest.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+asProgram+"=1 exec '"+self+"' \"$@\"\n"), 0o700))
	return path
}

// keysIn returns the idempotency keys that a topic holds, once there are six.
func keysIn(t *testing.T, address, topic string, options ...kgo.Opt) (keys []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), relaytest.Patience)
	defer cancel()
	c := localkafka.Client(t, address, append(options, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
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
	pgtest.Must(t, err)
	pgtest.Must(t, kerr.ErrorForCode(answer.Resources[0].ErrorCode))
}

// Each row of the second table in docs/kafka.md: a relay reports it when it starts, continues with
// other destinations, and loses nothing.
func TestKafkaUnreadyDestinations(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		pgtest.Must(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	to := func(address, topic string) string {
		return "url: 'kafka://" + address + "', kafka: {topic: " + topic + "}"
	}
	login := func(address, topic, sasl string) string {
		return "url: 'kafka://" + address + "', kafka: {topic: " + topic + ", sasl: " + sasl + "}, basic_auth: "
	}
	good, _ := localkafka.Start(t, "")
	owner := localkafka.Client(t, good)
	localkafka.CreateTopic(t, owner, "small", "max.message.bytes", "3000")
	rows := map[string]relaytest.Unready{
		"missing": {
			Settings: to(good, "missing"), Problem: `there is no topic "missing", or the user may not see it; create it`,
			Fix: func() string { localkafka.CreateTopic(t, owner, "missing", "cleanup.policy", "delete"); return "" }, Stored: func() []string { return keysIn(t, good, "missing") },
		},
		"small": {
			Settings: to(good, "small"), Warning: "at most 3000 bytes, and an event may have 1048576", Refused: "raise its max.message.bytes",
			Fix:    func() string { alterTopic(t, owner, "small", "max.message.bytes", "2000000"); return "" },
			Stored: func() []string { return keysIn(t, good, "small") },
		},
	}
	dead := localkafka.FreeAddress(t)
	rows["dead"] = relaytest.Unready{
		Settings: to(dead, topic), Problem: "connection refused", Fix: func() string { localkafka.StartAt(t, dead, ""); return "" },
		Stored: func() []string { return keysIn(t, dead, topic) },
	}
	guarded, _ := localkafka.Start(t, "acl")
	root := kgo.SASL(plain.Auth{User: "root", Pass: "r"}.AsMechanism())
	rows["no-right"] = relaytest.Unready{
		Settings: login(guarded, topic, "plain") + "{username: relay, password: right}", Problem: `allow the user to write to topic "invoices"`,
		Fix: func() string { localkafka.AllowWriting(t, localkafka.Client(t, guarded, root), topic); return "" }, Stored: func() []string { return keysIn(t, guarded, topic, root) },
	}
	password := write("password", "wrong")
	sasl, _ := localkafka.Start(t, "sasl")
	rows["password"] = relaytest.Unready{
		Settings: login(sasl, topic, "scram-sha-256") + "{username: relay, password_file: " + password + "}",
		Problem:  "the broker closed the connection while the relay logged in: correct basic_auth", Fix: func() string { write("password", "right"); return "" },
		Stored: func() []string {
			return keysIn(t, sasl, topic, kgo.SASL(plain.Auth{User: "relay", Pass: "right"}.AsMechanism()))
		},
	}
	secure, _ := localkafka.Start(t, "tls")
	conn, err := tls.Dial("tcp", secure, &tls.Config{InsecureSkipVerify: true})
	pgtest.Must(t, err)
	certificate := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: conn.ConnectionState().PeerCertificates[0].Raw}))
	pgtest.Must(t, conn.Close())
	other, _ := localcert.PEM(localcert.Authority{}.Issue(nil))
	authority := write("ca", string(other))
	overTLS := kgo.DialTLSConfig(&tls.Config{InsecureSkipVerify: true})
	rows["authority"] = relaytest.Unready{
		Settings: fmt.Sprintf("url: 'kafka+ssl://%s', kafka: {topic: %s}, tls: {ca_file: %s}", secure, topic, authority), Problem: "set tls.ca_file to the authority's certificate",
		Fix: func() string { write("ca", certificate); return "" }, Stored: func() []string { return keysIn(t, secure, topic, overTLS) },
	}
	// The settings of a working broker remedy the problems below.
	replicas, _ := localkafka.Start(t, "replicas")
	refuses, _ := localkafka.Start(t, "refuses")
	for name, row := range map[string]relaytest.Unready{
		"needs-tls":   {Settings: to(secure, topic), Problem: "the broker closed the connection at once: it may want TLS, kafka+ssl://"},
		"no-tls":      {Settings: "url: 'kafka+ssl://" + good + "', kafka: {topic: " + topic + "}", Problem: "the broker speaks no TLS at this port: write kafka://"},
		"no-replicas": {Settings: to(replicas, topic), Attempt: "too few replicas are in sync"},
		"unknown":     {Settings: to("kafka.invalid", topic), Problem: "no such host"},
		"refused":     {Settings: login(refuses, topic, "plain") + "{username: relay, password: right}", Problem: "the brokers refuse the relay's user; correct basic_auth"},
	} {
		localkafka.CreateTopic(t, owner, name, "cleanup.policy", "delete")
		row.Fix = func() string { return to(good, name) }
		row.Stored = func() []string { return keysIn(t, good, name) }
		rows[name] = row
	}
	relaytest.CheckUnready(t, programFile(t), to(good, topic), rows)
}
