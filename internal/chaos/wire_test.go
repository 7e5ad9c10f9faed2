package chaos

import (
	"bytes"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// What a wire does to a request on purpose.
const (
	refused = "refused"    // 500, and the receiver never sees it
	unfit   = "unfit"      // 422, likewise: of events whose key begins so
	busy    = "busy"       // 429, likewise
	undone  = "undone"     // the receiver accepted it, and the relay is answered 500
	unheard = "unanswered" // the receiver accepted it, and the connection is closed instead of an answer
	hung    = "hung"       // the receiver accepted it, and the answer is later than the relay waits
)

// A wire stands between the relays' links and the receivers. It records each request, and hands it to one of the receivers in turn.
type wire struct {
	history   *history.History
	seed      uint64
	share     atomic.Int64 // of requests that are tampered with, in percent
	refuse    atomic.Int64 // so many of the next requests are refused
	alerts    atomic.Int64 // of failed deliveries, at the path /alert
	turn      atomic.Int64
	receivers [receivers]atomic.Pointer[string] // where they listen; nil: nowhere yet
	transport http.Transport
	addr      string
}

func newWire(t *testing.T, h *history.History, seed uint64) *wire {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	w := &wire{history: h, seed: seed, addr: listener.Addr().String()}
	w.transport.MaxIdleConnsPerHost = 64
	server := &http.Server{Handler: w, ReadHeaderTimeout: time.Minute} // longer than a relay is frozen
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // until it is closed
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-served
		w.transport.CloseIdleConnections()
	})
	return w
}

// tamper chooses what is done to one attempt, the same for the same seed.
func (w *wire) tamper(delivery, key string) string {
	switch {
	case strings.HasPrefix(key, unfit):
		return unfit
	case w.refuse.Load() > 0 && w.refuse.Add(-1) >= 0:
		return refused
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(delivery))
	random := rand.New(rand.NewPCG(w.seed, h.Sum64()))
	if random.Int64N(100) >= w.share.Load() {
		return ""
	}
	return []string{refused, busy, undone, unheard, hung}[random.IntN(5)]
}

func (w *wire) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/alert" {
		if body, err := io.ReadAll(r.Body); err == nil && bytes.Contains(body, []byte(`"rule":"failed"`)) {
			w.alerts.Add(1)
		}
		return
	}
	delivery, key := r.Header.Get(webhook.DeliveryID), r.Header.Get(webhook.IdempotencyKey)
	note := w.tamper(delivery, key)
	done := w.history.Invoke(history.Record{Kind: history.Post, Who: r.URL.Query().Get("relay"), Key: key, Delivery: delivery, Note: note})
	switch note {
	case refused:
		done(history.Fail, http.StatusInternalServerError)
		http.Error(rw, note, http.StatusInternalServerError)
		return
	case unfit:
		done(history.Fail, http.StatusUnprocessableEntity)
		http.Error(rw, note, http.StatusUnprocessableEntity)
		return
	case busy:
		done(history.Fail, http.StatusTooManyRequests)
		http.Error(rw, note, http.StatusTooManyRequests)
		return
	}
	status, header, body, err := w.forward(r)
	if err != nil {
		done(history.Unknown, 0)
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}
	switch {
	case note == undone:
		done(history.Fail, status)
		http.Error(rw, note, http.StatusInternalServerError)
		return
	case note == unheard:
		done(history.Unknown, status)
		panic(http.ErrAbortHandler)
	case note == hung:
		done(history.Unknown, status)
		select {
		case <-r.Context().Done(): // the relay has hung up
		case <-time.After(2 * timeout):
		}
		panic(http.ErrAbortHandler)
	case status < 300:
		done(history.OK, status)
	default:
		done(history.Fail, status)
	}
	maps.Copy(rw.Header(), header)
	rw.WriteHeader(status)
	_, _ = rw.Write(body) // a relay that has gone is no failure of the wire
}

// forward hands a request to a receiver. A whole answer or none: the receiver may die in the middle of one.
func (w *wire) forward(r *http.Request) (status int, header http.Header, body []byte, err error) {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host = "http", *w.receivers[w.turn.Add(1)%receivers].Load()
	answer, err := w.transport.RoundTrip(out)
	if err != nil {
		return 0, nil, nil, err
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(answer.Body)
	return answer.StatusCode, answer.Header, body, err
}
