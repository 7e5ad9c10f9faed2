package post_test

import (
	"cmp"
	"context"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

const testSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// payloads are sent in the two ways that requests go over plain HTTP.
var payloads = map[string]string{"directly": `{"a":1e3}`, "by net/http": `{"a":"` + strings.Repeat("x", 40<<10) + `"}`}

func secret(t testing.TB, text string) webhook.Secret {
	t.Helper()
	s, err := webhook.ParseSecret(text)
	relaytest.Must(t, err)
	return s
}

// order is the message that the tests change.
func order() post.Message {
	version := 3
	eventType, key, ordering, reference := "invoice.paid", "inv-1.paid", "customer-7", "INV/2026/1"
	return post.Message{
		EventID: 42, Destination: "default", Fence: 9, Attempt: 3,
		Event: post.Event{
			EventType: &eventType, Version: &version, Key: &key, OrderingKey: &ordering, RelatedReference: &reference,
			CreatedAt: pgtype.Timestamptz{Time: time.Date(2026, 3, 1, 13, 0, 0, 123456000, time.FixedZone("", 3600)), Valid: true},
			Payload:   []byte(`{"a":1e3}`),
		},
	}
}

// destinationOf returns a destination with its defaults, and with time for slow machines.
func destinationOf(url string, wire post.Wire, egress post.Egress) post.Destination {
	return post.Destination{Name: "default", URL: url, Timeout: relaytest.Patience, Wire: wire}.WithDefaults(egress)
}

// endpointOf returns an endpoint until the test ends.
func endpointOf(t testing.TB, d post.Destination) *post.Endpoint {
	t.Helper()
	e, err := post.NewEndpoint(d, "")
	relaytest.Must(t, err)
	t.Cleanup(e.CloseIdleConnections)
	return e
}

// endpointAt returns an endpoint of a destination that has nothing but a URL.
func endpointAt(t testing.TB, url string) *post.Endpoint {
	t.Helper()
	return endpointOf(t, destinationOf(url, post.Wire{}, post.Egress{}))
}

// first decides on the first attempt.
func first(v policy.Result, moved policy.Responses) policy.Decision {
	return policy.Decide(v, policy.Circumstances{Attempt: 1, Retry: policy.RetryPolicy{}.WithDefaults(), Responses: moved})
}

// exchange makes one attempt.
func exchange(t testing.TB, e *post.Endpoint) policy.Decision {
	t.Helper()
	return exchangePayload(t, e, string(order().Payload))
}

func exchangePayload(t testing.TB, e *post.Endpoint, payload string) policy.Decision {
	t.Helper()
	m := order()
	m.Payload = []byte(payload)
	return first(e.Deliver(t.Context(), m, nil), e.Destination.Responses)
}

// exchangeWith makes one attempt at a destination, and no other.
func exchangeWith(t testing.TB, d post.Destination) policy.Decision {
	t.Helper()
	e := endpointOf(t, d)
	defer e.CloseIdleConnections()
	return exchange(t, e)
}

// exchangeAt makes one attempt at a URL.
func exchangeAt(t testing.TB, url string) policy.Decision {
	t.Helper()
	return exchangeWith(t, destinationOf(url, post.Wire{}, post.Egress{}))
}

// exchangeMany makes attempts through one endpoint, by as many senders at once, and returns what
// became of each by event id.
func exchangeMany(t testing.TB, e *post.Endpoint, senders, attempts int) map[int64]policy.Decision {
	t.Helper()
	var mu sync.Mutex
	decisions := make(map[int64]policy.Decision, attempts)
	var next atomic.Int64
	var running sync.WaitGroup
	for range senders {
		running.Go(func() {
			for id := next.Add(1); id <= int64(attempts); id = next.Add(1) {
				m := order()
				m.EventID = id
				ctx, cancel := context.WithTimeout(t.Context(), relaytest.Patience)
				v := first(e.Deliver(ctx, m, nil), e.Destination.Responses)
				cancel()
				mu.Lock()
				decisions[id] = v
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return decisions
}

// requestOf returns how a message is expressed for a destination, at a fixed time.
func requestOf(t testing.TB, d post.Destination, m post.Message) (*http.Request, error) {
	t.Helper()
	d.Timeout = cmp.Or(d.Timeout, post.DefaultTimeout)
	e, err := post.NewEndpoint(d, "1.2.3")
	relaytest.Must(t, err)
	req, err := post.NewRequest(e, m, time.Unix(1_700_000_000, 0))
	if err != nil {
		return nil, err
	}
	return req.HTTP(m.Payload), nil
}

// meeting answers the first n requests once all of them are there, so that each has a connection of
// its own, and later ones at once.
func meeting(n int64) func(http.ResponseWriter, relaytest.Request) {
	var arrived atomic.Int64
	all := make(chan struct{})
	return func(_ http.ResponseWriter, r relaytest.Request) {
		if arrived.Add(1) == max(n, 1) {
			close(all)
		}
		select {
		case <-all:
		case <-r.Context().Done():
		}
	}
}

// connect makes n attempts at once.
func connect(t testing.TB, e *post.Endpoint, n int, payload string) {
	t.Helper()
	var connecting sync.WaitGroup
	for range n {
		connecting.Go(func() { exchangePayload(t, e, payload) })
	}
	connecting.Wait()
}
