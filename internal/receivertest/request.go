package receivertest

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func at(name string, t time.Time) func(http.Header) {
	return With(name, t.UTC().Format("2006-01-02T15:04:05.000000Z"))
}

// Created sets when the event was created.
func Created(t time.Time) func(http.Header) { return at(webhook.CreatedAt, t) }

// NotAfter sets until when the sender sends the event.
func NotAfter(t time.Time) func(http.Header) { return at(webhook.NotAfter, t) }

const (
	// SecretText is the secret of the receivers, OtherText one that they do not have.
	SecretText = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="
	OtherText  = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDI="
)

// Secret returns the secret of [SecretText].
func Secret() webhook.Secret { return Must(webhook.ParseSecret(SecretText)) }

// OtherSecret returns the secret of [OtherText].
func OtherSecret() webhook.Secret { return Must(webhook.ParseSecret(OtherText)) }

// NewRequest is what a relay sends, except for what change does to its headers before they are
// signed.
func (e *Env) NewRequest(key, body string, change ...func(http.Header)) *http.Request {
	r, err := http.NewRequestWithContext(e.T.Context(), http.MethodPost, e.URL, strings.NewReader(body))
	pgtest.Must(e.T, err)
	r.GetBody = nil // the transport must not repeat a request on its own
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(webhook.IdempotencyKey, key)
	r.Header.Set(webhook.EventType, "invoice.created")
	r.Header.Set(webhook.Attempt, "1")
	for _, f := range change {
		f(r.Header)
	}
	webhook.Sign(r.Header, []byte(body), time.Now(), Secret())
	return r
}

// NewRequestTo is NewRequest to another receiver, which listens at url.
func (e *Env) NewRequestTo(url, key, body string, change ...func(http.Header)) *http.Request {
	r := e.NewRequest(key, body, change...)
	var err error
	if r.URL, err = r.URL.Parse(url); err != nil {
		e.T.Fatal(err)
	}
	return r
}

// With sets a header by which a test directs its handler.
func With(name, value string) func(http.Header) {
	return func(h http.Header) { h.Set(name, value) }
}

// Response is an answer read to its end.
type Response struct {
	Status int
	Header http.Header
	Body   string
}

// Do sends a request, which must be answered.
func (e *Env) Do(r *http.Request) Response {
	e.T.Helper()
	answer, err := e.Try(r)
	pgtest.Must(e.T, err)
	return answer
}

// Try sends a request.
func (e *Env) Try(r *http.Request) (Response, error) {
	resp, err := e.Client.Do(r)
	if err != nil {
		return Response{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return Response{resp.StatusCode, resp.Header, string(body)}, err
}

// Post sends an event as a relay does.
func (e *Env) Post(key, body string) Response {
	e.T.Helper()
	return e.Do(e.NewRequest(key, body))
}

// WantProblem asserts a refusal: its status, its stable type and its form.
func WantProblem(t testing.TB, got Response, status int, name string) {
	t.Helper()
	var p struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Detail string `json:"detail"`
		Status int    `json:"status"`
	}
	if err := json.Unmarshal([]byte(got.Body), &p); err != nil {
		t.Fatalf("status %d, body %q: %v", got.Status, got.Body, err)
	}
	if got.Status != status || p.Status != status || p.Type != "urn:outbox-relay:problem:"+name || p.Title == "" || p.Detail == "" {
		t.Errorf("status %d, problem %+v; want %d %s", got.Status, p, status, name)
	}
	if got := got.Header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("Content-Type %q", got)
	}
	wantRetry := status == http.StatusConflict || status == http.StatusServiceUnavailable
	if got := got.Header.Get("Retry-After"); (got == "1") != wantRetry {
		t.Errorf("Retry-After %q with status %d", got, status)
	}
}

// WantReplayed asserts the answer to a duplicate.
func WantReplayed(t testing.TB, got Response, status int, body string) {
	t.Helper()
	if got.Status != status || got.Body != body || got.Header.Get(webhook.Replayed) != "true" {
		t.Errorf("got %d %q %v; want %d %q replayed", got.Status, got.Body, got.Header, status, body)
	}
}

// WantFirst asserts the answer of a handler.
func WantFirst(t testing.TB, got Response, status int, body string) {
	t.Helper()
	if got.Status != status || got.Body != body || got.Header.Get(webhook.Replayed) != "" {
		t.Errorf("got %d %q %v; want %d %q, not replayed", got.Status, got.Body, got.Header, status, body)
	}
}

// SentTo says to which of its destinations a relay sends an event.
func SentTo(destination string) func(http.Header) {
	return With(webhook.Destination, destination)
}

// SignPlain signs as any Standard Webhooks sender does, with that project's own library.
func SignPlain(t testing.TB, r *http.Request, id, body string) {
	t.Helper()
	sender, err := standardwebhooks.NewWebhook(SecretText)
	pgtest.Must(t, err)
	now := time.Now()
	signature, err := sender.Sign(id, now, []byte(body))
	pgtest.Must(t, err)
	r.Header.Set(webhook.ID, id)
	r.Header.Set(webhook.Timestamp, strconv.FormatInt(now.Unix(), 10))
	r.Header.Set(webhook.Signature, signature)
}
