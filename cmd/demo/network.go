package main

import (
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A fault is what goes wrong with one request.
type fault string

const (
	faultNone   fault = ""
	faultLate   fault = "late"   // committed, and answered later than some callers wait
	faultRefuse fault = "refuse" // the effect is written, then the answer is 500: it is rolled back
	faultLose   fault = "lose"   // committed, and the connection is closed instead of an answer
)

// faults says which share of requests, from 0 to 1, suffers which fault.
type faults struct{ Late, Refuse, Lose float64 }

// latest is how late a late answer is at most.
const latest = 2700 * time.Millisecond

// pick draws the fault of one attempt, the same for the same seed, and how late the answer is.
func (f faults) pick(seed uint64, delivery string) (fault, time.Duration) {
	h := fnv.New64a()
	_, _ = h.Write([]byte(delivery))
	share := rand.New(rand.NewPCG(seed, h.Sum64())).Float64()
	switch {
	case share < f.Late:
		return faultLate, time.Duration(share / f.Late * float64(latest))
	case share < f.Late+f.Refuse:
		return faultRefuse, 0
	case share < f.Late+f.Refuse+f.Lose:
		return faultLose, 0
	}
	return faultNone, 0
}

// A request is one POST on the wire.
type request struct {
	key, delivery string
	attempt       int
	relay         string // the life that sent it
	at            time.Time
	fault         fault
	status        int // of the receiver's answer; 0: there was none
	replayed      bool
	answeredAt    time.Time
}

// network is the wire between the relays and logistics. It notes every request, and makes answers
// late or loses them.
type network struct {
	faults    faults
	seed      uint64                 // of the faults
	calm      atomic.Bool            // there are no more faults
	addr      string                 // of the relays' destination
	receiver  atomic.Pointer[string] // where the present life of logistics listens; nil: nowhere yet
	server    http.Server
	transport http.Transport

	mu       sync.Mutex // guards requests
	requests []*request
}

// open returns when relays can connect.
func (n *network) open() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("open the network: %w", err)
	}
	n.addr = listener.Addr().String()
	n.server = http.Server{Handler: n, ReadHeaderTimeout: 10 * time.Second}
	n.transport.MaxIdleConnsPerHost = 64
	go func() { _ = n.server.Serve(listener) }() // until close
	return nil
}

func (n *network) close() {
	_ = n.server.Close() // no request waits for an answer
	n.transport.CloseIdleConnections()
}

// refuseHeader makes logistics refuse an event after its work.
const refuseHeader = "Demo-Refuse"

func (n *network) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	attempt, _ := strconv.Atoi(r.Header.Get(webhook.Attempt)) // a fake one is for the checker to find
	req := &request{
		key: r.Header.Get(webhook.IdempotencyKey), delivery: r.Header.Get(webhook.DeliveryID), attempt: attempt,
		relay: r.URL.Query().Get("relay"), at: time.Now(),
	}
	var late time.Duration
	if !n.calm.Load() {
		req.fault, late = n.faults.pick(n.seed, req.delivery)
	}
	n.mu.Lock()
	n.requests = append(n.requests, req)
	n.mu.Unlock()
	r = r.Clone(r.Context())
	r.URL.Scheme, r.URL.Host = "http", *n.receiver.Load()
	if req.fault == faultRefuse {
		r.Header.Set(refuseHeader, "true")
	}
	// A whole answer or none: the receiver may die in the middle of one.
	answer, err := n.transport.RoundTrip(r)
	var body []byte
	if err == nil {
		body, err = io.ReadAll(answer.Body)
		_ = answer.Body.Close() // all of it was read
	}
	if err != nil {
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}
	n.mu.Lock()
	req.status, req.replayed, req.answeredAt = answer.StatusCode, answer.Header.Get(webhook.Replayed) != "", time.Now()
	n.mu.Unlock()
	if req.fault == faultLose && answer.StatusCode < 300 {
		panic(http.ErrAbortHandler)
	}
	_ = sleep.For(r.Context(), late) // ends early when the relay hangs up
	maps.Copy(w.Header(), answer.Header)
	w.WriteHeader(answer.StatusCode)
	_, _ = w.Write(body)
}

// seen returns the requests up to now.
func (n *network) seen() (requests []request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.requests {
		requests = append(requests, *r)
	}
	return requests
}
