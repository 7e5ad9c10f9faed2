package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// NewRequest returns the POST by which a relay would send event, with payload as its body, to url: for tests of receivers. It
// is signed with secrets, spelled as in [Config].Secrets; without one it is not signed. A zero Version or Attempt is 1, and a
// zero CreatedAt is now; Source is the receiver's and is not sent. The request can be given to a handler or to an http.Client,
// once, and within [Config].Tolerance.
//
// It fails where no relay would send the event, such as for a key that is not 1 to 255 printable ASCII characters, and for
// Foreign, whose requests are not a relay's.
func NewRequest(ctx context.Context, url string, event Event, payload []byte, secrets ...string) (*http.Request, error) {
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
	header := recordedHeaders(&event, nil)
	header.Set("Content-Type", "application/json")
	if _, problem := eventOf(header, event.Key); problem != nil {
		return nil, fmt.Errorf("make request: %w", problem)
	}
	webhook.Sign(header, payload, time.Now(), keys...)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(payload))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	r.Header = header
	r.GetBody = nil // by which net/http would send it twice, on its own
	return r, nil
}
