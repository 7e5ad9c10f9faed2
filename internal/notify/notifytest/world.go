package notifytest

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localcert"
)

// serviceURLs has the URL of a channel of every service that is offered, with its options, by the
// host that the service talks to. Mail is not among them: it has its own server.
var serviceURLs = map[string]string{ //nolint:gosec // they are made up, and lead to hosts that do not exist
	"bark.test":                "bark://:device-key@bark.test/sub?sound=bell&icon=i&group=g&url=u&category=c&copy=y&badge=3",
	"discord.com":              "discord://token@123456789?username=relay&avatarurl=a&color=ff0000&thread_id=7&splitLines=no",
	"chat.googleapis.com":      "googlechat://chat.googleapis.com/v1/spaces/FOO/messages?key=bar&token=baz",
	"gotify.test":              "gotify://gotify.test/sub/Aaa.bbb.ccc.ddd?priority=-2&date=2026-01-01T00:00:00Z&extras=%7B%22a%22:1%7D&useheader=yes",
	"hangouts.test":            "hangouts://hangouts.test/v1/spaces/FOO/messages?key=bar&token=baz",
	"maker.ifttt.com":          "ifttt://dummy-key/?events=event1,event2&value1=one&messagevalue=3&titlevalue=2",
	"joinjoaomgcd.appspot.com": "join://Token:apikey@join?devices=dev1,dev2&icon=i",
	"open.larksuite.com":       "lark://open.larksuite.com/token?secret=sss&link=l",
	"matrix.test":              "matrix://user:password@matrix.test/?rooms=!r:x,alias",
	"mattermost.test":          "mattermost://bot@mattermost.test/token/channel?icon=:bell:",
	"notifiarr.com":            "notifiarr://apikey123?channel=1234567890123456789&name=n&thumbnail=t&color=c",
	"ntfy.test":                "ntfy://user:password@ntfy.test/topic?priority=High&tags=a,b&actions=view,x;view,y&in=5m&cache=no&click=c&icon=i",
	"opsgenie.test":            "opsgenie://opsgenie.test/eb243592-faa2-4ba2-a551q-1afdf565c889?responders=team:a,user:b,schedule:00000000-0000-0000-0000-000000000000&tags=t&details=k:v&priority=P1&description=more",
	"pagerduty.test":           "pagerduty://pagerduty.test/0123456789abcdef0123456789abcdef?severity=critical&details=%7B%22a%22:1%7D&contexts=link:l,image:i&client=c",
	"api.pushbullet.com":       "pushbullet://tokentokentokentokentokentokentoke/device/a@example.com#channel",
	"api.pushover.net":         "pushover://shoutrrr:apptoken@usertoken?devices=a,b&priority=1",
	"rocketchat.test":          "rocketchat://bot@rocketchat.test/aaaaaaaaaa/bbbbbbbbbb/channel",
	"signal.test":              "signal://signal.test/+1234567890/+0987654321/group.a/b?token=t",
	"hooks.slack.com":          "slack://hook:AAAAAAAAA-BBBBBBBBB-123456789123456789123456@webhook?botname=b&icon=https://i&color=good&thread_ts=1",
	"slack.com":                "slack://xoxb:AAAAAAAAA-BBBBBBBBB-123456789123456789123456@CHANNEL",
	"test.webhook.office.com":  "teams://11111111-4444-4444-8444-cccccccccccc@22222222-4444-4444-8444-cccccccccccc/33333301222222222233333333333344/44444444-4444-4444-8444-cccccccccccc/V2?host=test.webhook.office.com&color=c",
	"api.telegram.org":         "telegram://12345:mock-token@telegram/?chats=@channel-1,-100:5&parsemode=Markdown&notification=no",
	"qyapi.weixin.qq.com":      "wecom://693axxx6-7aoc-4bc4-97a0-0ec2sifa5aaa?mentioned_list=a,b",
	"zulip.test":               "zulip://bot-name%40zulipchat.com:correcthorsebatterystable@zulip.test?stream=foo&topic=bar",
}

// ServiceURLs returns the URL of a channel of every service but mail, by the host that the service
// talks to.
func ServiceURLs() map[string]string { return maps.Clone(serviceURLs) }

// A Message is what a request says.
type Message struct{ Method, Path, Query, Body, Headers string }

// A World is all services in one: a proxy that leads to a server which has the names of them all.
type World struct {
	Proxy *httptest.Server
	Mail  *MailServer

	mu       sync.Mutex
	messages map[string][]Message // by host
}

// New starts a world until the test ends. The system's authorities must be those of the authority:
// SSL_CERT_FILE names its file. answers replaces the answers of the services; nil: each accepts
// what it is sent.
func New(t *testing.T, authority Authority, answers http.HandlerFunc) *World {
	t.Helper()
	w := &World{messages: map[string][]Message{}, Mail: newMailServer(t, authority.pair)}
	answer := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		var headers strings.Builder // ntfy has its title there
		_ = r.Header.WriteSubset(&headers, map[string]bool{"User-Agent": true, "Content-Length": true, "Connection": true})
		host, _, _ := strings.Cut(r.Host, ":")
		w.mu.Lock()
		w.messages[host] = append(w.messages[host], Message{r.Method, r.URL.EscapedPath(), r.URL.RawQuery, string(body), strings.ReplaceAll(headers.String(), "\r", "")})
		w.mu.Unlock()
		if answers != nil {
			answers(rw, r)
			return
		}
		code := map[string]int{"bark.test": 200}[host]
		_, _ = fmt.Fprintf(rw, `{"ok": true, "status": 1, "code": %d, "errcode": 0, "active": true, "room_id": "!r:x", "joined_rooms": ["!r:x"], "access_token": "token"}`, code)
	})
	secure := httptest.NewUnstartedServer(answer)
	secure.TLS = &tls.Config{Certificates: []tls.Certificate{authority.pair}}
	secure.StartTLS()
	w.Proxy = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			answer(rw, r)
			return
		}
		onward, err := net.Dial("tcp", secure.Listener.Addr().String())
		if err != nil {
			return
		}
		defer onward.Close()
		rw.WriteHeader(http.StatusOK)
		conn, buffered, err := rw.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		go func() {
			_, _ = io.Copy(onward, buffered)
			_ = onward.Close()
		}()
		_, _ = io.Copy(conn, onward)
	}))
	t.Cleanup(func() {
		for _, server := range []*httptest.Server{secure, w.Proxy} {
			server.CloseClientConnections()
			server.Close()
		}
	})
	return w
}

// Messages returns what the services were sent, by host.
func (w *World) Messages() map[string][]Message {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.messages)
}

// An Authority has certified all services and the mail server. A process reads its authorities
// once, and so has one of them.
type Authority struct {
	// PEM is its certificate.
	PEM  []byte
	pair tls.Certificate
}

// NewAuthority makes an authority.
func NewAuthority() Authority {
	made := localcert.NewAuthority(func(c *x509.Certificate) {
		c.DNSNames, c.ExtKeyUsage = append(slices.Collect(maps.Keys(serviceURLs)), "localhost"), nil
	})
	certificate, _ := localcert.PEM(made.Certificate)
	return Authority{PEM: certificate, pair: made.Certificate}
}
