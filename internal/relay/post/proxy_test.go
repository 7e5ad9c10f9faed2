package post_test

import (
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A proxy that answers CONNECT, or forwards; it counts both.
type proxy struct {
	*httptest.Server
	connects, forwards atomic.Int64
	credential         atomic.Value
}

func newProxy(t testing.TB, refuse int) *proxy {
	t.Helper()
	p := &proxy{}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.credential.Store(r.Header.Get("Proxy-Authorization"))
		if refuse != 0 {
			w.WriteHeader(refuse)
			return
		}
		if r.Method != http.MethodConnect {
			p.forwards.Add(1)
			if r.URL.Host == "" {
				t.Error("the proxy is not told the destination")
			}
			w.WriteHeader(http.StatusNoContent)
			return
		}
		p.connects.Add(1)
		up, err := net.Dial("tcp", r.Host)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer up.Close()
		down, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer down.Close()
		_, _ = fmt.Fprint(down, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			_, _ = io.Copy(up, down)
			_ = up.Close()
		}()
		_, _ = io.Copy(down, up)
	}))
	t.Cleanup(func() {
		p.CloseClientConnections()
		p.Close()
	})
	return p
}

// A proxy that is configured is used, for http and for https, and TLS still ends at the
// destination.
func TestConfiguredProxy(t *testing.T) {
	t.Parallel()
	ca := newAuthority()
	var requests atomic.Int64
	url := secureServer(t, ca.serverConfig(), &requests)
	p := newProxy(t, 0)
	egress := post.Egress{Proxy: strings.Replace(p.URL, "http://", "http://user:pass@", 1)}
	if v := exchangeWith(t, destinationOf(url, post.Wire{TLS: ca.trusts()}, egress)); v.Outcome != policy.Delivered {
		t.Errorf("https: %s %q", v.Reason, v.Message)
	}
	if want := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:pass")); p.credential.Load() != want {
		t.Errorf("the proxy got %v", p.credential.Load())
	}
	if v := exchangeWith(t, destinationOf(url, post.Wire{TLS: newAuthority().trusts()}, egress)); v.Reason != policy.ReasonTLS {
		t.Errorf("another authority: %s %q", v.Reason, v.Message)
	}
	if v := exchangeWith(t, destinationOf("http://receiver.internal/", post.Wire{}, egress)); v.Outcome != policy.Delivered {
		t.Errorf("http: %s %q", v.Reason, v.Message)
	}
	if v := exchangeWith(t, destinationOf(url, post.Wire{TLS: ca.trusts(), Proxy: post.NoProxy}, egress)); v.Outcome != policy.Delivered {
		t.Errorf("none: %s %q", v.Reason, v.Message)
	}
	if v := exchangeWith(t, destinationOf(url, post.Wire{TLS: ca.trusts(), Proxy: p.URL}, post.Egress{Proxy: "http://127.0.0.1:1"})); v.Outcome != policy.Delivered {
		t.Errorf("its own: %s %q", v.Reason, v.Message)
	}
	if p.connects.Load() != 3 || p.forwards.Load() != 1 || requests.Load() != 3 {
		t.Errorf("%d connects, %d forwards, %d requests", p.connects.Load(), p.forwards.Load(), requests.Load())
	}
}

// What a proxy itself says no to, and that its address is judged like any other.
func TestSecurityProxyThatRefuses(t *testing.T) {
	t.Parallel()
	const url = "https://receiver.internal/"
	for name, c := range map[string]struct {
		proxy   string
		egress  post.Egress
		want    policy.Reason
		message string
	}{
		"asks for a credential": {proxy: newProxy(t, 407).URL, want: policy.ReasonConnect, message: "the proxy answered 407 Proxy Authentication Required"},
		"does not allow it":     {proxy: newProxy(t, 403).URL, want: policy.ReasonConnect, message: "the proxy answered 403 Forbidden"},
		"cannot reach it":       {proxy: newProxy(t, 502).URL, want: policy.ReasonConnect, message: "the proxy answered 502 Bad Gateway"},
		"metadata":              {proxy: "http://169.254.169.254:80", want: policy.ReasonEgress, message: "not a permitted destination"},
		"private":               {proxy: newProxy(t, 0).URL, egress: post.Egress{AllowPrivate: []netip.Prefix{}}, want: policy.ReasonEgress, message: "not within egress.allow_private"},
		"nothing listens":       {proxy: "http://127.0.0.1:1", want: policy.ReasonConnect, message: "connection refused"},
	} {
		c.egress.Proxy = c.proxy
		v := exchangeWith(t, destinationOf(url, post.Wire{}, c.egress))
		t.Logf("%-22s %-7s %-8s %s", name, v.Outcome, v.Reason, v.Message)
		if v.Outcome != policy.Retry || v.Reason != c.want || !strings.Contains(v.Message, c.message) {
			t.Errorf("%s: %s %s %q, want %s %q", name, v.Outcome, v.Reason, v.Message, c.want, c.message)
		}
	}
}

// The environment's proxy would be dialled instead of the destination, past every check.
func TestSecurityEnvironmentProxyIsIgnored(t *testing.T) {
	proxy := relaytest.NewReceiver(t, nil)
	rc := relaytest.NewReceiver(t, nil)
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("http_proxy", proxy.URL)
	if v := exchangeAt(t, rc.URL); v.Outcome != policy.Delivered {
		t.Errorf("%s %q", v.Reason, v.Message)
	}
	if endpointAt(t, "http://receiver.test/").Transport.Proxy != nil {
		t.Error("a proxy is asked for")
	}
	if proxy.Total() != 0 || rc.Total() != 1 {
		t.Errorf("%d requests at the proxy", proxy.Total())
	}
}
