package post_test

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The receiver keeps its connection open, reads the next request on it, and closes instead of
// answering. net/http would send such a POST again by itself, as it carries X-Idempotency-Key: the
// wire would see more requests than the relay knows of.
func TestBrokenReusedConnectionIsOneRequest(t *testing.T) {
	t.Parallel()
	s := relaytest.NewRawServer(t, func(s *relaytest.RawServer, conn net.Conn) {
		for n := 1; s.Read(conn) == nil && n < 2; n++ {
			_, _ = fmt.Fprint(conn, "HTTP/1.1 204 No Content\r\n\r\n")
		}
	})
	for way, payload := range payloads {
		e := endpointAt(t, s.URL)
		before := s.Requests.Load()
		for i, want := range []policy.Reason{policy.ReasonOK, policy.ReasonNetwork, policy.ReasonOK, policy.ReasonNetwork} {
			v := exchangePayload(t, e, payload)
			if n := s.Requests.Load() - before; v.Reason != want || !v.Posted || n != int64(i+1) {
				t.Errorf("%s, attempt %d: %s %q, want %s; %d requests on the wire", way, i+1, v.Reason, v.Message, want, n)
			}
		}
	}
}

// Followed with a GET, a redirect ends at a login page whose 200 looks like success; followed with
// the POST, it hands body, key and signature to another host.
func TestRedirectsAreNeverFollowed(t *testing.T) {
	t.Parallel()
	elsewhere := relaytest.NewReceiver(t, nil)
	for code := 300; code <= 308; code++ {
		for name, location := range map[string]string{
			"to another server": elsewhere.URL + "/login", "to metadata": "http://169.254.169.254/latest/", "without location": "",
			"to a script": "javascript:alert(1)", "to itself": "/",
		} {
			t.Run(strconv.Itoa(code)+" "+name, func(t *testing.T) {
				t.Parallel()
				rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
					if location != "" {
						w.Header().Set("Location", location)
					}
					w.WriteHeader(code)
				})
				e := endpointAt(t, rc.URL)
				for n, payload := range []string{`{}`, `"` + strings.Repeat("x", 1<<20) + `"`} { // the second is sent by net/http
					v := exchangePayload(t, e, payload)
					if v.Outcome != policy.Retry || v.Reason != policy.ReasonRedirect || v.StatusCode != code || !strings.Contains(v.Message, "never followed") {
						t.Errorf("%+v", v)
					}
					testkit.Equal(t, "requests", rc.Total(), n+1)
				}
			})
		}
	}
	t.Cleanup(func() { // after the parallel subtests
		testkit.Equal(t, "requests reached the other server", elsewhere.Total(), 0)
	})
}
