package relay

import (
	"bytes"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// What is wrong with the TLS of a receiver is repeated, since a certificate is renewed, and labelled.
func TestBrokenTLSIsLabelled(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	serve := func(configure func(*tls.Config)) string {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests.Add(1) }))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.TLS = &tls.Config{}
		configure(s.TLS)
		s.StartTLS()
		t.Cleanup(s.Close)
		return s.URL
	}
	plain := newReceiver(t, nil)
	hangUp := newRawServer(t, func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) })
	for name, c := range map[string]struct {
		url  string
		want policy.Reason
	}{
		"unknown authority":   {serve(func(*tls.Config) {}), policy.ReasonTLS},
		"TLS 1.0":             {serve(func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS10 }), policy.ReasonTLS},
		"no TLS at all":       {strings.Replace(plain.URL, "http:", "https:", 1), policy.ReasonTLS},
		"hangs up":            {strings.Replace(hangUp.url, "http:", "https:", 1), policy.ReasonNetwork},
		"HTTP to a TLS port":  {strings.Replace(serve(func(*tls.Config) {}), "https:", "http:", 1), policy.ReasonRejected},
		"nothing listens":     {"https://127.0.0.1:1/", policy.ReasonConnect},
		"name does not exist": {"https://does-not-exist.invalid/", policy.ReasonDNS},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if v := attemptAt(t, c.url); v.Reason != c.want || v.Message == "" {
				t.Errorf("%s %s %q, want %s", v.Outcome, v.Reason, v.Message, c.want)
			}
		})
	}
	t.Cleanup(func() {
		if n := requests.Load(); n != 0 {
			t.Errorf("%d requests over a connection that is not to be trusted", n)
		}
	})
}

// A handshake that stalls ends with the attempt's deadline.
func TestStalledHandshakeTimesOut(t *testing.T) {
	t.Parallel()
	stall := newRawServer(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	d := Config{Destinations: []post.Destination{to(strings.Replace(stall.url, "http:", "https:", 1))}}.withDefaults().Destinations[0]
	d.Timeout = 100 * time.Millisecond
	if v := attemptWith(t, d); v.Reason != policy.ReasonTimeout {
		t.Errorf("%s %q", v.Reason, v.Message)
	}
}

// Over HTTP/2 an attempt is one request too, with the same headers and body.
func TestHTTP2(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	var proto atomic.Value
	var got bytes.Buffer
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		proto.Store(r.Proto)
		_, _ = io.Copy(&got, r.Body)
		if requests.Load() == 2 {
			panic(http.ErrAbortHandler) // RST_STREAM
		}
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	l, err := laneTo(Config{Destinations: []post.Destination{to(s.URL)}}.withDefaults().Destinations[0])
	must(t, err)
	t.Cleanup(l.CloseIdleConnections)
	l.Transport.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig
	r := loneSenders(t)
	for i, want := range []policy.Reason{policy.ReasonOK, policy.ReasonNetwork, policy.ReasonOK} {
		d := order()
		d.leaseEnds = time.Now().Add(time.Hour)
		d.promiseEnds = d.leaseEnds
		if v := r.attempt(l, &d); v.Reason != want {
			t.Errorf("attempt %d: %s %q, want %s", i+1, v.Reason, v.Message, want)
		}
	}
	if requests.Load() != 3 || proto.Load() != "HTTP/2.0" || got.String() != strings.Repeat(`{"a":1e3}`, 3) {
		t.Errorf("%d requests over %v: %s", requests.Load(), proto.Load(), got.String())
	}
}
