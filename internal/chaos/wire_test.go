package chaos

import (
	"bytes"
	"cmp"
	"encoding/json"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
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
	refused = "refused"     // 500, and the receiver never sees it
	unfit   = history.Unfit // 422, likewise: of events whose key begins so
	busy    = "busy"        // 429, likewise, with a time to wait
	undone  = history.Undone
	unheard = "unanswered" // the receiver accepted it, and the connection is closed instead of an answer
	hung    = "hung"       // the receiver accepted it, and the answer is later than the relay waits
)

var refusals = map[string]int{refused: http.StatusInternalServerError, unfit: http.StatusUnprocessableEntity, busy: http.StatusTooManyRequests}

// A wire stands between the relays' links and the receivers. It records each request, and hands it
// to one of the receivers in turn.
type wire struct {
	t         *testing.T
	history   *history.History
	seed      uint64
	share     atomic.Int64 // of requests that are tampered with, in percent
	refuse    atomic.Int64 // so many of the next requests are refused
	batched   atomic.Int64 // events that came in batches
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
	w := &wire{t: t, history: h, seed: seed, addr: listener.Addr().String()}
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
		w.alert(r)
		return
	}
	if isAgedAndDue(r.Header.Get(webhook.IdempotencyKey)) {
		rw.Header().Set(webhook.AcceptPost, webhook.BatchType) // or a relay whose first answer this is sends no batches
		return
	}
	note := w.tamper(cmp.Or(r.Header.Get(webhook.DeliveryID), r.Header.Get(webhook.ID)), r.Header.Get(webhook.IdempotencyKey))
	receiver := int(w.turn.Add(1) % receivers)
	done, err := w.invoke(r, note, receiver)
	if err != nil {
		panic(http.ErrAbortHandler) // the relay has died in the middle of its request
	}
	if status, refuses := refusals[note]; refuses {
		done(history.Fail, status, nil)
		if note == busy {
			rw.Header().Set("Retry-After", strconv.Itoa(int(retryAfter/time.Second)))
		}
		http.Error(rw, note, status)
		return
	}
	status, header, body, err := w.forward(r, receiver)
	if err != nil {
		done(history.Unknown, 0, nil)
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}
	switch {
	case note == undone:
		done(history.Fail, status, body)
		http.Error(rw, note, http.StatusInternalServerError)
		return
	case note == unheard:
		done(history.Unknown, status, body)
		panic(http.ErrAbortHandler)
	case note == hung:
		done(history.Unknown, status, body)
		select {
		case <-r.Context().Done(): // the relay has hung up
		case <-time.After(2 * timeout):
		}
		panic(http.ErrAbortHandler)
	}
	done("", status, body)
	maps.Copy(rw.Header(), header)
	rw.WriteHeader(status)
	_, _ = rw.Write(body) // a relay that has gone is no failure of the wire
}

// alert records what relays tell people about the destination.
func (w *wire) alert(r *http.Request) {
	var said struct {
		Rule, Subject, State, Relay string
		OpenedAt                    string `json:"opened_at"`
		Repeated                    bool
	}
	if err := json.NewDecoder(r.Body).Decode(&said); err != nil || said.Repeated || said.Subject != "default" {
		return // its relay has died meanwhile
	}
	w.history.Invoke(history.Record{Kind: history.Alert, Who: said.Relay, Key: strings.Join([]string{said.Rule, said.State, said.OpenedAt}, " ")})(history.OK, http.StatusOK, "")
	if said.Rule == "failed" {
		w.alerts.Add(1)
	}
}

func outcomeOf(status int) history.Outcome {
	if status < 300 {
		return history.OK
	}
	return history.Fail
}

// invoke records a request, or one for each event of a batch. The returned function records what
// came back; if the outcome is empty, it is what the status says. The answer to a batch has the
// status of each event.
func (w *wire) invoke(r *http.Request, note string, receiver int) (done func(o history.Outcome, status int, answer []byte), err error) {
	relay := r.URL.Query().Get("relay")
	invoke := func(key, delivery string) history.Return {
		return w.history.Invoke(history.Record{Kind: history.Post, Who: relay, Key: key, Delivery: delivery, Claimed: w.claimed(delivery), Receiver: receiverRole(receiver), Note: note})
	}
	if !webhook.IsBatch(r.Header) {
		done := invoke(r.Header.Get(webhook.IdempotencyKey), r.Header.Get(webhook.DeliveryID))
		return func(o history.Outcome, status int, _ []byte) { done(cmp.Or(o, outcomeOf(status)), status, "") }, nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	size, err := webhook.BatchSize(r.Header)
	var events []webhook.Envelope
	if err == nil {
		events, err = webhook.ParseBatch(body, size)
	}
	if err != nil {
		w.t.Errorf("%s sent a batch that came whole and that nobody can read: %v", relay, err)
		return nil, err
	}
	w.batched.Add(int64(len(events)))
	each := map[string]history.Return{}
	for _, e := range events {
		key := e.Header[webhook.IdempotencyKey]
		if isAgedAndDue(key) {
			continue
		}
		each[key] = invoke(key, e.Header[webhook.DeliveryID])
	}
	return func(o history.Outcome, status int, answer []byte) {
		if status == http.StatusOK {
			for key, result := range webhook.ParseBatchResults(answer) {
				if done, sent := each[key]; sent {
					done(cmp.Or(o, outcomeOf(result.Status)), result.Status, "")
					delete(each, key)
				}
			}
			o, status = history.Unknown, 0 // of events without an answer
		}
		for _, done := range each {
			done(cmp.Or(o, outcomeOf(status)), status, "")
		}
	}, nil
}

// claimed returns when the claim of a delivery id was made: its number is the time.
func (w *wire) claimed(delivery string) time.Duration {
	micros, err := strconv.ParseInt(delivery[strings.LastIndexByte(delivery, '-')+1:], 10, 64)
	if err != nil {
		w.t.Errorf("the delivery id %q does not end with the number of a claim", delivery)
	}
	return time.UnixMicro(micros).Sub(w.history.Began)
}

// forward hands a request to one receiver. A whole answer or none: that may die in the middle
// of one.
func (w *wire) forward(r *http.Request, receiver int) (status int, header http.Header, body []byte, err error) {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host = "http", *w.receivers[receiver].Load()
	answer, err := w.transport.RoundTrip(out)
	if err != nil {
		return 0, nil, nil, err
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(answer.Body)
	return answer.StatusCode, answer.Header, body, err
}
