package notify

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

func TestMain(m *testing.M) {
	GuardLibraries()
	os.Exit(m.Run())
}

func serve(t *testing.T, answer http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

const gotifyToken = "Aaa.bbb.ccc.ddd"

// gotify is a service that can be had on any host, over plain HTTP.
func gotify(server *httptest.Server) settings.Secret {
	return settings.Secret("gotify://" + strings.TrimPrefix(server.URL, "http://") + "/" + gotifyToken + "?disabletls=yes")
}

// The library cannot be told to stop: a message that hangs is left behind, and keeps only its own channel busy.
func TestServiceThatHangs(t *testing.T) {
	t.Parallel()
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	hanging := serve(t, func(http.ResponseWriter, *http.Request) {
		arrived <- struct{}{}
		<-release
	})
	channel := New(gotify(hanging), alert.NewTransport(post.Egress{})).(*serviceChannel)
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
	channel := New(settings.Secret("smtp://user:password@"+listener.Addr().String()+"/?from=a@example.com&to=b@example.com"), alert.NewTransport(post.Egress{}))
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
		gotify(echo), "gotify://127.0.0.1:1/" + gotifyToken + "?disabletls=yes",
		"smtp://user:p%40s3cret@127.0.0.1:1/?from=a@example.com&to=b@example.com", "ntfy://user:s3cret@127.0.0.1:1/topic?scheme=http",
	} {
		err := New(raw, alert.NewTransport(post.Egress{})).Notify(t.Context(), alert.NewTest(time.Now()))
		if err == nil || strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), gotifyToken) {
			t.Errorf("%s: %v", Kind(string(raw)), err)
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
		"matrix://user:password@example.invalid":                                      "", // would log in
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
		if _, problem := ParseURL(url); problem != want {
			t.Errorf("%s: %q", url, problem)
		}
	}
	if _, problem := ParseURL("carrierpigeon://s3cret"); !strings.HasPrefix(problem, "begins with a service that is not offered; there are bark, discord") || strings.Contains(problem, "s3cret") {
		t.Errorf("%q", problem)
	}
}
