package ops

import (
	"time"

	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// Status is what stands in an outbox at one moment.
type Status struct {
	Destinations []DestinationStatus `json:"destinations"`
	// Parked deliveries match no route; they wait for one.
	Parked int64         `json:"parked"`
	Relays []RelayStatus `json:"relays"`
	Alerts []alert.Alert `json:"alerts"`
	// Quarantined says why relays do nothing on this database, see [identity.Report.Reason]; empty: they may work.
	Quarantined string `json:"quarantined,omitempty"`
}

// DestinationStatus counts the deliveries of one destination.
type DestinationStatus struct {
	Destination string `json:"destination"`
	// Pending is the backlog: everything that is neither delivered, failed nor discarded.
	Pending int64 `json:"pending"`
	// Due of the pending could be sent now.
	Due int64 `json:"due"`
	// InFlight of the pending are claimed by a relay.
	InFlight int64 `json:"in_flight"`
	// Retrying of the pending were attempted before.
	Retrying int64 `json:"retrying"`
	Failed   int64 `json:"failed"`
	// LagSeconds is the age of the oldest due delivery; 0 without one.
	LagSeconds   float64 `json:"lag_seconds"`
	Paused       bool    `json:"paused"`
	PausedReason string  `json:"paused_reason,omitempty"`
	// PausedAt is when; nil unless paused.
	PausedAt *time.Time `json:"paused_at,omitempty"`
	// Replays of the pending were made pending again by an operator.
	Replays int64 `json:"replays"`
	// BlockedKeys counts the ordering keys whose later deliveries wait behind a failed one. It looks at 10,000 of those.
	BlockedKeys int64 `json:"blocked_keys"`
	// BlockedSeconds is for how long the oldest of them has been blocked; 0 without one.
	BlockedSeconds float64 `json:"blocked_seconds"`
	// Routed: a route leads there. Nothing new arrives at a destination without.
	Routed bool `json:"routed"`
	// Breaker: closed; open, when the destination is down and its deliveries are held; half_open while one is tried.
	Breaker string `json:"breaker"`
	// BreakerOpenedAt is when the hold began; nil when closed.
	BreakerOpenedAt *time.Time `json:"breaker_opened_at,omitempty"`
	// BreakerSeconds until the next probe; not above 0 when it is due. 0 when closed.
	BreakerSeconds float64 `json:"breaker_seconds,omitempty"`
	// BreakerError is what the destination last answered to a probe, or what opened the breaker.
	BreakerError string `json:"breaker_error,omitempty"`
	// Served: a registered relay delivers there. What is pending for a destination without is unserved.
	Served bool `json:"served"`
}

// RelayStatus is one registered relay.
type RelayStatus struct {
	Instance  int32     `json:"instance"`
	Name      string    `json:"name"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	// HeartbeatAgeSeconds since the relay last said that it lives; it writes that down every 4 to 6 seconds.
	HeartbeatAgeSeconds float64 `json:"heartbeat_age_seconds"`
	// Idle: nothing is claimed by it.
	Idle bool `json:"idle"`
	// Session: the relay has a connection of its own for as long as it lives. Without, behind a pooler, only its heartbeat
	// says that it lives.
	Session bool `json:"session"`
	// InFlight deliveries are claimed by it.
	InFlight int64 `json:"in_flight"`
	// Quarantined says why the relay does nothing here; empty: it works.
	Quarantined string `json:"quarantined,omitempty"`
	// Destinations that it serves, sorted.
	Destinations []string `json:"destinations"`
}
