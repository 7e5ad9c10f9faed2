package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// A chat is an HTTP server that keeps what it is told and answers with a status.
type chat struct {
	*httptest.Server
	mu     sync.Mutex
	bodies []string
}

func newChat(t *testing.T, answer http.HandlerFunc) *chat {
	t.Helper()
	c := &chat{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		c.mu.Lock()
		c.bodies = append(c.bodies, string(body))
		c.mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(func() {
		c.CloseClientConnections()
		c.Close()
	})
	return c
}

func (c *chat) all() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.bodies, "\n")
}

func status(code int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, text)
	}
}

const gotifyToken = "Aaa.bbb.ccc.ddd"

// gotify is a service that can be had on any host, over plain HTTP.
func gotify(server *httptest.Server) secret {
	return secret("gotify://" + strings.TrimPrefix(server.URL, "http://") + "/" + gotifyToken + "?disabletls=yes")
}

func TestAlertTest(t *testing.T) {
	t.Parallel()
	good := newChat(t, status(200, `{"id": 1}`))
	bad := newChat(t, status(500, "out of \x1b[31morder"))
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "alerts:\n  channels:\n"+
		"  - {webhook: '"+good.URL+"/hook-s3cret'}\n  - {slack: '"+bad.URL+"/slack-s3cret'}\n  - {service: '"+string(gotify(good.Server))+"'}\n")

	all := command(nil, "alert", "test", "--config", file)
	if all.code != exitFailed || !strings.Contains(all.stderr, "1 of 3 channels did not take the alert") {
		t.Errorf("%+v", all)
	}
	if strings.Contains(all.stdout+all.stderr, "s3cret") || strings.Contains(all.stdout+all.stderr, gotifyToken) || strings.Contains(all.stdout, "\x1b") {
		t.Errorf("a secret, or a control character, in %+v", all)
	}
	if strings.Count(all.stdout, "  ok\n") != 2 || !strings.Contains(all.stdout, "500 Internal Server Error: out of") {
		t.Errorf("%s", all.stdout)
	}
	if told := good.all(); strings.Count(told, "This is a test of the alert channels") != 2 {
		t.Errorf("the channels heard %s", told)
	}

	var results []channelResult
	asked := command(nil, "alert", "test", "--config", file, "--channel", "gotify", "--json")
	if err := json.Unmarshal([]byte(asked.stdout), &results); err != nil || asked.code != 0 || len(results) != 1 || !results[0].OK || !strings.HasPrefix(results[0].Channel, "gotify-") {
		t.Errorf("%v %+v", err, asked)
	}
	if r := command(nil, "alert", "test", "--config", file, "--channel", "pager"); r.code != exitUsage || !strings.Contains(r.stderr, `there is no channel "pager"; there are webhook-`) {
		t.Errorf("%+v", r)
	}
	empty := writeFile(t, filepath.Join(t.TempDir(), usualFile), "log: {level: info}\n")
	if r := command(nil, "alert", "test", "--config", empty); r.code != exitFailed || !strings.Contains(r.stderr, "no channel is configured") {
		t.Errorf("%+v", r)
	}
}

// The library cannot be told to stop: a message that hangs is left behind, and keeps only its own channel busy.
func TestServiceThatHangs(t *testing.T) {
	t.Parallel()
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	hanging := newChat(t, func(http.ResponseWriter, *http.Request) {
		arrived <- struct{}{}
		<-release
	})
	channel := newServiceChannel(gotify(hanging.Server), alert.NewTransport(post.Egress{})).(*serviceChannel)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- channel.Notify(ctx, alert.NewTest(time.Now())) }()
	<-arrived
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := channel.Notify(t.Context(), alert.NewTest(time.Now())); err == nil || !strings.Contains(err.Error(), "still under way") {
		t.Errorf("%v", err)
	}
	close(release)
	channel.sending <- struct{}{} // once the one that hung is gone
	<-channel.sending
	if err := channel.Notify(t.Context(), alert.NewTest(time.Now())); err != nil && strings.Contains(err.Error(), "still under way") {
		t.Errorf("%v", err)
	}
}

