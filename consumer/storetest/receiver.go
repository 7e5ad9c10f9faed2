package storetest

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// secretText signs the requests of all tests.
const secretText = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE=" //nolint:gosec // protects nothing

// patience ends a test that would hang. No assertion depends on it.
const patience = 30 * time.Second

// world is one test: a memory, the effects that handlers have had, and receivers.
type world struct {
	*testing.T
	subject Subject
	memory  Memory

	mu      sync.Mutex     // guards counted
	counted map[string]int // effects outside of the memory, by key
}

// atomic reports whether the effect and its memory are one.
func (w *world) atomic() bool { return w.subject.Promises.EffectIsAtomic }

// effect is what every handler does for its event.
func (w *world) effect(r *http.Request) {
	key := consumer.EventFrom(r.Context()).Key
	if w.atomic() {
		if err := w.memory.Effect(r.Context(), key); err != nil {
			w.Errorf("effect of %s: %v", key, err)
		}
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counted[key]++
}

// wantEffects asserts how often the effect of key has happened.
func (w *world) wantEffects(key string, atomic, otherwise int) {
	w.Helper()
	w.mu.Lock()
	got, want := w.counted[key], otherwise
	w.mu.Unlock()
	if w.atomic() {
		got, want = w.memory.Effects(w, key), atomic
	}
	if got != want {
		w.Errorf("%d effects of %s, want %d", got, key, want)
	}
}

// receiver is one process that receives: the middleware, a real server and a real client.
type receiver struct {
	*world
	url     string
	client  *http.Client
	reports chan consumer.Report
}

// receiver starts one more receiver of the test's memory.
func (w *world) receiver(cfg store.Config, handler http.HandlerFunc) *receiver {
	w.Helper()
	if w.memory.Middleware == nil {
		w.memory = w.subject.New(w)
	}
	rc := &receiver{world: w, reports: make(chan consumer.Report, 100)}
	cfg.Receiver, cfg.Secrets = "test", []string{secretText}
	cfg.Observe = func(_ context.Context, r consumer.Report) { rc.reports <- r }
	cfg.Logger = slog.New(slog.DiscardHandler)
	if cfg.CommitTimeout == 0 {
		cfg.CommitTimeout = patience
	}
	server := httptest.NewUnstartedServer(w.memory.Middleware(cfg)(handler))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // aborted handlers
	server.Start()
	w.Cleanup(server.Close)
	rc.url, rc.client = server.URL, server.Client()
	rc.client.Timeout = patience
	rc.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return rc
}

// works is the ordinary handler: its effect, and a response that tells which event it was for.
func (w *world) works(out http.ResponseWriter, r *http.Request) {
	w.effect(r)
	out.Header().Set("X-Handler", "ran")
	out.WriteHeader(http.StatusCreated)
	write(out, done(consumer.EventFrom(r.Context()).Key))
}

func done(key string) string { return `{"done":"` + key + `"}` }

// write answers. Whether it arrives shows where the answer is read.
func write(w http.ResponseWriter, text string) { _, _ = io.WriteString(w, text) }

// request is what a relay sends, except for what change does to its headers before they are signed.
func (rc *receiver) request(key, body string, change ...func(http.Header)) *http.Request {
	rc.Helper()
	r, err := http.NewRequestWithContext(rc.Context(), http.MethodPost, rc.url, strings.NewReader(body))
	if err != nil {
		rc.Fatal(err)
	}
	r.GetBody = nil // the transport must not repeat a request on its own
	r.Header.Set(webhook.IdempotencyKey, key)
	r.Header.Set(webhook.EventType, "invoice.created")
	for _, f := range change {
		f(r.Header)
	}
	secret, err := webhook.ParseSecret(secretText)
	if err != nil {
		rc.Fatal(err)
	}
	webhook.Sign(r.Header, []byte(body), time.Now(), secret)
	return r
}

// with sets a header, by which a test tells its handler what to do.
func with(name, value string) func(http.Header) {
	return func(h http.Header) { h.Set(name, value) }
}

// response is an answer read to its end.
type response struct {
	status int
	header http.Header
	body   string
}

func (rc *receiver) try(r *http.Request) (response, error) {
	resp, err := rc.client.Do(r) //nolint:gosec // to the server that receiver started
	if err != nil {
		return response{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return response{resp.StatusCode, resp.Header, string(body)}, err
}

func (rc *receiver) do(r *http.Request) response {
	rc.Helper()
	got, err := rc.try(r)
	if err != nil {
		rc.Fatal(err)
	}
	return got
}

func (rc *receiver) post(key, body string) response {
	rc.Helper()
	return rc.do(rc.request(key, body))
}

// begin sends a request whose answer comes later. The caller reads one answer.
func (rc *receiver) begin(r *http.Request) <-chan response {
	answer := make(chan response, 1)
	var sending sync.WaitGroup
	sending.Go(func() {
		got, err := rc.try(r)
		if err != nil {
			rc.Error(err)
		}
		answer <- got
	})
	rc.Cleanup(sending.Wait)
	return answer
}

// wantResult asserts what the receiver reported of the earliest request not yet asked about.
func (rc *receiver) wantResult(want consumer.Result) consumer.Report {
	rc.Helper()
	select {
	case report := <-rc.reports:
		if report.Result != want {
			rc.Errorf("result %q (%v), want %q", report.Result, report.Err, want)
		}
		return report
	case <-rc.Context().Done():
		rc.Fatal("no result")
	}
	return consumer.Report{}
}

func (w *world) wantFirst(got response, status int, body string) {
	w.Helper()
	if got.status != status || got.body != body || got.header.Get(webhook.Replayed) != "" {
		w.Errorf("got %d %.200q %v; want %d %.200q, not replayed", got.status, got.body, got.header, status, body)
	}
}

func (w *world) wantReplayed(got response, status int) {
	w.Helper()
	if got.status != status || got.body != "" || got.header.Get(webhook.Replayed) != "true" {
		w.Errorf("got %d %.200q %v; want %d without a body, replayed", got.status, got.body, got.header, status)
	}
}

// wantProblem asserts a refusal: its status, its stable type and its form.
func (w *world) wantProblem(got response, status int, name string) {
	w.Helper()
	var p struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Detail string `json:"detail"`
		Status int    `json:"status"`
	}
	if err := json.Unmarshal([]byte(got.body), &p); err != nil {
		w.Fatalf("status %d, body %.200q: %v", got.status, got.body, err)
	}
	if got.status != status || p.Status != status || p.Type != "urn:outbox-relay:problem:"+name || p.Title == "" || p.Detail == "" {
		w.Errorf("status %d, problem %+v; want %d %s", got.status, p, status, name)
	}
	wantRetry := status == http.StatusConflict || status == http.StatusServiceUnavailable
	if got := got.header.Get("Retry-After"); (got == "1") != wantRetry {
		w.Errorf("Retry-After %q with status %d", got, status)
	}
}
