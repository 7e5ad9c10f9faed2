package relay

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// The receiver keeps its connection open, reads the next request on it, and closes instead of answering.
// net/http would send such a POST again by itself, as it carries X-Idempotency-Key: the wire would see more requests
// than the relay knows of.
func TestBrokenReusedConnectionIsOneRequest(t *testing.T) {
	t.Parallel()
	const events = 6
	db := newDatabase(t)
	var requests, connections, reused atomic.Int64
	s := newRawServer(t, func(conn net.Conn) {
		connections.Add(1)
		in := bufio.NewReader(conn)
		for n := 1; ; n++ {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, r.Body)
			requests.Add(1)
			if n == 2 {
				reused.Add(1)
				return // closes the connection
			}
			_, _ = fmt.Fprint(conn, "HTTP/1.1 204 No Content\r\n\r\n")
		}
	})
	d := to(s.url)
	d.MaxInFlight = 1
	db.insert(events, "key")
	cfg := db.config(d)
	cfg.LogDelivered = true
	r := start(t, cfg)
	r.settles(t, policy.Delivered, events)
	r.stop()

	attempts := row[int64](db, `SELECT sum(attempts) FROM outbox_delivery`)
	logged := row[int64](db, `SELECT count(*) FROM outbox_attempt`)
	if requests.Load() != attempts || attempts != logged || reused.Load() == 0 {
		t.Errorf("%d requests on the wire, %d attempts counted, %d logged; %d of %d connections broke when reused",
			requests.Load(), attempts, logged, reused.Load(), connections.Load())
	}
	if got := row[string](db, `SELECT string_agg(DISTINCT reason, ',') FROM outbox_attempt WHERE outcome = 'retry'`); got != "network" {
		t.Errorf("reasons %s", got)
	}
}

// Followed with a GET, a redirect ends at a login page whose 200 looks like success; followed with the
// POST, it hands body, key and signature to another host.
func TestRedirectsAreNeverFollowed(t *testing.T) {
	t.Parallel()
	elsewhere := newReceiver(t, nil)
	for code := 300; code <= 308; code++ {
		for name, location := range map[string]string{
			"to another server": elsewhere.URL + "/login", "to metadata": "http://169.254.169.254/latest/", "without location": "",
			"to a script": "javascript:alert(1)", "to itself": "/",
		} {
			t.Run(strconv.Itoa(code)+" "+name, func(t *testing.T) {
				t.Parallel()
				rc := newReceiver(t, func(w http.ResponseWriter, _ request) {
					if location != "" {
						w.Header().Set("Location", location)
					}
					w.WriteHeader(code)
				})
				v := attemptAt(t, rc.URL)
				if v.Outcome != policy.Retry || v.Reason != policy.ReasonRedirect || v.StatusCode != code || !strings.Contains(v.Message, "never followed") {
					t.Errorf("%+v", v)
				}
				if rc.total() != 1 {
					t.Errorf("%d requests", rc.total())
				}
			})
		}
	}
	t.Cleanup(func() { // after the parallel subtests
		if n := elsewhere.total(); n != 0 {
			t.Errorf("%d requests reached the other server", n)
		}
	})
}

// attemptAt makes one POST at url through everything but the database.
func attemptAt(t testing.TB, url string) policy.Decision {
	t.Helper()
	d := Config{Destinations: []post.Destination{to(url)}}.withDefaults().Destinations[0]
	d.Timeout = patience
	return attemptWith(t, d)
}

func attemptWith(t testing.TB, destination post.Destination) policy.Decision {
	t.Helper()
	l, err := laneTo(destination)
	must(t, err)
	defer l.CloseIdleConnections()
	r := loneSenders(t)
	d := order()
	d.leaseEnds = time.Now().Add(time.Hour)
	d.promiseEnds = d.leaseEnds
	return first(r.attempt(l, &d), destination.Responses)
}

// What left the relay verifies at the other end, headers included.
func TestWhatArrivesVerifies(t *testing.T) {
	t.Parallel()
	key := secret(t, testSecret)
	rc := newReceiver(t, nil)
	d := Config{Destinations: []post.Destination{to(rc.URL)}}.withDefaults().Destinations[0]
	d.SigningSecrets = []webhook.Secret{key}
	if v := attemptWith(t, d); v.Outcome != policy.Delivered {
		t.Fatalf("%+v", v)
	}
	got := rc.all()[0]
	if by, err := webhook.Verify(got.header, got.body, time.Now(), time.Minute, key); err != nil || by != webhook.VerifiedX1 {
		t.Errorf("%d, %v", by, err)
	}
	got.header.Set(webhook.EventType, "invoice.cancelled")
	if by, _ := webhook.Verify(got.header, got.body, time.Now(), time.Minute, key); by == webhook.VerifiedX1 {
		t.Error("another event type verifies too")
	}
}
