package relay

import (
	"context"
	"encoding/json"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// direct is the transport of alerts where nothing is configured.
var direct = alert.NewTransport(post.Egress{})

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

// What a receiver answered speaks to no chat, whatever the rule and whichever field holds it.
func TestSecurityAlertsAreText(t *testing.T) {
	t.Parallel()
	rc := newReceiver(t, nil)
	ended := time.Now()
	for _, rule := range []string{alert.RuleFailed, alert.RuleLag, alert.RuleBreakerOpen, alert.RuleUnserved, alert.RuleQuarantined, "rule" + canary} {
		for _, resolved := range []*time.Time{nil, &ended} {
			a := alert.Alert{
				Rule: rule, Subject: canary, Count: 2, OpenedAt: ended.Add(-time.Hour), FirstEventID: 7, FirstError: "422: " + canary, Detail: canary,
				ResolvedAt: resolved,
			}
			wantHarmless(t, rule, a.Text())
			wantHarmless(t, rule, a.Title())
			must(t, alert.Slack(rc.URL, direct).Notify(t.Context(), a))
			must(t, alert.Webhook(rc.URL, direct).Notify(t.Context(), a))
		}
	}
	for _, r := range rc.all() {
		var message struct {
			Text, Subject, Detail string
			FirstError            string `json:"first_error"`
		}
		must(t, json.Unmarshal(r.body, &message))
		wantHarmless(t, "channel", message.Text)
		for _, field := range []string{message.Subject, message.Detail, message.FirstError, string(r.body)} {
			if plain.Line(field) != field {
				t.Errorf("%+q", field)
			}
		}
	}
	if long := (alert.Alert{Rule: alert.RuleFailed, FirstError: strings.Repeat("@", 1<<20), Detail: strings.Repeat("<", 1<<20)}).Text(); len(long) > 4096 {
		t.Errorf("a text of %d bytes, which chats refuse", len(long))
	}
}

// No alert goes where egress forbids, is sent on by a redirect, or passes a proxy that is not configured.
func TestSecurityAlertTransport(t *testing.T) { // not in parallel: it sets the environment
	elsewhere := newReceiver(t, nil)
	proxy := newReceiver(t, func(w http.ResponseWriter, _ request) { w.WriteHeader(http.StatusTeapot) })
	moved := newReceiver(t, func(w http.ResponseWriter, _ request) {
		w.Header().Set("Location", elsewhere.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	send := func(transport *alert.Transport, url string) error {
		return alert.Webhook(url, transport).Notify(t.Context(), alert.NewTest(time.Now()))
	}
	_, port, _ := strings.Cut(strings.TrimPrefix(elsewhere.URL, "http://"), ":")
	named := alert.NewTransport(post.Egress{}) // every name leads to an unused address
	dialer := post.Egress{}.Dialer(time.Minute)
	dialer.Resolver = resolverTo(t, func() netip.Addr { return netip.MustParseAddr("0.0.0.0") })
	named.HTTP.DialContext = dialer.DialContext
	narrow := alert.NewTransport(post.Egress{AllowPrivate: []netip.Prefix{}})
	for _, c := range []struct {
		name      string
		transport *alert.Transport
		url, want string
	}{
		{"0.0.0.0", direct, "http://0.0.0.0:" + port, "prohibited"},
		{"a name of 0.0.0.0", named, "http://channel.test:" + port, "prohibited"},
		{"metadata", direct, "http://169.254.169.254/", "prohibited"},
		{"beyond allow_private", narrow, elsewhere.URL, "egress.allow_private"},
		{"a redirect", direct, moved.URL, "the channel answered 307, and redirects are never followed"},
		{"a name that no host has", direct, "http://channel.invalid/", "channel.invalid"}, // the environment's proxy would take it
		{"an address, through a proxy", alert.NewTransport(post.Egress{Proxy: proxy.URL}), "http://169.254.169.254/", "prohibited"},
	} {
		if err := send(c.transport, c.url); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if elsewhere.total() != 0 || moved.total() != 1 || proxy.total() != 0 {
		t.Errorf("%d requests beyond, %d at the proxy", elsewhere.total(), proxy.total())
	}
	if err := send(alert.NewTransport(post.Egress{Proxy: proxy.URL}), "http://channel.invalid/"); err == nil || !strings.Contains(err.Error(), "418") || proxy.total() != 1 {
		t.Errorf("egress.proxy is not used: %v", err)
	}
}

// A channel that answers without an end costs neither memory nor time.
func TestAlertAnswersAreBounded(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	endless := newReceiver(t, func(w http.ResponseWriter, _ request) {
		defer close(gone)
		chunk := slices.Repeat([]byte("x"), 32<<10)
		for {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, endless.URL, nil)
	must(t, err)
	resp, err := direct.RoundTrip(req)
	must(t, err)
	if resp.ContentLength != 64<<10 {
		t.Errorf("%d bytes were read", resp.ContentLength)
	}
	<-gone
}
