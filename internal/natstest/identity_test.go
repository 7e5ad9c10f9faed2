package natstest

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// withUsers makes a server know root, and the relay's user with the given permissions.
func withUsers(p *server.Permissions) func(*server.Options) {
	return func(o *server.Options) {
		o.Users = []*server.User{{Username: "root", Password: "r"}, {Username: "relay", Password: "hunter2", Permissions: p}}
	}
}

// as identifies the relay by a header, as basic_auth and bearer_token do.
func as(header string) func(*relay.Destination) {
	return func(d *relay.Destination) { d.Wire.Authorization = func() string { return header } }
}

const (
	relayUser = "Basic cmVsYXk6aHVudGVyMg==" // relay:hunter2
	wrongUser = "Basic cmVsYXk6d3Jvbmc="     // relay:wrong
)

func TestIdentities(t *testing.T) {
	t.Parallel()
	s := startServer(t, withUsers(nil))
	_, js := admin(t, s, nats.UserInfo("root", "r"))
	addStream(t, js)
	expect(t, attempt(t, to(t, s, as(relayUser)), "right"), delivered, "")
	refused := "authorization violation: the server refuses the relay's user; correct nats.credentials_file, nats.nkey_file, basic_auth or bearer_token"
	for name, change := range map[string]func(*relay.Destination){"wrong": as(wrongUser), "token": as("Bearer hunter2"), "none": func(*relay.Destination) {}} {
		v := attempt(t, to(t, s, change), name)
		v.Message = strings.ToLower(v.Message)
		expect(t, v, unreached(policy.ReasonUnauthorized), refused)
		if strings.Contains(v.Message, "hunter2") {
			t.Error("the secret is repeated")
		}
	}
	withToken := startServer(t, func(o *server.Options) { o.Authorization = "hunter2" })
	_, js = admin(t, withToken, nats.Token("hunter2"))
	addStream(t, js)
	expect(t, attempt(t, to(t, withToken, as("Bearer hunter2")), "token"), delivered, "")
}

func userKey(t testing.TB) nkeys.KeyPair {
	t.Helper()
	pair, err := nkeys.CreateUser()
	pgtest.Must(t, err)
	return pair
}

func seedOf(t testing.TB, pair nkeys.KeyPair) *string {
	t.Helper()
	seed, err := pair.Seed()
	pgtest.Must(t, err)
	text := string(seed)
	return &text
}

// A right that is missing is reported beside the answers, and would be a timeout without a reason.
func TestMissingRights(t *testing.T) {
	t.Parallel()
	allow := func(subjects ...string) *server.SubjectPermission { return &server.SubjectPermission{Allow: subjects} }
	for name, c := range map[string]struct {
		rights *server.Permissions
		change func(*relay.Destination)
		want   policy.Result
		text   string
	}{
		"to publish": {
			&server.Permissions{Publish: allow("other.>"), Subscribe: allow("_INBOX.>")}, nil,
			answered(policy.ReasonUnauthorized), `Permissions Violation for Publish to "outbox.paid": allow the user to publish to that subject`,
		},
		"to hear the acknowledgement": {
			&server.Permissions{Publish: allow("outbox.>"), Subscribe: allow("_INBOX_relay.>")}, nil,
			answered(policy.ReasonUnauthorized), "or set nats.inbox_prefix to what it may subscribe to",
		},
		"to hear it elsewhere": {
			&server.Permissions{Publish: allow("outbox.>"), Subscribe: allow("_INBOX_relay.>")},
			func(d *relay.Destination) { d.NATS.InboxPrefix = "_INBOX_relay" }, delivered, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, withUsers(c.rights))
			_, js := admin(t, s, nats.UserInfo("root", "r"))
			addStream(t, js)
			changes := []func(*relay.Destination){as(relayUser)}
			if c.change != nil {
				changes = append(changes, c.change)
			}
			e := to(t, s, changes...)
			for i := range 3 { // the second attempt must not wait for what the first was refused
				expect(t, attempt(t, e, fmt.Sprint(i)), c.want, c.text)
			}
			if _, err := e.Reach(t.Context()); name == "to hear it elsewhere" && err != nil {
				t.Errorf("a user who may not ask about the stream: %v", err)
			}
		})
	}
	// Without the right to ask, what the server says of a missing stream is all there is.
	s := startServer(t, withUsers(&server.Permissions{Publish: allow("outbox.>"), Subscribe: allow("_INBOX.>")}))
	expect(t, attempt(t, to(t, s, as(relayUser)), "k"), answered(policy.ReasonUnavailable), `stream "EVENTS" does not exist, does not take this subject, or has no leader`)
}

