package natstest

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const relayProgram = "../../bin/outbox-relay"

// keysIn returns the idempotency keys that a stream holds.
func keysIn(t *testing.T, js jetstream.JetStream, stream string) (keys []string) {
	t.Helper()
	found, err := js.Stream(t.Context(), stream)
	pgtest.Must(t, err)
	for sequence := range found.CachedInfo().State.LastSeq {
		m, err := found.GetMsg(t.Context(), sequence+1)
		pgtest.Must(t, err)
		keys = append(keys, m.Header.Get("X-Idempotency-Key"))
	}
	return keys
}

// unreadyStreams are the rows for whose fixing the owner of the streams is needed.
func unreadyStreams(t *testing.T) (good string, rows map[string]relaytest.Unready) {
	t.Helper()
	s := startServer(t)
	_, js := admin(t, s)
	row := func(name string, u relaytest.Unready, before, after jetstream.StreamConfig) relaytest.Unready {
		u.Settings = fmt.Sprintf("url: 'nats://%s', nats: {stream: %s, subject: '%s.{type}'}", addressOf(s), name, name)
		for _, config := range []*jetstream.StreamConfig{&before, &after} {
			config.Name, config.Storage = name, jetstream.MemoryStorage
			if config.Subjects == nil {
				config.Subjects = []string{name + ".>"}
			}
		}
		if u.Problem == "" || len(before.Subjects) > 1 || before.NoAck {
			_, err := js.CreateStream(t.Context(), before)
			pgtest.Must(t, err)
		}
		u.Fix = func() string {
			_, err := js.CreateOrUpdateStream(t.Context(), after)
			pgtest.Must(t, err)
			return ""
		}
		u.Stored = func() []string { return keysIn(t, js, name) }
		return u
	}
	pgtest.Must(t, create(t, js, "good"))
	return fmt.Sprintf("url: 'nats://%s', nats: {stream: good, subject: 'good.{type}'}", addressOf(s)), map[string]relaytest.Unready{
		"missing": row("missing", relaytest.Unready{Problem: `there is no stream "missing"; create it with the subject "missing.`}, jetstream.StreamConfig{}, jetstream.StreamConfig{}),
		"other-subjects": row("other-subjects", relaytest.Unready{Problem: `the stream "other-subjects" takes "a", "b", and not "other-subjects.`},
			jetstream.StreamConfig{Subjects: []string{"a", "b"}}, jetstream.StreamConfig{}),
		"no-ack": row("no-ack", relaytest.Unready{Problem: `the stream "no-ack" acknowledges nothing (no_ack)`, Attempt: "no acknowledgement of stream"},
			jetstream.StreamConfig{NoAck: true}, jetstream.StreamConfig{}),
		"short-window": row("short-window", relaytest.Unready{Warning: `the stream "short-window" forgets messages after`}, jetstream.StreamConfig{Duplicates: time.Second}, jetstream.StreamConfig{}),
		"small-messages": row("small-messages", relaytest.Unready{Warning: "at most 3000 bytes, and an event may have 1048576", Refused: "raise max_msg_size of the stream"},
			jetstream.StreamConfig{MaxMsgSize: 3000}, jetstream.StreamConfig{MaxMsgSize: 2 << 20}),
	}
}

// create makes a stream that takes the subjects below its name.
func create(t *testing.T, js jetstream.JetStream, name string) error {
	t.Helper()
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}})
	return err
}

// unreadyServers are the rows of servers that cannot be used as they are.
func unreadyServers(t *testing.T, rows map[string]relaytest.Unready) {
	t.Helper()
	const settings = "url: 'nats://%s', nats: {stream: EVENTS, subject: 'outbox.{type}'}"
	// A server that is not there, until it is.
	dead := testkit.NewVacant(t).Address
	var later jetstream.JetStream
	rows["dead"] = relaytest.Unready{Settings: fmt.Sprintf(settings, dead), Problem: "connection refused", Fix: func() string {
		_, later = admin(t, restart(t, dead, t.TempDir()))
		addStream(t, later)
		return ""
	}, Stored: func() []string { return keysIn(t, later, "EVENTS") }}
	// Another program, a server without JetStream, and one without TLS; fixed by other settings.
	stranger, err := net.Listen("tcp", "127.0.0.1:0")
	pgtest.Must(t, err)
	t.Cleanup(func() { pgtest.Must(t, stranger.Close()) })
	go func() {
		for {
			conn, err := stranger.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("220 mail.internal ESMTP\r\n"))
			_ = conn.Close()
		}
	}()
	plain := startServer(t, func(o *server.Options) { o.JetStream = false })
	for name, row := range map[string]relaytest.Unready{
		"stranger":     {Settings: fmt.Sprintf(settings, stranger.Addr()), Problem: "what answers at this address is not a server of NATS"},
		"no-jetstream": {Settings: fmt.Sprintf(settings, addressOf(plain)), Problem: "the server, or the account, has no JetStream; enable it"},
		"no-tls":       {Settings: "url: 'tls://" + addressOf(plain) + "', nats: {stream: EVENTS, subject: s}", Problem: "the server offers no TLS, and the url asks for it"},
	} {
		right := startServer(t)
		_, js := admin(t, right)
		addStream(t, js)
		row.Fix = func() string { return fmt.Sprintf(settings, addressOf(right)) }
		row.Stored = func() []string { return keysIn(t, js, "EVENTS") }
		rows[name] = row
	}
	// A server whose max_payload is too small, until it is started with another one.
	dir := t.TempDir()
	options := func(o *server.Options) { o.StoreDir, o.MaxPayload = dir, 4096 }
	small := startServer(t, options)
	address := addressOf(small)
	_, js := admin(t, small, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	addStream(t, js, func(c *jetstream.StreamConfig) { c.Storage = jetstream.FileStorage })
	rows["small-payload"] = relaytest.Unready{
		Settings: fmt.Sprintf(settings, address), Warning: "the server takes messages of at most 4096 bytes, and an event may have 1048576",
		Refused: "the message is too large for this server", Fix: func() string {
			small.Shutdown()
			small.WaitForShutdown()
			_, js = admin(t, restart(t, address, dir))
			return ""
		}, Stored: func() []string { return keysIn(t, js, "EVENTS") },
	}
}

