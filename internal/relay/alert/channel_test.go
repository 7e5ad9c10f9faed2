package alert_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// direct is the transport of alerts where nothing is configured.
var direct = alert.NewTransport(post.Egress{})

// What a Slack and a webhook channel send.
func TestMessages(t *testing.T) {
	t.Parallel()
	c := newChat(t, nil)
	a := alert.Alert{Rule: alert.RuleFailed, Subject: "default", Count: 1, OpenedAt: time.Now(), FirstEventID: 1, FirstError: "422 Unprocessable Entity: <no> & k; see tls.ca_file"}
	relaytest.Must(t, alert.Slack(c.URL+"/services/T0/B0/secret", direct).Notify(t.Context(), a))
	ended := a.OpenedAt.Add(time.Minute)
	a.ResolvedAt = &ended
	relaytest.Must(t, alert.Slack(c.URL, direct).Notify(t.Context(), a))
	relaytest.Must(t, alert.Webhook(c.URL, direct).Notify(t.Context(), a))
	a.ResolvedAt = nil
	relaytest.Must(t, alert.Webhook(c.URL, direct).Notify(t.Context(), a))
	var messages []map[string]any
	for _, body := range c.all() {
		var message map[string]any
		relaytest.Must(t, json.Unmarshal(body, &message))
		messages = append(messages, message)
	}
	for i, parts := range [][]string{
		{
			":rotating_light: 1 delivery to `default` failed for good", "event 1: `422 Unprocessable Entity: &lt;no&gt; &amp; k; see tls.ca_file`",
			"`outbox-relay events list --status failed --destination default`",
		},
		{":white_check_mark: Recovered: no failed delivery to `default` is left, of 1 that failed", "lasted 1m"},
		{"Recovered: "},
	} {
		for _, part := range parts {
			if text := messages[i]["text"].(string); !strings.Contains(text, part) {
				t.Errorf("%q is missing in %q", part, text)
			}
		}
	}
	for field, want := range map[string]string{
		"rule": "failed", "subject": "default", "first_event_id": "1", "state": "resolved", "first_error": a.FirstError,
	} {
		if got := messages[2][field]; got != want {
			t.Errorf("%s is %v, want %s", field, got, want)
		}
	}
	for _, field := range []string{"command", "remedy"} {
		if got, says := messages[2][field]; says {
			t.Errorf("what is over has the %s %v", field, got)
		}
		if said, _ := messages[3][field].(string); said == "" {
			t.Errorf("what lasts has no %s", field)
		}
	}
	if test := alert.NewTest(ended); test.BeganAt != ended || test.Command() == "" {
		t.Errorf("%+v", test)
	}
}

// The URL of a channel is its secret.
func TestChannelsHideTheirURL(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"http://127.0.0.1:1/s3cret", "http://host.invalid/s3cret", "::s3cret", "http://[::1/s3cret", "gopher://x/s3cret", "http://a b/s3cret"} {
		for _, c := range []alert.Channel{alert.Slack(url, direct), alert.Webhook(url, direct)} {
			err := c.Notify(t.Context(), alert.NewTest(time.Now()))
			if err == nil || strings.Contains(err.Error(), "s3cret") || strings.Contains(c.Name(), "s3cret") {
				t.Errorf("%s: %v", c.Name(), err)
			}
		}
	}
	slack, again := alert.Slack("a", direct).Name(), alert.Slack("a", direct).Name()
	if slack == alert.Slack("b", direct).Name() || slack == alert.Webhook("a", direct).Name() || slack != again {
		t.Error("names do not tell channels apart")
	}
}

// canary is what a receiver, a producer or another login writes to be obeyed where it is read.
const canary = "\x1b[31m\u202egpj\u2028\u200f\u061c\u200b\U000e0041 <!channel> <@U012> @everyone @here <users/all> <at id=1> [x](https://evil.example/a) http://evil.example evil.example a@evil.example"

// wantHarmless checks a message that a chat was sent.
func wantHarmless(t *testing.T, where, text string) {
	t.Helper()
	for _, attack := range []string{"<!", "<@", "@everyone", "@here", "<users", "<at", "](", "://", "evil.example", "a@"} {
		if strings.Contains(text, attack) {
			t.Errorf("%s: %q reached the chat: %s", where, attack, text)
		}
	}
	if plain.Line(text) != text {
		t.Errorf("%s: %+q", where, text)
	}
}

// What a receiver answered is one line that commands no chat, whatever the rule and whichever field
// holds it.
func TestSecurityAlertsAreText(t *testing.T) {
	t.Parallel()
	c := newChat(t, nil)
	ended := time.Now()
	for _, rule := range append(alert.Rules(), alert.RuleTest, "rule\n"+canary) {
		for _, resolved := range []*time.Time{nil, &ended} {
			a := alert.Alert{
				Rule: rule, Subject: "x'; rm -rf\n/" + canary, Count: 2, OpenedAt: ended.Add(-time.Hour), FirstEventID: 7, FirstError: "422: \r\n" + canary, Detail: canary,
				ResolvedAt: resolved,
			}
			wantHarmless(t, rule, a.Text())
			wantHarmless(t, rule, a.Title())
			if resolved != nil && (!strings.Contains(a.Text(), "Recovered: ") || !strings.Contains(a.Text(), "lasted 1h")) {
				t.Errorf("%s: %s", rule, a.Text())
			}
			// Slack gets what others wrote as code, in which it obeys and links nothing.
			wantHarmless(t, rule, regexp.MustCompile("`[^`]*`").ReplaceAllString(a.SlackText(), ""))
			relaytest.Must(t, alert.Webhook(c.URL, direct).Notify(t.Context(), a))
		}
	}
	for _, body := range c.all() {
		var message struct {
			Text, Subject, Detail string
			FirstError            string `json:"first_error"`
		}
		relaytest.Must(t, json.Unmarshal(body, &message))
		wantHarmless(t, "channel", message.Text)
		for _, field := range []string{message.Subject, message.Detail, message.FirstError, string(body)} {
			if plain.Line(field) != field {
				t.Errorf("%+q", field)
			}
		}
	}
	if long := (alert.Alert{Rule: alert.RuleFailed, FirstError: strings.Repeat("@", 1<<20), Detail: strings.Repeat("<", 1<<20)}).Text(); len(long) > 4096 {
		t.Errorf("a text of %d bytes, which chats refuse", len(long))
	}
}

