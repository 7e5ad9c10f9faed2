package consumertest_test

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/consumertest"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

const secretText = "whsec_b3V0Ym94LXJlbGF5LXRlc3Qtc2VjcmV0LTAwMDE="

// What NewRequest sends is the event that its receiver's handler gets.
func TestNewRequest(t *testing.T) {
	t.Parallel()
	created := time.Date(2026, 1, 31, 9, 15, 0, 123456000, time.UTC)
	whole := consumer.Event{
		IdempotencyKey: "invoice-4711-created", Type: "invoice.created", Version: 2, ID: 4711, CreatedAt: created, RelatedReference: "INV-4711",
		OrderingKey: "customer-42", Sequence: 4711, Attempt: 3, DeliveryID: "d-3", Destination: "logistics", NotAfter: time.Now().UTC().Add(time.Hour).Round(0), Replay: true,
		TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", TraceState: "vendor=1",
		Payload: []byte(`{"a":1}`),
	}
	least := consumer.Event{IdempotencyKey: "k", Type: "t", Payload: []byte{}}
	filled := least
	filled.Version, filled.Attempt, filled.CreatedAt = 1, 1, created // but for the time, which is that of the call
	var got consumer.Event
	cfg := consumer.Config{Receiver: "test", Secrets: []string{secretText}, Logger: slog.New(slog.DiscardHandler)}
	handler := receivertest.Must(consumer.New(pgtest.Pool(t, pgtest.New(t, migrations.Inbox)), cfg, func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
		got = event
		return nil
	}))
	send := func(r *http.Request) *httptest.ResponseRecorder {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, r)
		return answer
	}
	for name, c := range map[string]struct{ send, want consumer.Event }{"all of it": {whole, whole}, "the least": {least, filled}} {
		r, err := consumertest.NewRequest(t.Context(), "http://receiver/", c.send, "whsec_"+strings.Repeat("b", 44), secretText)
		pgtest.Must(t, err)
		if answer := send(r); answer.Code != http.StatusNoContent {
			t.Fatalf("%s: answered %d %s", name, answer.Code, answer.Body)
		}
		c.want.Receiver, c.want.Source = "test", "outbox"
		if name == "the least" {
			if got.CreatedAt.IsZero() {
				t.Error("the least event has no time")
			}
			got.CreatedAt = created
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: sent\n%+v, got\n%+v", name, c.want, got)
		}
	}

	r, err := consumertest.NewRequest(t.Context(), "http://receiver/", consumer.Event{IdempotencyKey: "unsigned", Type: "t"})
	pgtest.Must(t, err)
	if answer := send(r); answer.Code != http.StatusUnauthorized || !strings.Contains(answer.Body.String(), "signature-invalid") {
		t.Errorf("unsigned: answered %d %s", answer.Code, answer.Body)
	}
}

func TestNewRequestMistakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		url    string
		event  consumer.Event
		secret string
		want   string
	}{
		"no key":         {event: consumer.Event{Type: "t"}, want: "X-Idempotency-Key"},
		"a key of bytes": {event: consumer.Event{IdempotencyKey: "\x00", Type: "t"}, want: "X-Idempotency-Key"},
		"no type":        {event: consumer.Event{IdempotencyKey: "k"}, want: "Event.Type is empty"},
		"a type of more": {event: consumer.Event{IdempotencyKey: "k", Type: strings.Repeat("t", 256)}, want: "X-Outbox-Event-Type"},
		"a negative id":  {event: consumer.Event{IdempotencyKey: "k", Type: "t", ID: -1}, want: "X-Outbox-Event-Id"},
		"foreign":        {event: consumer.Event{IdempotencyKey: "k", Type: "t", Foreign: true}, want: "Foreign"},
		"a bad secret":   {event: consumer.Event{IdempotencyKey: "k", Type: "t"}, secret: "hunter2", want: "secret 0"},
		"a bad url":      {event: consumer.Event{IdempotencyKey: "k", Type: "t"}, url: "http://a b/", want: "invalid character"},
	} {
		_, err := consumertest.NewRequest(t.Context(), cmp.Or(c.url, "http://127.0.0.1/"), c.event, cmp.Or(c.secret, secretText))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
