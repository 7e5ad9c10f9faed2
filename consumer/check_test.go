package consumer

import (
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

const fuzzSecret = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="

// headersOf writes an event as a relay does.
func headersOf(event headers.Event) http.Header {
	if event.Foreign {
		return http.Header{webhook.ID: {event.IdempotencyKey}}
	}
	h := http.Header{webhook.IdempotencyKey: {event.IdempotencyKey}}
	headers.Write(h, &event)
	return h
}

// FuzzCheck lets anything come as the headers of an event. Whatever is accepted fits the table, the
// log and the next header it is written to, and is the same event when it is written and read
// again.
func FuzzCheck(f *testing.F) {
	settings := map[string]*settings{}
	for name, cfg := range map[string]Config{
		"signed": {Receiver: "test", Secrets: []string{fuzzSecret}}, "unsigned": {Receiver: "test", Verify: Verify{AllowUnsigned: true}}, "foreign": {Receiver: "test", Secrets: []string{fuzzSecret}, Verify: Verify{AcceptForeign: true}},
	} {
		s, err := cfg.complete()
		pgtest.Must(f, err)
		settings[name] = s
	}
	secret, err := webhook.ParseSecret(fuzzSecret)
	pgtest.Must(f, err)
	f.Add("k", "", "invoice.created", "1", "4711", "2026-01-31T09:15:00.123456Z", "INV-1", "a", "true", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", false)
	f.Add("", "msg_1", "", "", "", "", "", "", "", "", false)
	f.Add("k", webhook.DeriveID("k"), "größe", "-1", "9223372036854775808", "tomorrow", "\x00", strings.Repeat("k", 256), "TRUE", "\xff", true)
	f.Add(strings.Repeat("k", 255), "k", " a ", "2147483648", "+1", "9999-12-31T23:59:59-23:59", " ", "~", "0", "", true)
	f.Add(" k", "evt.1", "a\tb", "01", "0x1", "0000-01-01T00:00:00Z", "\u00a0", "a\nb", "", "", false)
	f.Add("0", "0", "", "", "", "", "", "", "0", "", true)
	f.Fuzz(func(t *testing.T, key, id, eventType, version, number, moment, reference, orderingKey, replay, trace string, twice bool) {
		h := http.Header{}
		for name, value := range map[string]string{
			webhook.IdempotencyKey: key, webhook.ID: id, webhook.EventType: eventType, webhook.EventVersion: version,
			webhook.EventID: number, webhook.Sequence: number, webhook.Attempt: version, webhook.CreatedAt: moment, webhook.NotAfter: moment,
			webhook.RelatedReference: reference, webhook.OrderingKey: orderingKey, webhook.DeliveryID: reference, webhook.Destination: reference, webhook.Replay: replay,
			webhook.TraceParent: trace, webhook.TraceState: trace,
		} {
			if value != "" {
				h.Set(name, value)
			}
		}
		if twice {
			h.Add(webhook.OrderingKey, orderingKey)
			twice = len(h.Values(webhook.OrderingKey)) > 1 // an empty one was not sent the first time
		}
		for name, s := range settings {
			sent := h.Clone()
			if name != "unsigned" { // a sender that has the secret, and whatever it writes
				webhook.Sign(sent, []byte("{}"), time.Now(), secret)
			}
			r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{}"))
			r.Header = sent
			rq, refusal := s.check(httptest.NewRecorder(), r)
			if refusal != nil {
				if refusal.Status < 400 || refusal.Status > 499 || !strings.HasPrefix(refusal.Type, problemPrefix) || !sameEvent(Event(rq.Event), Event{}) {
					t.Errorf("%s: refused with %+v beside %+v", name, refusal, rq.Event)
				}
				continue
			}
			event := Event(rq.Event)
			switch {
			case event.Foreign && (name == "signed" || event.IdempotencyKey != id || !sameEvent(event, Event{Receiver: "test", Source: "outbox", IdempotencyKey: id, Version: 1, Foreign: true})):
				t.Errorf("%s: %+v is foreign", name, event)
			case !event.Foreign && (event.IdempotencyKey != key || event.Type != eventType || event.OrderingKey != orderingKey || twice):
				t.Errorf("%s: %+v is not what was sent", name, event)
			}
			for _, text := range []string{event.IdempotencyKey, event.Type, event.RelatedReference, event.OrderingKey, event.DeliveryID, event.Destination} {
				if text != "" && !headers.Printable(text) || event.IdempotencyKey == "" {
					t.Errorf("%s: %q was accepted", name, text)
				}
			}
			if event.Version < 1 || event.Version > 1<<31-1 || event.ID < 0 || event.Sequence < 0 || event.Attempt < 0 {
				t.Errorf("%s: the numbers of %+v were accepted", name, event)
			}
			verified, refusal := settings["unsigned"].verify(headersOf(rq.Event), nil, time.Now())
			again := Event(verified)
			again.Receiver, again.Source = event.Receiver, event.Source
			if refusal != nil || !sameEvent(again, event) {
				t.Errorf("%s: %+v came back as %+v, %v", name, event, again, refusal)
			}
		}
	})
}

// sameEvent compares times as moments, wherever their clocks stand.
func sameEvent(a, b Event) bool {
	same := a.CreatedAt.Equal(b.CreatedAt) && a.NotAfter.Equal(b.NotAfter)
	a.CreatedAt, a.NotAfter, b.CreatedAt, b.NotAfter = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	return same && reflect.DeepEqual(a, b)
}
