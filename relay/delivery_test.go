package relay

import (
	"bytes"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/send"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// payload holds what jsonb would have changed: order, duplicates, number spelling, blanks, and
// \u0000, which it refuses.
const payload = "{\"b\": 1e3, \"a\" : 1,\n \"a\":2.50, \"nul\":\"\\u0000\", \"big\": 123456789012345678901234567890, \"lone\":\"\\ud800\", \"ü\":\"日本\"}"

const testSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

func secret(t testing.TB, text string) webhook.Secret {
	t.Helper()
	s, err := webhook.ParseSecret(text)
	relaytest.Must(t, err)
	return s
}

func TestOneEventsWay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	db.Exec(`INSERT INTO outbox (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, created_at)
		VALUES ('invoice.paid', 2, $1, 'inv-1.paid', 'customer 7', 'INV/1', '{"traceparent": "00-ab-cd-01"}', '2026-03-01 13:00:00.5+01')`, payload)
	destination := to(rc.URL + "/hooks?from=finance")
	destination.Headers = map[string]string{"Authorization": "Bearer b"}
	old, current := secret(t, testSecret), secret(t, "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
	destination.SigningSecrets = []webhook.Secret{old, current}
	cfg := config(db, destination)
	cfg.Version = "9.9"
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 1)

	requests := rc.All()
	if len(requests) != 1 {
		t.Fatalf("%d requests", len(requests))
	}
	got := requests[0]
	if got.Method != http.MethodPost || got.RequestURI != "/hooks?from=finance" || "http://"+got.Host != rc.URL {
		t.Errorf("%s %s at %s", got.Method, got.RequestURI, got.Host)
	}
	if string(got.Body) != payload {
		t.Errorf("body %q, want %q", got.Body, payload)
	}
	want := map[string]string{
		"Content-Type": "application/json", "User-Agent": "outbox-relay/9.9", "Authorization": "Bearer b", "Traceparent": "00-ab-cd-01",
		webhook.IdempotencyKey: "inv-1.paid", webhook.EventType: "invoice.paid", webhook.EventVersion: "2", webhook.EventID: "1",
		webhook.CreatedAt: "2026-03-01T12:00:00.500000Z", webhook.RelatedReference: "INV/1", webhook.OrderingKey: "customer 7",
		webhook.Sequence: "1", webhook.Attempt: "1", webhook.DeliveryID: "1-default-" + relaytest.Row[string](db, `SELECT claim::text FROM outbox_delivery`), webhook.ID: webhook.DeriveID("inv-1.paid"),
		webhook.Destination: "default",
		webhook.NotAfter:    got.Header.Get(webhook.NotAfter), // see TestPromiseIsKept
	}
	for name, value := range want {
		if values := got.Header.Values(name); len(values) != 1 || values[0] != value {
			t.Errorf("%s: %q, want %q", name, values, value)
		}
	}
	for name := range got.Header {
		if _, known := want[name]; !known && name != webhook.Timestamp && name != webhook.Signature && name != "Content-Length" {
			t.Errorf("%s: %q was not asked for", name, got.Header[name])
		}
	}
	for _, s := range []webhook.Secret{old, current} {
		if by, err := webhook.Verify(got.Header, got.Body, time.Now(), time.Minute, s); err != nil || by != webhook.VerifiedX1 {
			t.Errorf("signature: %d, %v", by, err)
		}
	}
	testkit.Equal(t, "signatures", strings.Count(got.Header.Get(webhook.Signature), ","), 4)

	ok := relaytest.Row[bool](db, `SELECT status = 'delivered' AND attempts = 1 AND claim > 0 AND rescues = 0 AND claimed_by IS NULL
		AND lease_expires_at IS NULL AND last_http_status = 204 AND last_error IS NULL AND last_reason IS NULL
		AND last_attempt_at <= delivered_at AND delivered_at <= now() FROM outbox_delivery`)
	if !ok {
		t.Error("the delivery is not settled as it should")
	}
	testkit.Equal(t, "attempts in the log of those that did not deliver", relaytest.Row[int](db, `SELECT count(*) FROM outbox_attempt`), 0)
	if a := sees(r.observer, func(o *observer) []send.Attempt { return o.attempts }); len(a) != 1 || a[0].Number != 1 || a[0].StatusCode != 204 || a[0].Outcome != policy.Delivered {
		t.Errorf("hook: %+v", a)
	}
}

