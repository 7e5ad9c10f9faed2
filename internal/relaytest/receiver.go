package relaytest

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A Receiver is an HTTP server that remembers every request, with its whole body, before it
// answers.
type Receiver struct {
	*httptest.Server

	mu       sync.Mutex
	killed   bool // its sender may be, in the middle of a request
	requests []Request
	byKey    map[string]int
}

// A Request is one that a [Receiver] has read.
type Request struct {
	*http.Request
	Body   []byte
	Key    string // idempotency key
	Number int    // 1 for the first with this key
}

// NewReceiver starts a receiver until the test ends; a nil answer is 204.
func NewReceiver(t testing.TB, answer func(http.ResponseWriter, Request)) *Receiver {
	t.Helper()
	rc := &Receiver{byKey: map[string]int{}}
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

func (rc *Receiver) mayBeKilled() bool {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return rc.killed
}

// Kill kills a relay that may be sending.
func (rc *Receiver) Kill(t testing.TB, sender *exec.Cmd) {
	t.Helper()
	rc.mu.Lock()
	rc.killed = true
	rc.mu.Unlock()
	Must(t, sender.Process.Kill())
}

func (rc *Receiver) remember(r *http.Request) (Request, error) {
	body, err := io.ReadAll(r.Body)
	rc.mu.Lock()
	defer rc.mu.Unlock()
	key := r.Header.Get(webhook.IdempotencyKey)
	rc.byKey[key]++
	got := Request{Request: r, Body: body, Key: key, Number: rc.byKey[key]}
	rc.requests = append(rc.requests, got)
	return got, err
}

// All returns the requests so far, in the order in which they came.
func (rc *Receiver) All() []Request {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return slices.Clone(rc.requests)
}

// Total returns how many requests came so far.
func (rc *Receiver) Total() int {
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return len(rc.requests)
}

// Keys returns the requests' keys, in the order in which they came.
func (rc *Receiver) Keys() (keys []string) {
	for _, r := range rc.All() {
		keys = append(keys, r.Key)
	}
	return keys
}

// Numbers returns the numbers behind a prefix in the keys of the requests, such as "1 2 2" of
// "k-1", "k-2" and "k-2".
func (rc *Receiver) Numbers(prefix string) string {
	var numbers []string
	for _, key := range rc.Keys() {
		if number, of := strings.CutPrefix(key, prefix+"-"); of {
			numbers = append(numbers, number)
		}
	}
	return strings.Join(numbers, " ")
}

// Status answers every request with one status.
func Status(code int) func(http.ResponseWriter, Request) {
	return func(w http.ResponseWriter, _ Request) { w.WriteHeader(code) }
}

// A Gate holds requests back until it is opened, and says which wait.
type Gate struct {
	Arrived chan Request
	Open    func()
	opened  chan struct{}
	over    <-chan struct{} // the test
}

// NewGate returns a gate that is open at the latest when the test ends.
func NewGate(t testing.TB) *Gate {
	g := &Gate{Arrived: make(chan Request, 10_000), opened: make(chan struct{}), over: t.Context().Done()}
	g.Open = sync.OnceFunc(func() { close(g.opened) })
	return g
}

// Pass waits until the gate is open.
func (g *Gate) Pass(r Request) {
	g.Arrived <- r
	select {
	case <-g.opened:
	case <-g.over:
	}
}

// NewGated returns a receiver at which the first request of each of the keys waits, or of every
// event if none is given.
func NewGated(t testing.TB, keys ...string) (*Gate, *Receiver) {
	t.Helper()
	g := NewGate(t)
	return g, NewReceiver(t, func(_ http.ResponseWriter, r Request) {
		if r.Number == 1 && (len(keys) == 0 || slices.Contains(keys, r.Key)) {
			g.Pass(r)
		}
	})
}

// Buffer collects what several goroutines write.
type Buffer = testkit.Buffer