// unreadyIdentities are the rows of servers that refuse the relay.
func unreadyIdentities(t *testing.T, rows map[string]relaytest.Unready) {
	t.Helper()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, content string) { pgtest.Must(t, os.WriteFile(path(name), []byte(content), 0o600)) }
	user := userKey(t)
	public, err := user.PublicKey()
	pgtest.Must(t, err)
	allow := func(subjects ...string) *server.SubjectPermission { return &server.SubjectPermission{Allow: subjects} }
	s := startServer(t, func(o *server.Options) {
		o.Nkeys = []*server.NkeyUser{{Nkey: public}}
		o.Users = []*server.User{
			{Username: "root", Password: "r"},
			{Username: "relay", Password: "hunter2"},
			{Username: "reader", Password: "r", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{"no-right.>"}}}},
			{Username: "mute", Password: "r", Permissions: &server.Permissions{Subscribe: allow("_INBOX_relay.>")}},
		}
	})
	_, js := admin(t, s, nats.UserInfo("root", "r"))
	row := func(name, identity string, u relaytest.Unready, mend func(settings string) string) {
		pgtest.Must(t, create(t, js, name))
		settings := fmt.Sprintf("url: 'nats://%s', nats: {stream: %s, subject: '%s.{type}'", addressOf(s), name, name)
		u.Settings = settings + identity
		u.Fix = func() string { return mend(settings) }
		u.Stored = func() []string { return keysIn(t, js, name) }
		rows[name] = u
	}
	write("password", "wrong")
	row("password", "}, basic_auth: {username: relay, password_file: "+path("password")+"}", relaytest.Unready{Problem: "the server refuses the relay's user; correct nats.credentials_file"},
		func(string) string { write("password", "hunter2"); return "" })
	write("nkey", *seedOf(t, userKey(t)))
	row("nkey", ", nkey_file: "+path("nkey")+"}", relaytest.Unready{Problem: "the server refuses the relay's user"}, func(string) string { write("nkey", *seedOf(t, user)); return "" })
	row("no-right", "}, basic_auth: {username: reader, password: r}", relaytest.Unready{Attempt: "allow the user to publish to that subject"},
		func(settings string) string { return settings + "}, basic_auth: {username: relay, password: hunter2}" })
	row("no-inbox", "}, basic_auth: {username: mute, password: r}", relaytest.Unready{Problem: "acknowledgements cannot arrive; allow the user to subscribe to that, or set nats.inbox_prefix"},
		func(settings string) string {
			return settings + ", inbox_prefix: _INBOX_relay}, basic_auth: {username: mute, password: r}"
		})
	operated, issue := trusted(t)
	write("creds", issue(time.Now().Add(-time.Hour)))
	_, owner := admin(t, operated, nats.UserCredentialBytes([]byte(issue(time.Time{}))))
	pgtest.Must(t, create(t, owner, "expired"))
	rows["expired"] = relaytest.Unready{
		Settings: fmt.Sprintf("url: 'nats://%s', nats: {stream: expired, subject: 'expired.{type}', credentials_file: %s}", addressOf(operated), path("creds")),
		Problem:  "the user's credentials expired at", Fix: func() string { write("creds", issue(time.Time{})); return "" },
		Stored: func() []string { return keysIn(t, owner, "expired") },
	}
	ca := localcert.NewAuthority(nil)
	certificate, _ := localcert.PEM(ca.Certificate)
	other, _ := localcert.PEM(localcert.NewAuthority(nil).Certificate)
	write("ca", string(other))
	secure := startServer(t, func(o *server.Options) {
		o.TLSConfig, o.TLSTimeout = &tls.Config{Certificates: []tls.Certificate{ca.Issue(nil)}, MinVersion: tls.VersionTLS12}, 5
	})
	_, guarded := admin(t, secure, nats.Secure(&tls.Config{InsecureSkipVerify: true}))
	pgtest.Must(t, create(t, guarded, "authority"))
	rows["authority"] = relaytest.Unready{
		Settings: fmt.Sprintf("url: 'tls://%s', nats: {stream: authority, subject: 'authority.{type}'}, tls: {server_name: localhost, ca_file: %s}", addressOf(secure), path("ca")),
		Problem:  "set tls.ca_file to the authority's certificate", Fix: func() string {
			write("ca", string(certificate))
			return ""
		}, Stored: func() []string { return keysIn(t, guarded, "authority") },
	}
}

// Each row of the second table in docs/nats.md: a relay reports it when it starts, continues with
// other destinations, and loses nothing.
func TestUnreadyDestinations(t *testing.T) {
	t.Parallel()
	good, rows := unreadyStreams(t)
	unreadyServers(t, rows)
	unreadyIdentities(t, rows)
	relaytest.CheckUnready(t, relayProgram, good, rows)
}
