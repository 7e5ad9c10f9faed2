package alert

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/rs/zerolog"
)

// Slack returns a channel that posts to a Slack incoming webhook
// (https://api.slack.com/messaging/webhooks). What people copy is shown as it is, as code.
func Slack(url string, transport *Transport) Channel {
	return jsonChannel{name: ChannelName("slack", url), url: url, transport: transport, body: func(a Alert) any {
		sign := ":rotating_light: "
		if a.ResolvedAt != nil {
			sign = ":white_check_mark: "
		}
		// Slack reads &, < and > as markup.
		return map[string]string{"text": sign + strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(a.SlackText())}
	}}
}

// Webhook returns a channel that POSTs alerts as JSON: the fields of [Alert], its state (firing or
// resolved), a text, and while it lasts a remedy and a command that shows more. The text is fit for
// a chat; the fields are printable, with mentions and links as they were stored.
func Webhook(url string, transport *Transport) Channel {
	return jsonChannel{name: ChannelName("webhook", url), url: url, transport: transport, body: func(a Alert) any {
		printable := a.printable()
		remedy, command := "", "" // there is nothing to do any more
		if a.ResolvedAt == nil {
			remedy, command = printable.Remedy(unmarked), printable.Command()
		}
		return struct {
			Alert
			State   string `json:"state"`
			Text    string `json:"text"`
			Remedy  string `json:"remedy,omitempty"`
			Command string `json:"command,omitempty"`
		}{printable, a.State(), a.Text(), remedy, command}
	}}
}

// ChannelName tells channels of one kind apart, on every relay alike, without giving the URL away.
func ChannelName(kind, url string) string {
	sum := sha256.Sum256([]byte(url))
	return kind + "-" + hex.EncodeToString(sum[:4])
}

type jsonChannel struct {
	name, url string
	transport *Transport
	body      func(Alert) any
}

func (c jsonChannel) Name() string { return c.name }

func (c jsonChannel) Notify(ctx context.Context, alert Alert) error {
	body, err := json.Marshal(c.body(alert))
	if err != nil {
		return fmt.Errorf("encode alert: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("make alert request: the channel's url cannot be used") // the error repeats it, and it is a secret
	}
	req.Header.Set("Content-Type", "application/json")
	_, err = c.transport.Exchange(req, mask.OfURL(req.URL))
	return err
}

// logChannel is the channel that is always there.
type logChannel struct{ log zerolog.Logger }

func (logChannel) Name() string { return "log" }

func (c logChannel) Notify(_ context.Context, a Alert) error {
	a = a.printable()
	level := zerolog.WarnLevel
	if a.ResolvedAt != nil {
		level = zerolog.InfoLevel
	}
	entry := c.log.WithLevel(level). //nolint:zerologlint // sent below
						Str("rule", a.Rule).Str("state", a.State()).Str("subject", a.Subject).Int64("count", a.Count).
						Time("opened_at", a.OpenedAt)
	if a.ResolvedAt != nil {
		entry = entry.Time("resolved_at", *a.ResolvedAt)
	}
	if a.FirstEventID != 0 {
		entry = entry.Int64("first_event_id", a.FirstEventID)
	}
	if a.FirstError != "" {
		entry = entry.Str("first_error", a.FirstError)
	}
	entry.Str("text", a.Text()).Msg("alert")
	return nil
}
