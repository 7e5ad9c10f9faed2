package relay

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A receiver is an HTTP server that remembers every request, with its whole body, before it answers.
type receiver struct {
	*httptest.Server

	mu       sync.Mutex
	killed   bool // its sender may be, in the middle of a request
	requests []request
	byKey    map[string]int
}

type request struct {
	method, target, host string
	header               http.Header
	body                 []byte
	key                  string
	number               int // 1 for the first with this key
}

// newReceiver starts a receiver; a nil answer is 204.
func newReceiver(t testing.TB, answer func(w http.ResponseWriter, r request)) *receiver {
	t.Helper()
	rc := &receiver{byKey: map[string]int{}}
	rc.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, err := rc.remember(r)
		switch {
		case errors.Is(err, io.ErrUnexpectedEOF) && rc.mayBeKilled():
		case err != nil:
			t.Errorf("receiver: read body: %v", err)
		case answer != nil:
			answer(w, got)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	t.Cleanup(func() {
		rc.CloseClientConnections()
		rc.Close()
	})
	return rc
}

func (rc *receiver) mayBeKilled() bool {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return rc.killed
}

// kill kills a relay that may be sending.
func (rc *receiver) kill(t testing.TB, sender *exec.Cmd) {
	t.Helper()
	rc.mu.Lock()
	rc.killed = true
	rc.mu.Unlock()
	must(t, sender.Process.Kill())
}

func (rc *receiver) remember(r *http.Request) (request, error) {
	body, err := io.ReadAll(r.Body)
	rc.mu.Lock()
	defer rc.mu.Unlock()
	key := r.Header.Get(webhook.IdempotencyKey)
	rc.byKey[key]++
	got := request{
		method: r.Method, target: r.RequestURI, host: r.Host, header: r.Header.Clone(), body: body,
		key: key, number: rc.byKey[key],
	}
	rc.requests = append(rc.requests, got)
	return got, err
}

// all returns the requests so far, in the order in which they came.
func (rc *receiver) all() []request {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return append([]request(nil), rc.requests...)
}

// total returns how many requests came so far.
func (rc *receiver) total() int {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return len(rc.requests)
}

// keys returns the requests' keys, in the order in which they came.
func (rc *receiver) keys() []string {
	var keys []string
	for _, r := range rc.all() {
		keys = append(keys, r.key)
	}
	return keys
}

// status answers every request with one status.
func status(code int) func(http.ResponseWriter, request) {
	return func(w http.ResponseWriter, _ request) { w.WriteHeader(code) }
}

// A gate lets no one through until it is opened, and says who waits.
type gate struct {
	arrived chan request
	opened  chan struct{}
	open    func()
	over    <-chan struct{} // the test
}

// newGate returns a gate that is open at the latest when the test ends.
func newGate(t testing.TB) *gate {
	g := &gate{arrived: make(chan request, 10_000), opened: make(chan struct{}), over: t.Context().Done()}
	g.open = sync.OnceFunc(func() { close(g.opened) })
	return g
}

func (g *gate) pass(r request) {
	g.arrived <- r
	select {
	case <-g.opened:
	case <-g.over:
	}
}
