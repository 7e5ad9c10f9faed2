package relay

import (
	"context"
	"time"
)

// An Alert tells that deliveries to one destination failed for good.
type Alert struct {
	Rule         string    `json:"rule"`    // "failed"
	Subject      string    `json:"subject"` // the destination
	Count        int64     `json:"count"`   // how often since OpenedAt
	OpenedAt     time.Time `json:"opened_at"`
	FirstEventID int64     `json:"first_event_id,string"`
	FirstError   string    `json:"first_error"`
}

// A Channel carries alerts to people. Notify may be called again with the same alert if it fails, and must respect ctx.
type Channel interface {
	// Name of the channel in logs and metrics; unique among the configured channels.
	Name() string
	// Notify sends one alert and returns nil once the other side has taken it.
	Notify(ctx context.Context, alert Alert) error
}

// Slack returns a channel that posts to a Slack incoming webhook.
func Slack(url string) Channel { return nil }

// Webhook returns a channel that POSTs alerts as JSON.
func Webhook(url string) Channel { return nil }
