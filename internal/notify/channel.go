package notify

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Services returns the kinds of services that are offered, in order.
func Services() []string { return slices.Sorted(maps.Keys(services)) }

// Kind returns the service that a URL names: "teams" of teams+https://….
func Kind(raw string) string {
	scheme, _, _ := strings.Cut(raw, "://")
	kind, _, _ := strings.Cut(strings.ToLower(scheme), "+")
	return kind
}

// A channel sends alerts to one service.
type channel struct {
	url       settings.Secret
	transport *alert.Transport
}

// New returns the channel of a service's URL, which [ParseURL] has accepted.
func New(raw settings.Secret, transport *alert.Transport) alert.Channel {
	return channel{raw, transport}
}

// Name implements [alert.Channel].
func (c channel) Name() string { return alert.ChannelName(Kind(string(c.url)), string(c.url)) }

// Notify implements [alert.Channel]. It returns when the service has accepted or refused the
// message, or when ctx ends.
func (c channel) Notify(ctx context.Context, a alert.Alert) error {
	problem, err := send(ctx, string(c.url), a, c.transport)
	if problem != "" && err == nil {
		return errors.New("send alert: the channel's url " + problem)
	}
	return err
}

// ParseURL returns a service's URL, or what is wrong with it. It repeats nothing of the URL.
func ParseURL(text string) (settings.Secret, string) {
	if _, problem := settings.ParseText(text); problem != "" {
		return "", problem
	}
	if problem, _ := send(context.Background(), text, alert.Alert{}, nil); problem != "" {
		return "", problem
	}
	return settings.Secret(text), ""
}