// An alert's channel reaches no more than a destination does, in whatever spelling. Of the
// addresses that are refused, those that spell this host lead to a listener, which receives
// nothing.
func TestSecurityChannelsReachNoForbiddenAddress(t *testing.T) {
	t.Parallel()
	trap := newChat(t, nil)
	_, port, err := net.SplitHostPort(trap.Listener.Addr().String())
	relaytest.Must(t, err)
	for _, host := range []string{
		"0.0.0.0", "[::]", "[::ffff:0.0.0.0]", "[::ffff:0:0]", "⓪.0.0.0", "0。0。0。0", "[::127.0.0.1]",
		"[64:ff9b::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2606:4700::5efe:7f00:1]",
		"169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::a9fe:a9fe%25lo]", "168.63.129.16", "100.100.100.200", "[fd00:ec2::254]", "224.0.0.1",
	} {
		for _, channel := range []alert.Channel{alert.Slack("http://"+host+":"+port+"/", direct), alert.Webhook("http://"+host+":"+port+"/", direct)} {
			if err := channel.Notify(t.Context(), alert.NewTest(time.Now())); err == nil || !strings.Contains(err.Error(), "prohibited") {
				t.Errorf("%s: %v", host, err)
			}
		}
	}
	if n := len(trap.all()); n > 0 {
		t.Errorf("%d requests arrived", n)
	}
}

// No alert goes where egress forbids, is sent on by a redirect, or passes a proxy that is not
// configured.
func TestSecurityAlertTransport(t *testing.T) { // not in parallel: it sets the environment
	elsewhere := newChat(t, nil)
	proxy := newChat(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	moved := newChat(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", elsewhere.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	refusing := newChat(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = w.Write([]byte("no\x1b[31m"))
	})
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	narrow := alert.NewTransport(post.Egress{AllowPrivate: []netip.Prefix{}})
	proxied := alert.NewTransport(post.Egress{Proxy: proxy.URL})
	for _, c := range []struct {
		name      string
		transport *alert.Transport
		url, want string
	}{
		{"beyond allow_private", narrow, elsewhere.URL, "egress.allow_private"},
		{"a name of such an address", narrow, strings.Replace(elsewhere.URL, "127.0.0.1", "localhost", 1), "egress.allow_private"},
		{"a redirect", direct, strings.Replace(moved.URL, "http://", "http://user:s3cret@", 1), "the channel answered 307, and redirects are never followed"},
		{"a refusal, without control characters", direct, refusing.URL, "answered 500 Internal Server Error: no\ufffd[31m"},
		{"a name that no host has", direct, "http://channel.invalid/", "channel.invalid"}, // the environment's proxy would take it
		{"an address, through a proxy", proxied, "http://169.254.169.254/", "prohibited"},
	} {
		err := alert.Webhook(c.url, c.transport).Notify(t.Context(), alert.NewTest(time.Now()))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if len(elsewhere.all()) != 0 || len(moved.all()) != 1 || len(proxy.all()) != 0 {
		t.Errorf("%d requests beyond, %d at the proxy", len(elsewhere.all()), len(proxy.all()))
	}
	err := alert.Webhook("http://channel.invalid/", proxied).Notify(t.Context(), alert.NewTest(time.Now()))
	if err == nil || !strings.Contains(err.Error(), "418") || len(proxy.all()) != 1 {
		t.Errorf("egress.proxy is not used: %v", err)
	}
	conn, err := direct.DialContext(t.Context(), "tcp", strings.TrimPrefix(elsewhere.URL, "http://"))
	relaytest.Must(t, err)
	relaytest.Must(t, conn.Close())
	if _, err := narrow.DialContext(t.Context(), "tcp", strings.TrimPrefix(elsewhere.URL, "http://")); err == nil {
		t.Error("a channel without HTTP reaches what egress forbids")
	}
}

// A channel that answers without an end costs neither memory nor time.
func TestAlertAnswersAreBounded(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	endless := newChat(t, func(w http.ResponseWriter, _ *http.Request) {
		defer close(gone)
		chunk := slices.Repeat([]byte("x"), 32<<10)
		for {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, endless.URL, nil)
	relaytest.Must(t, err)
	answer, err := direct.Exchange(req, mask.OfURL(req.URL))
	relaytest.Must(t, err)
	testkit.Equal(t, "bytes were read", len(answer), 64<<10)
	<-gone
	silent := newChat(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer func() { _ = conn.Close() }()
		_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"))
		_, _ = conn.Read(make([]byte, 1)) // until the relay hangs up
	})
	req, err = http.NewRequestWithContext(context.Background(), http.MethodPost, silent.URL, nil)
	relaytest.Must(t, err)
	_, err = direct.Exchange(req, mask.OfURL(req.URL))
	testkit.ErrorContains(t, "a channel that changes the protocol", err, "answered 101")
}
