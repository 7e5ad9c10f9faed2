package metrics

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// Strangers who ask for metrics and take no answer keep no scraper from one.
func TestSecurityStalledScrapesKeepNoScraper(t *testing.T) {
	t.Parallel()
	var names []string
	for i := range DefaultMost {
		names = append(names, fmt.Sprint("destination-", i))
	}
	server := httptest.NewUnstartedServer(New(Config{Version: "v1", Destinations: names, PollInterval: time.Second}).Handler())
	server.Config.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		relaytest.Must(t, conn.(*net.TCPConn).SetWriteBuffer(4096)) // less than an answer
		return ctx
	}
	server.Start()
	defer server.Close()
	for range mostScrapes {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
		relaytest.Must(t, err)
		defer conn.Close()
		relaytest.Must(t, conn.(*net.TCPConn).SetReadBuffer(4096))
		_, err = io.WriteString(conn, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
		relaytest.Must(t, err)
		_, err = conn.Read(make([]byte, 1)) // the rest is not taken
		relaytest.Must(t, err)
	}
	for range 2 {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/metrics", http.NoBody)
		relaytest.Must(t, err)
		response, err := server.Client().Do(r)
		relaytest.Must(t, err)
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK || len(body) < 10_000 {
			t.Errorf("%d with %d bytes, %v", response.StatusCode, len(body), err)
		}
		relaytest.Must(t, response.Body.Close())
	}
}