// A mail server answers with a line that does not end. The relay reads a bounded part of it.
func TestSecurityMailServerWithoutEnd(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	written := make(chan int, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			written <- 0
			return
		}
		defer func() { _ = conn.Close() }()
		total, line := 0, bytes.Repeat([]byte("220-"), 16<<10)
		for total < 256<<20 {
			n, err := conn.Write(line)
			total += n
			if err != nil {
				break
			}
		}
		written <- total
	}()
	channel := newServiceChannel(secret("smtp://user:password@"+listener.Addr().String()+"/?from=a@example.com&to=b@example.com"), alert.NewTransport(post.Egress{}))
	err = channel.Notify(t.Context(), alert.NewTest(time.Now()))
	if err == nil || len(err.Error()) > 4096 {
		t.Errorf("%.5000v", err)
	}
	if n := <-written; n > 64<<20 { // most of it in the buffers of the two sockets
		t.Errorf("%d bytes were sent", n)
	} else {
		t.Logf("%d bytes were sent: %v", n, err)
	}
}

func TestServiceErrorsHoldNoSecrets(t *testing.T) {
	t.Parallel()
	echo := newChat(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"error":"x","errorCode":403,"errorDescription":"`+r.URL.String()+` `+r.Header.Get("X-Gotify-Key")+`"}`)
	})
	for _, raw := range []secret{
		gotify(echo.Server), "gotify://127.0.0.1:1/" + gotifyToken + "?disabletls=yes",
		"smtp://user:p%40s3cret@127.0.0.1:1/?from=a@example.com&to=b@example.com", "ntfy://user:s3cret@127.0.0.1:1/topic?scheme=http",
	} {
		err := newServiceChannel(raw, alert.NewTransport(post.Egress{})).Notify(t.Context(), alert.NewTest(time.Now()))
		if err == nil || strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), gotifyToken) {
			t.Errorf("%s: %v", serviceKind(string(raw)), err)
		}
	}
	if got := redact("Post https://x/tok%2Fen1: tok/en1 and user1234", "gotify://user1234@x/tok%2Fen1"); strings.Contains(got, "en1") || strings.Contains(got, "user1234") {
		t.Errorf("%s", got)
	}
}

func TestServiceURLs(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"smtp://user:password@mail.internal:587/?from=a@example.com&to=b@example.com": "",
		"pagerduty://events.pagerduty.com/0123456789abcdef0123456789abcdef":           "",
		"matrix://user:password@nobody.invalid":                                       "", // would log in
		"mail.internal":                                                               `is not a URL; write one such as "smtp://user:password@mail.internal:587/?from=relay@example.com&to=ops@example.com"`,
		"https://ops.internal":                                                        `is a plain URL; write it as {webhook: "https://…"}`,
		"pagerdutty://s3cret":                                                         `begins with a service that is not offered; did you mean pagerduty://?`,
		"discord://s3cret":                                                            `is not how discord spells its URLs; see https://shoutrrr.nickfedor.com`,
		"":                                                                            `is empty`,
		"generic://example.com/x":                                                     `is a plain URL; write it as {webhook: "https://…"}`,
		"smtp://mail.internal/?from=a@example.com&to=b@example.com&skiptlsverify=yes": `has skiptlsverify; a mail server's certificate is always verified, against the system's authorities`,
		"smtp://mail.internal/?from=a@example.com&to=b@example.com&usehtml=yes":       `has usehtml; alerts are sent as plain text`,
		"smtp://mail.internal/?from=a@example.com&to=b":                               `has a from or to that is not a mail address such as ops@example.com`,
		"smtp://a\nb": `contains a control character, such as a line break`,
	} {
		if _, problem := parseServiceURL(url); problem != want {
			t.Errorf("%s: %q", url, problem)
		}
	}
	if _, problem := parseServiceURL("carrierpigeon://s3cret"); !strings.HasPrefix(problem, "begins with a service that is not offered; there are bark, discord") || strings.Contains(problem, "s3cret") {
		t.Errorf("%q", problem)
	}
	shown := command(append([]string{"OUTBOX_ALERT_SERVICE_URL=pushover://shoutrrr:s3cret@user-s3cret"}, twoSettings...), "config", "show")
	if !strings.Contains(shown.stdout, "service: pushover://") || strings.Contains(shown.stdout+shown.stderr, "s3cret") {
		t.Errorf("%+v", shown)
	}
}