func TestRetryThenSuccess(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte("try\x00 later \xff"))
		}
	})
	db.Insert(1, "key")
	d := to(rc.URL)
	d.Wire.Excerpts = post.ExcerptsText
	cfg := config(db, d)
	cfg.LogDelivered = true
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 1)

	requests := rc.All()
	claims := relaytest.Rows[string](db, `SELECT claim::text FROM outbox_attempt ORDER BY claim`)
	for i, want := range []string{"1", "2", "3"} {
		if i >= min(len(requests), len(claims)) || requests[i].Header.Get(webhook.Attempt) != want || requests[i].Key != "key-1" ||
			requests[i].Header.Get(webhook.DeliveryID) != "1-default-"+claims[i] || !bytes.Equal(requests[i].Body, requests[0].Body) {
			t.Fatalf("%d requests, the one at %d is not attempt %s", len(requests), i, want)
		}
	}
	if len(requests) != 3 || relaytest.Row[int](db, `SELECT attempts FROM outbox_delivery WHERE status = 'delivered'`) != 3 {
		t.Errorf("%d requests", len(requests))
	}
	log := relaytest.Rows[string](db, `SELECT concat_ws(' ', attempt, outcome, reason, http_status, error) FROM outbox_attempt ORDER BY id`)
	want := []string{
		"1 retry unavailable 503 503 Service Unavailable: try\ufffd later \ufffd",
		"2 retry unavailable 503 503 Service Unavailable: try\ufffd later \ufffd",
		"3 delivered ok 200",
	}
	if strings.Join(log, "\n") != strings.Join(want, "\n") {
		t.Errorf("the log is %q, want %q", log, want)
	}
}

// Larger payloads do not come with the claim; they are loaded one by one.
func TestLargePayloadsArriveByteForByte(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	sizes := []int{2, lane.InlinePayload - 1, lane.InlinePayload, lane.InlinePayload + 1, 100_000, 1 << 20}
	want := map[string]int{}
	for _, size := range sizes {
		// Multi-byte characters: the column counts bytes, and so must everything else.
		text := `"` + strings.Repeat("é", (size-2)/2) + strings.Repeat("x", size%2) + `"`
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', $1::text::json, md5($1::text))`, text)
		want[text] = 1
	}
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, len(sizes))
	for _, got := range rc.All() {
		want[string(got.Body)]--
	}
	for text, missing := range want {
		if missing != 0 {
			t.Errorf("the payload of %d bytes came %d times", len(text), 1-missing)
		}
	}
}

// One event to two destinations is two deliveries, and what one answers does not concern the other.
func TestDestinationsAreIndependent(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "bad", "good")
	bad, good := relaytest.NewReceiver(t, relaytest.Status(422)), relaytest.NewReceiver(t, nil)
	db.Insert(20, "key")
	a, b := named("bad", to(bad.URL)), named("good", to(good.URL))
	r := start(t, config(db, a, b))
	r.settles(t, policy.Delivered, 20)
	r.settles(t, policy.Fail, 20)
	if bad.Total() != 20 || good.Total() != 20 {
		t.Errorf("%d and %d requests", bad.Total(), good.Total())
	}
	got := relaytest.Rows[string](db, `SELECT concat_ws(' ', destination, status, attempts, last_http_status, last_reason, count(*)) FROM outbox_delivery
		GROUP BY destination, status, attempts, last_http_status, last_reason ORDER BY destination`)
	if strings.Join(got, ", ") != "bad failed 1 422 rejected 20, good delivered 1 204 20" {
		t.Errorf("%q", got)
	}
}