// trusted starts a server that trusts an operator, and returns what issues credentials of an
// account with JetStream.
func trusted(t testing.TB) (s *server.Server, issue func(expires time.Time) string) {
	t.Helper()
	operator, err := nkeys.CreateOperator()
	pgtest.Must(t, err)
	account, err := nkeys.CreateAccount()
	pgtest.Must(t, err)
	system, err := nkeys.CreateAccount()
	pgtest.Must(t, err)
	public := func(pair nkeys.KeyPair) string {
		key, err := pair.PublicKey()
		pgtest.Must(t, err)
		return key
	}
	operatorClaims := jwt.NewOperatorClaims(public(operator))
	operatorClaims.SystemAccount = public(system)
	resolver := &server.MemAccResolver{}
	for _, pair := range []nkeys.KeyPair{account, system} {
		claims := jwt.NewAccountClaims(public(pair))
		if pair == account {
			claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: -1, DiskStorage: -1, Streams: -1, Consumer: -1}
		}
		token, err := claims.Encode(operator)
		pgtest.Must(t, err)
		pgtest.Must(t, resolver.Store(public(pair), token))
	}
	s = startServer(t, func(o *server.Options) {
		o.TrustedOperators, o.AccountResolver, o.SystemAccount = []*jwt.OperatorClaims{operatorClaims}, resolver, public(system)
	})
	return s, func(expires time.Time) string {
		user := userKey(t)
		claims := jwt.NewUserClaims(public(user))
		if !expires.IsZero() {
			claims.Expires = expires.Unix()
		}
		token, err := claims.Encode(account)
		pgtest.Must(t, err)
		content, err := jwt.FormatUserConfig(token, []byte(*seedOf(t, user)))
		pgtest.Must(t, err)
		return string(content)
	}
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	s, issue := trusted(t)
	forever := issue(time.Time{})
	_, js := admin(t, s, nats.UserCredentialBytes([]byte(forever)))
	addStream(t, js)
	var content atomic.Pointer[string]
	use := func(credentials string) { content.Store(&credentials) }
	e := to(t, s, func(d *relay.Destination) { d.NATS.Credentials = func() string { return *content.Load() } })
	use(issue(time.Now().Add(-time.Hour)))
	expect(t, attempt(t, e, "expired"), unreached(policy.ReasonUnauthorized), "the user's credentials expired at ")
	_, others := trusted(t)
	use(others(time.Time{}))
	if v := attempt(t, e, "another operator's"); v.Reason != policy.ReasonUnauthorized || !v.Unreached {
		t.Errorf("%+v", v)
	}
	soon := time.Now().Add(2 * time.Second)
	use(issue(soon))
	expect(t, attempt(t, e, "soon"), delivered, "")
	// The server ends the connection when the credentials do.
	nc, _ := admin(t, s, nats.UserCredentialBytes([]byte(forever)))
	_, err := nc.Subscribe("silence.>", func(*nats.Msg) {})
	pgtest.Must(t, err)
	pgtest.Must(t, nc.Flush())
	waits := endpointOf(t, settingsOf("nats://"+addressOf(s), func(d *relay.Destination) {
		d.NATS.Subject, d.NATS.Credentials = "silence.{type}", func() string { return *content.Load() }
	}), relay.Egress{})
	expect(t, attempt(t, waits, "expires"), answered(policy.ReasonUnauthorized), "authentication expired")
	use(forever)
	// The server ends the connection of the first endpoint at the same moment, but perhaps not
	// before the next attempt.
	testkit.Eventually(t, "a delivery with the new credentials", func() bool { return attempt(t, e, "renewed") == delivered })
}

func TestTLS(t *testing.T) {
	t.Parallel()
	ca := localcert.NewAuthority(nil)
	roots, client := ca.Pool(), ca.Issue(nil)
	localhost := ca.Issue(func(c *x509.Certificate) { c.IPAddresses = nil })
	secured := func(ask bool) *server.Server {
		s := startServer(t, func(o *server.Options) {
			o.TLSConfig, o.TLSTimeout = &tls.Config{Certificates: []tls.Certificate{localhost}, MinVersion: tls.VersionTLS12}, 5
			if o.TLSVerify = ask; ask {
				o.TLSConfig.ClientAuth, o.TLSConfig.ClientCAs = tls.RequireAndVerifyClientCert, roots
			}
		})
		_, js := admin(t, s, nats.Secure(&tls.Config{RootCAs: roots, ServerName: "localhost", Certificates: []tls.Certificate{client}, MinVersion: tls.VersionTLS12}))
		addStream(t, js)
		return s
	}
	plain, open, closed := startServer(t), secured(false), secured(true)
	trust := func(d *relay.Destination) { d.Wire.TLS.Roots = func() *x509.CertPool { return roots } }
	nameOnly := func(d *relay.Destination) { d.Wire.TLS.ServerName = "localhost" }
	named := func(d *relay.Destination) { trust(d); d.Wire.TLS.ServerName = "localhost" }
	for name, c := range map[string]struct {
		scheme string
		server *server.Server
		change func(*relay.Destination)
		want   policy.Result
		text   string
	}{
		"trusted":               {"tls://", open, named, delivered, ""},
		"unknown authority":     {"tls://", open, nameOnly, unreached(policy.ReasonTLS), "set tls.ca_file to the authority's certificate"},
		"nats, unknown":         {"nats://", open, nameOnly, unreached(policy.ReasonTLS), "set tls.ca_file to the authority's certificate"},
		"another name":          {"tls://", open, trust, unreached(policy.ReasonTLS), "set tls.server_name to a name of the certificate"},
		"no TLS":                {"tls://", plain, trust, unreached(policy.ReasonTLS), "the server offers no TLS, and the url asks for it"},
		"no client certificate": {"tls://", closed, named, unreached(policy.ReasonTLS), "set tls.cert_file and tls.key_file"},
		"client certificate": {"tls://", closed, func(d *relay.Destination) {
			named(d)
			d.Wire.TLS.Certificate = func() *tls.Certificate { return &client }
		}, delivered, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := endpointOf(t, settingsOf(c.scheme+addressOf(c.server), c.change), relay.Egress{})
			expect(t, attempt(t, e, name), c.want, c.text)
		})
	}
}
