package consumertest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// NewRequest returns the POST by which a relay would send event, with its Payload as the body, to
// url: for tests of receivers. It is signed with secrets, spelled as in [consumer.Config].Secrets;
// without one it is not signed. IdempotencyKey and Type are required. A zero Version or Attempt is
// 1, and a zero CreatedAt is now; Source is the receiver's and is not sent. The request can be
// given to a handler or to an http.Client, once, and within [consumer.Verify].Tolerance.
//
// It fails where no relay would send the event, such as for a key that is not 1 to 255 printable
// ASCII characters, and for Foreign, whose requests are not a relay's.
func NewRequest(ctx context.Context, url string, event consumer.Event, secrets ...string) (*http.Request, error) {
	if event.Foreign {
		return nil, errors.New("make request: the event is Foreign: sign a request as its sender does")
	}
	if event.Type == "" {
		return nil, errors.New("make request: Event.Type is empty: set it, such as to \"invoice.created\"")
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
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(webhook.IdempotencyKey, event.IdempotencyKey)
	said := headers.Event(event)
	headers.Write(r.Header, &said)
	if err := checkHeaders(ctx, r.Header); err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	webhook.Sign(r.Header, event.Payload, time.Now(), keys...)
	return r, nil
}

// checkHeaders asks a receiver whether it understands the headers of an event. Its store knows
// every event, so that it answers 200 if it does.
func checkHeaders(ctx context.Context, header http.Header) error {
	receive, err := store.Middleware(omniscient{}, store.Config{
		Config: consumer.Config{Receiver: "consumertest", Verify: consumer.Verify{AllowUnsigned: true}, Logger: slog.New(slog.DiscardHandler)},
	})
	if err != nil {
		return err
	}
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

// omniscient is a store that knows every event without a body.
type omniscient struct{}

func (omniscient) Acquire(context.Context, store.Claim, time.Duration) (store.Acquired, error) {
	return store.Acquired{Known: &store.Known{Hash: fmt.Sprintf("%x", sha256.Sum256(nil)), Status: http.StatusOK}}, nil
}

func (omniscient) Complete(context.Context, store.Claim, store.Known, time.Duration) error {
	return nil
}

func (omniscient) Release(context.Context, store.Claim) error { return nil }
