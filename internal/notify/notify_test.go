package notify

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func serve(t *testing.T, answer http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// direct is the transport of alerts where nothing is configured.
var direct = alert.NewTransport(relay.Egress{})

const secretToken = "Aaa.bbb.ccc.ddd"

// gotify is a service that can be had on any host, over plain HTTP.
func gotify(server *httptest.Server) settings.Secret {
	return settings.Secret("gotify://" + strings.TrimPrefix(server.URL, "http://") + "/" + secretToken + "?disabletls=yes")
}

// A message that hangs ends with its context.
func TestServiceThatHangs(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	hanging := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then does the server see that the client is gone
		cancel()
		<-r.Context().Done()
	})
	testkit.ErrorContains(t, "error", New(gotify(hanging), direct).Notify(ctx, alert.NewTest(time.Now())), "context canceled")
}

// A mail server answers with a line that does not end. The relay reads a bounded part of it.
func TestSecurityMailServerWithoutEnd(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
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
	channel := New(settings.Secret("smtp://user:password@"+listener.Addr().String()+"/?from=a@example.com&to=b@example.com"), direct)
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
	echo := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"error":"x","errorCode":403,"errorDescription":"`+r.URL.String()+` `+r.Header.Get("X-Gotify-Key")+`"}`)
	})
	for _, raw := range []settings.Secret{
		gotify(echo), "gotify://127.0.0.1:1/" + secretToken + "?disabletls=yes",
		"smtp://user:p%40s3cret@127.0.0.1:1/?from=a@example.com&to=b@example.com", "ntfy://user:s3cret@127.0.0.1:1/topic?scheme=http",
	} {
		err := New(raw, direct).Notify(t.Context(), alert.NewTest(time.Now()))
		if err == nil || strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), secretToken) {
			t.Errorf("%s: %v", Kind(string(raw)), err)
		}
	}
}

// A service that accepts with status 200 alone has not said so.
func TestServiceThatConfirmsNothing(t *testing.T) {
	t.Parallel()
	odd := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"code": 400, "message": "no such s3cretdevice"}`)
	})
	url := settings.Secret("bark://:s3cretdevice@" + strings.TrimPrefix(odd.URL, "http://") + "/?scheme=http")
	if err := New(url, direct).Notify(t.Context(), alert.NewTest(time.Now())); err == nil || !strings.Contains(err.Error(), `the channel refused it: {"code": 400`) || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("%v", err)
	}
}

// No service reaches an address of this host or of a cloud's metadata that no channel may have.
func TestSecurityForbiddenAddresses(t *testing.T) {
	t.Parallel()
	server := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("a request arrived") })
	_, port, _ := strings.Cut(strings.TrimPrefix(server.URL, "http://"), ":")
	for _, url := range []string{
		"gotify://0.0.0.0:" + port + "/" + secretToken + "?disabletls=yes", "mattermost://bot@0.0.0.0:" + port + "/token?disabletls=yes",
		"ntfy://0.0.0.0:" + port + "/topic?scheme=http", "bark://:key@0.0.0.0:" + port + "/?scheme=http",
		"smtp://0.0.0.0:" + port + "/?from=a@example.com&to=b@example.com", "matrix://:token@169.254.169.254:" + port + "/?disabletls=yes",
	} {
		if err := New(settings.Secret(url), direct).Notify(t.Context(), alert.NewTest(time.Now())); err == nil || !strings.Contains(err.Error(), "prohibited") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestServiceURLs(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"smtp://user:password@mail.internal:587/?from=a@example.com&to=b@example.com": "",
		"pagerduty://events.pagerduty.com/0123456789abcdef0123456789abcdef":           "",
		"matrix://user:password@example.invalid":                                      "", // a check does not log in
		"matrix://:token@example.invalid":                                             "",
		"slack://bot@AAAAAAAAA/BBBBBBBBB/123456789123456789123456":                    "",
		"notifiarr+https://notifiarr.com/api/v1/notification/passthrough/key?name=x":  "",
		"teams+https://a.webhook.office.com/webhookb2/11111111-4444-4444-8444-cccccccccccc@22222222-4444-4444-8444-cccccccccccc/IncomingWebhook/33333301222222222233333333333344/44444444-4444-4444-8444-cccccccccccc/V2": "",
		"discord+https://token@1":            `is not how discord spells its URLs; write discord://TOKEN@ID, with the options that it has`,
		"discord://token@1?json=yes":         `is not how discord spells its URLs; write discord://TOKEN@ID, with the options that it has`,
		"ntfy://ntfy.sh/topic?cache=perhaps": `is not how ntfy spells its URLs; write ntfy://USER:PASSWORD@HOST/TOPIC, with the options that it has`,
		"mail.internal":                      `is not a URL; write one such as "smtp://user:password@mail.internal:587/?from=relay@example.com&to=ops@example.com"`,
		"https://ops.internal":               `is a plain URL; write it as {webhook: "https://…"}`,
		"pagerdutty://s3cret":                `begins with a service that is not offered; did you mean pagerduty://?`,
		"discord://s3cret":                   `is not how discord spells its URLs; write discord://TOKEN@ID, with the options that it has`,
		"":                                   `is empty`,
		"generic://example.com/x":            `is a plain URL; write it as {webhook: "https://…"}`,
		"smtp://mail.internal/?from=a@example.com&to=b@example.com&skiptlsverify=yes": `has skiptlsverify; a mail server's certificate is always verified, against the system's authorities`,
		"smtp://mail.internal/?from=a@example.com&to=b@example.com&usehtml=yes":       `has usehtml; alerts are sent as plain text`,
		"smtp://mail.internal/?from=a@example.com&to=b":                               `has a from or to that is not a mail address such as ops@example.com`,
		"smtp://a\nb": `contains a control character, such as a line break`,
	} {
		if _, problem := ParseURL(url); problem != want {
			t.Errorf("%s: %q", url, problem)
		}
	}
	if _, problem := ParseURL("carrierpigeon://s3cret"); !strings.HasPrefix(problem, "begins with a service that is not offered; there are bark, discord") || strings.Contains(problem, "s3cret") {
		t.Errorf("%q", problem)
	}
}
