package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

const (
	path   = "/webhooks/stripe"
	secret = "whsec_of_stripe"
)

func event(id, eventType string) string {
	return fmt.Sprintf(`{"id":%q,"type":%q,"created":%d,"data":{"object":{"number":"INV-1","amount_paid":1990}}}`,
		id, eventType, time.Now().Unix())
}

// sign returns one element of Stripe-Signature.
func sign(secret, body string, at time.Time) string {
	mac := hmac.New(sha256.New, []byte(secret))
	fmt.Fprintf(mac, "%d.%s", at.Unix(), body)
	return fmt.Sprintf("v1=%x", mac.Sum(nil))
}

func TestForeignEventsTakeEffectOnce(t *testing.T) {
	t.Parallel()
	e := exampletest.Start(t, exampletest.Invoices, "STRIPE_SECRET="+secret)
	post := func(what, body, signature string, want int) exampletest.Answer {
		t.Helper()
		r := e.Request(path, body)
		if signature != "" {
			r.Header.Set("Stripe-Signature", signature)
		}
		answer := e.Send(r)
		if answer.Status != want {
			t.Errorf("%s: answered %d %q, want %d", what, answer.Status, answer.Body, want)
		}
		return answer
	}
	now := time.Now()
	at := func(at time.Time) string { return fmt.Sprintf("t=%d,", at.Unix()) }
	body := event("evt_1", "invoice.paid")

	post("first time", body, at(now)+sign(secret, body, now), http.StatusNoContent)
	later := now.Add(time.Second)
	again := post("again, while a secret is rotated", body, at(later)+sign("another", body, later)+","+sign(secret, body, later), http.StatusNoContent)
	if again.Header.Get("Idempotency-Replayed") != "true" {
		t.Errorf("again: %+v", again)
	}
	other := event("evt_2", "customer.created")
	post("of no concern", other, at(now)+sign(secret, other, now), http.StatusNoContent)

	fresh := event("evt_3", "invoice.paid")
	old := now.Add(-time.Hour)
	for what, signature := range map[string]string{
		"unsigned":            "",
		"another secret":      at(now) + sign("another", fresh, now),
		"another body's":      at(now) + sign(secret, body, now),
		"another time's":      at(now) + sign(secret, fresh, now.Add(time.Second)),
		"old":                 at(old) + sign(secret, fresh, old),
		"without a time":      sign(secret, fresh, now),
		"of another version":  at(now) + "v0=" + sign(secret, fresh, now)[len("v1="):],
		"no hexadecimal text": at(now) + "v1=zz",
	} {
		post(what, fresh, signature, http.StatusUnauthorized)
	}
	nameless := event("", "invoice.paid")
	post("without an id", nameless, at(now)+sign(secret, nameless, now), http.StatusBadRequest)

	if n := e.Count("SELECT count(*) FROM shipments WHERE invoice = 'INV-1' AND total = 19.90"); n != 1 {
		t.Errorf("%d shipments, want 1", n)
	}
	if n := e.Count("SELECT count(*) FROM shipments"); n != 1 {
		t.Errorf("%d shipments in all, want 1", n)
	}
	if n := e.Count("SELECT count(*) FROM processed_events WHERE source = 'stripe' AND idempotency_key IN ('evt_1', 'evt_2')"); n != 2 {
		t.Errorf("%d events remembered, want 2", n)
	}
}
