package relay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// An Alert tells that deliveries to one destination failed for good.
type Alert struct {
	Rule         string    `json:"rule"`      // "failed"
	Subject      string    `json:"subject"`   // the destination
	Count        int64     `json:"count"`     // how often since OpenedAt
	OpenedAt     time.Time `json:"opened_at"` // when the first of them happened
	FirstEventID int64     `json:"first_event_id,string"`
	FirstError   string    `json:"first_error"`
}

// Text says in one paragraph what happened and which command shows more.
func (a Alert) Text() string {
	noun := "deliveries"
	if a.Count == 1 {
		noun = "delivery"
	}
	return fmt.Sprintf("%d %s to %q failed for good since %s. First: event %d: %s. Look further: %s",
		a.Count, noun, a.Subject, a.OpenedAt.UTC().Format("2006-01-02 15:04:05 UTC"), a.FirstEventID, a.FirstError, a.Command())
}

// Command returns the command that shows what the alert is about.
func (a Alert) Command() string {
	return "outbox-relay events list --status failed --destination " + a.Subject
}

// A Channel carries alerts to people. Notify may be called again with the same alert if it fails, and must respect ctx.
type Channel interface {
	// Name of the channel in logs and metrics; unique among the configured channels.
	Name() string
	// Notify sends one alert and returns nil once the other side has taken it.
	Notify(ctx context.Context, alert Alert) error
}

// Slack returns a channel that posts to a Slack incoming webhook
// (https://api.slack.com/messaging/webhooks).
func Slack(url string) Channel {
	return jsonChannel{name: channelName("slack", url), url: url, body: func(a Alert) any {
		// Slack reads &, < and > as markup.
		return map[string]string{"text": ":rotating_light: " + strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(a.Text())}
	}}
}

// Webhook returns a channel that POSTs alerts as JSON: the fields of [Alert], a text, and a command that shows more.
func Webhook(url string) Channel {
	return jsonChannel{name: channelName("webhook", url), url: url, body: func(a Alert) any {
		return struct {
			Alert
			Text    string `json:"text"`
			Command string `json:"command"`
		}{a, a.Text(), a.Command()}
	}}
}

// channelName tells channels of one kind apart, on every relay alike, without giving the URL away.
func channelName(kind, url string) string {
	sum := sha256.Sum256([]byte(url))
	return kind + "-" + hex.EncodeToString(sum[:4])
}

type jsonChannel struct {
	name, url string
	body      func(Alert) any
}

func (c jsonChannel) Name() string { return c.name }

func (c jsonChannel) Notify(ctx context.Context, alert Alert) error {
	body, err := json.Marshal(c.body(alert))
	if err != nil {
		return fmt.Errorf("encode alert: %w", err)
	}
	// The URL is a secret: errors of the request may be told, those that repeat the URL may not.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("make alert request: the channel's url cannot be used")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := alertTransport.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("send alert: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	excerpt, _ := io.ReadAll(io.LimitReader(resp.Body, maxExcerpt))
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("send alert: the channel answered %s: %s", resp.Status, clip(string(excerpt)))
	}
	return nil
}

// Alerts are rare: no connection is kept between two of them.
var alertTransport = &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxResponseHeader}

const (
	// alertGather is how long the first occurrence waits for company before it is told.
	alertGather = time.Second
	// alertTimeout bounds one notification.
	alertTimeout = 10 * time.Second
)

// tellAlerts sends what is due whenever it is signalled, until ctx is done. It shares nothing with deliveries but the
// database, so that a dead channel delays none.
func (r *Relay) tellAlerts(ctx context.Context) {
	for {
		select {
		case <-r.alerts:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(alertGather):
		case <-ctx.Done():
			return
		}
		if err := r.tellDueAlerts(ctx); err != nil && ctx.Err() == nil {
			r.databaseError("alert", err)
		}
	}
}

func (r *Relay) tellDueAlerts(ctx context.Context) error {
	due, err := r.store.claimAlerts(ctx, r.cfg.Alerts.Window)
	if err != nil {
		return err
	}
	for _, alert := range due {
		if err := r.tell(ctx, alert); err != nil {
			return err
		}
	}
	return r.store.closeAlerts(ctx, r.cfg.Alerts.Window)
}

// tell sends an alert to the channels that do not have it yet.
func (r *Relay) tell(ctx context.Context, alert dueAlert) error {
	r.cfg.Log.Warn().Str("rule", alert.Rule).Str("destination", alert.Subject).Int64("count", alert.Count).
		Int64("first_event_id", alert.FirstEventID).Str("first_error", alert.FirstError).Msg("alert")
	told := alert.notifiedTo
	for _, channel := range r.cfg.Alerts.Channels {
		if slices.Contains(told, channel.Name()) {
			continue
		}
		sending, cancel := context.WithTimeout(ctx, alertTimeout)
		err := channel.Notify(sending, alert.Alert)
		cancel()
		if hook := r.cfg.Hooks.Notified; hook != nil {
			hook(channel.Name(), alert.Alert, err)
		}
		if err != nil {
			r.cfg.Log.Error().Err(err).Str("channel", channel.Name()).Msg("alert not sent; will be tried again")
			continue
		}
		told = append(told, channel.Name())
	}
	for _, channel := range r.cfg.Alerts.Channels {
		if !slices.Contains(told, channel.Name()) {
			return r.store.markPartlyNotified(ctx, alert.Alert, told)
		}
	}
	return r.store.markNotified(ctx, alert.Alert)
}
