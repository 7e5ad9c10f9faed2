package main

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

const path = "/webhooks/billing"

// signed is a request as Svix sends it, signed by the reference implementation of Standard
// Webhooks.
func signed(t *testing.T, e *exampletest.Example, id, body string, at time.Time) *http.Request {
	t.Helper()
	signer, err := standardwebhooks.NewWebhook(exampletest.Secret)
	testkit.Must(t, err)
	signature, err := signer.Sign(id, at, []byte(body))
	testkit.Must(t, err)
	r := e.Request(path, body)
	r.Header.Set("Svix-Id", id)
	r.Header.Set("Svix-Timestamp", strconv.FormatInt(at.Unix(), 10))
	r.Header.Set("Svix-Signature", signature)
	return r
}

func TestForeignEventsTakeEffectOnce(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices, "BILLING_SECRET="+exampletest.Secret)
	body := `{"type":"invoice.created","data":` + exampletest.Invoice("INV-1", "19.90") + `}`
	post := func(what string, r *http.Request, want int) exampletest.Answer {
		t.Helper()
		answer := e.Send(r)
		if answer.Status != want {
			t.Errorf("%s: answered %d %q, want %d", what, answer.Status, answer.Body, want)
		}
		return answer
	}
	now := time.Now()
	post("first time", signed(t, e, "msg_1", body, now), 204)
	if again := post("again", signed(t, e, "msg_1", body, now.Add(time.Second)), 204); again.Header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("again: %+v", again)
	}
	post("another type", signed(t, e, "msg_2", `{"type":"invoice.paid"}`, now), 204)
	post("no event", signed(t, e, "msg_3", `[]`, now), 422)
	post("another body under the key", signed(t, e, "msg_1", `{"type":"invoice.paid"}`, now), 422)
	post("old", signed(t, e, "msg_4", body, now.Add(-time.Hour)), 401)

	forged := signed(t, e, "msg_5", body, now)
	forged.Header.Set("Svix-Id", "msg_6") // a captured request under another key
	post("another key", forged, 401)
	unsigned := e.Request(path, body)
	unsigned.Header.Set("Svix-Id", "msg_7")
	post("unsigned", unsigned, 401)
	post("no key", e.Request(path, body), 400)
	both := signed(t, e, "msg_8", body, now)
	both.Header.Set("Webhook-Id", "msg_9") // the standard's names count where both are given, and here they do not verify
	post("both names", both, 401)

	if n := e.Count("SELECT count(*) FROM shipments"); n != 1 {
		t.Errorf("%d shipments, want 1", n)
	}
	if n := e.Count("SELECT count(*) FROM processed_events WHERE source = 'billing'"); n != 2 {
		t.Errorf("%d events remembered, want 2", n)
	}
}
