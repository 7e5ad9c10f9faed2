package consumertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// NewRequest returns the POST by which a relay would send event, with its Payload as the body, to url: for tests of receivers. It
// is signed with secrets, spelled as in [consumer.Config].Secrets; without one it is not signed. A zero Version or Attempt is
// 1, and a zero CreatedAt is now; Source is the receiver's and is not sent. The request can be given to a handler or to an
// http.Client, once, and within [consumer.Config].Tolerance.
//
// It fails where no relay would send the event, such as for a key that is not 1 to 255 printable ASCII characters, and for
// Foreign, whose requests are not a relay's.
func NewRequest(ctx context.Context, url string, event consumer.Event, secrets ...string) (*http.Request, error) {
	if event.Foreign {
		return nil, errors.New("make request: the event is Foreign: sign a request as its sender does")
	}
	if event.Type == "" {
		return nil, errors.New("make request: the event has no Type")
	}
	if event.Version == 0 {
		event.Version = 1
	}
	if event.Attempt == 0 {
		event.Attempt = 1
	}
	if event.CreatedAt.IsZero() {
		event.CreatedAt = time.Now()
	}
	keys := make([]webhook.Secret, 0, len(secrets))
	for i, text := range secrets {
		key, err := webhook.ParseSecret(text)
		if err != nil {
			return nil, fmt.Errorf("make request: secret %d: %w", i, err)
		}
		keys = append(keys, key)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(event.Payload))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	r.GetBody = nil // by which net/http would send it twice, on its own
	r.Header = headers(event)
	if err := checkHeaders(ctx, r.Header); err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	webhook.Sign(r.Header, event.Payload, time.Now(), keys...)
	return r, nil
}

// headers returns what a relay says of an event beside its signature.
func headers(event consumer.Event) http.Header {
	header := http.Header{}
	header.Set("Content-Type", "application/json")
	header.Set(webhook.IdempotencyKey, event.Key)
	set := func(name, value string) {
		if value != "" {
			header.Set(name, value)
		}
	}
	number := func(name string, n int64) {
		if n != 0 {
			set(name, strconv.FormatInt(n, 10))
		}
	}
	moment := func(name string, t time.Time) {
		if !t.IsZero() {
			set(name, t.UTC().Format(time.RFC3339Nano))
		}
	}
	set(webhook.EventType, event.Type)
	number(webhook.EventVersion, int64(event.Version))
	number(webhook.EventID, event.ID)
	moment(webhook.CreatedAt, event.CreatedAt)
	set(webhook.RelatedReference, event.RelatedReference)
	set(webhook.OrderingKey, event.OrderingKey)
	number(webhook.Sequence, event.Sequence)
	number(webhook.Attempt, int64(event.Attempt))
	set(webhook.DeliveryID, event.DeliveryID)
	moment(webhook.NotAfter, event.NotAfter)
	if event.Replay {
		set(webhook.Replay, "true")
	}
	set(webhook.TraceParent, event.TraceParent)
	set(webhook.TraceState, event.TraceState)
	return header
}

// checkHeaders asks a receiver whether it understands the headers of an event. Its store knows every event, so that it
// answers 200 if it does.
func checkHeaders(ctx context.Context, header http.Header) error {
	receive := consumer.MustMiddlewareStore(omniscient{}, consumer.StoreConfig{
		Config: consumer.Config{Receiver: "consumertest", AllowUnsigned: true, Logger: slog.New(slog.DiscardHandler)},
	})
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", http.NoBody)
	r.Header = header.Clone()
	answer := httptest.NewRecorder()
	receive(http.NotFoundHandler()).ServeHTTP(answer, r)
	if answer.Code == http.StatusOK {
		return nil
	}
	var problem struct {
		Title  string `json:"title"`
		Detail string `json:"detail"`
	}
	if err := json.Unmarshal(answer.Body.Bytes(), &problem); err != nil {
		return fmt.Errorf("a receiver would answer %d", answer.Code)
	}
	return fmt.Errorf("%s: %s", problem.Title, problem.Detail)
}

// omniscient is a store that knows every event.
type omniscient struct{}

func (omniscient) Acquire(_ context.Context, claim consumer.Claim, _ time.Duration) (consumer.Acquired, error) {
	return consumer.Acquired{Known: &consumer.Known{Hash: claim.Hash, Status: http.StatusOK}}, nil
}

func (omniscient) Complete(context.Context, consumer.Claim, int, time.Duration) error { return nil }

func (omniscient) Release(context.Context, consumer.Claim) error { return nil }
