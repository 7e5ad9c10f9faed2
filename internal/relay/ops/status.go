package ops

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
)

// Status is the state of an outbox at one moment.
type Status struct {
	Destinations []DestinationStatus `json:"destinations"`
	// Listed and the fields that end with Left say what [Status.Bounded] has left out; zero:
	// nothing, or it was not called.
	Listed
	// Untaken are the events that are not routed yet.
	Untaken Untaken `json:"untaken"`
	// Parked counts the deliveries that match no route and wait for one.
	Parked     int64         `json:"parked"`
	Relays     []RelayStatus `json:"relays"`
	Alerts     []alert.Alert `json:"alerts"`
	AlertsLeft int           `json:"alerts_left"`
	// Differences are destinations of which relays have different settings.
	Differences     []watch.Difference `json:"differences,omitempty"`
	DifferencesLeft int                `json:"differences_left,omitempty"`
	// Refusals are of destinations that refuse some relays while another relay may be accepted.
	Refusals     []watch.Refusal `json:"refusals,omitempty"`
	RefusalsLeft int             `json:"refusals_left,omitempty"`
	// Quarantined says why no relay does anything on this database, see [identity.Report.Reason];
	// empty: relays may work.
	Quarantined string `json:"quarantined,omitempty"`
	// Advice says what is wrong and what to do about it, the most urgent first. Empty: all is well.
	Advice     []Advice `json:"advice"`
	AdviceLeft int      `json:"advice_left"`
}

// Untaken counts the events that no relay has taken yet: no one knows their destinations, so that
// they are no part of any backlog.
type Untaken struct {
	// Events is counted up to 10,001.
	Events int64 `json:"events"`
	// OldestSeconds is the age of the oldest of them; 0 without one.
	OldestSeconds float64 `json:"oldest_seconds"`
}

// DestinationStatus counts the deliveries of one destination, each kind up to 10,001, what failed
// up to 1,001.
type DestinationStatus struct {
	Destination string `json:"destination"`
	// State says in a word whether deliveries flow there: ok, paused, unserved, held, trying,
	// slowed, failing, no route, blocked or waiting.
	State string `json:"state" db:"-"`
	// Pending is the backlog: everything that is neither delivered, failed nor discarded.
	Pending int64 `json:"pending"`
	// Due of the pending could be sent now.
	Due int64 `json:"due"`
	// Waiting of the pending are marked by a relay as behind an earlier event of their ordering
	// key that failed or is retried. Before a claim has found them, they count as Due.
	Waiting int64 `json:"waiting"`
	// InFlight of the pending are claimed by a relay or, of new events, in its hand.
	InFlight int64 `json:"in_flight"`
	// Retrying of the pending were attempted before.
	Retrying int64 `json:"retrying"`
	Failed   int64 `json:"failed"`
	// LagSeconds is the age of the oldest due delivery, or of an event that is not routed yet and
	// leads there, see [watch.Lag]; 0 without one. Neither what is Waiting nor Replays count.
	LagSeconds   float64 `json:"lag_seconds"`
	Paused       bool    `json:"paused"`
	PausedReason string  `json:"paused_reason,omitempty"`
	// PausedAt is nil unless paused.
	PausedAt *time.Time `json:"paused_at,omitempty"`
	// Replays of the pending were made pending again by an operator.
	Replays int64 `json:"replays"`
	// BlockedKeys counts the ordering keys whose later deliveries wait behind a failed one, see
	// [watch.Blocked].
	BlockedKeys int64 `json:"blocked_keys"`
	// BlockedSeconds is for how long the oldest of them has been blocked; 0 without one.
	BlockedSeconds float64 `json:"blocked_seconds"`
	// Routed reports whether a route leads there. Without one, nothing new arrives.
	Routed bool `json:"routed"`
	// Breaker is closed; open while the destination is down and its deliveries are held; or
	// half_open while one is tried.
	Breaker string `json:"breaker"`
	// BreakerOpenedAt is when the hold began; nil when closed.
	BreakerOpenedAt *time.Time `json:"breaker_opened_at,omitempty"`
	// BreakerSeconds is the time until the next probe, which needs a delivery that is due; 0 when
	// it is due, or closed.
	BreakerSeconds float64 `json:"breaker_seconds,omitempty"`
	// BreakerError is what the destination last answered to a probe, or what opened the breaker.
	BreakerError string `json:"breaker_error,omitempty"`
	// Served reports whether a registered relay delivers there. Without one, what is pending is
	// unserved.
	Served bool `json:"served"`
	// WaitUntil is when relays try the destination again that has asked them to wait (Retry-After);
	// nil: it has not, or refuses single events among others, which alone wait.
	WaitUntil *time.Time `json:"wait_until,omitempty"`
	// SlowedTo is how many requests a second relays make that the destination's 429s have slowed;
	// 0: they have slowed none.
	SlowedTo float64 `json:"slowed_to,omitempty"`
	// RetryEventID, RetryReason and RetryError are of the latest attempt among the Retrying.
	RetryEventID int64         `json:"retry_event_id,omitempty,string"`
	RetryReason  policy.Reason `json:"retry_reason,omitempty"`
	RetryError   string        `json:"retry_error,omitempty"`
	// FailedUnsendable of the Failed cannot be sent as they are, because the event itself cannot be
	// expressed as a request, or is gone.
	FailedUnsendable int64 `json:"failed_unsendable"`
	// FailedReason and FailedError are of the newest failed event.
	FailedReason policy.Reason `json:"failed_reason,omitempty"`
	FailedError  string        `json:"failed_error,omitempty"`
	// RetryAt and FailedAt are when the attempts of RetryError and FailedError began; nil without
	// one.
	RetryAt  *time.Time `json:"retry_at,omitempty"`
	FailedAt *time.Time `json:"failed_at,omitempty"`
	// LastDeliveredAt is the latest delivery among the newest 1,000 of all, and around
	// RetryEventID; nil: none of them is delivered.
	LastDeliveredAt *time.Time `json:"last_delivered_at,omitempty"`
	// Lately counts the Retrying of which the latest attempt was in the last ten seconds,
	// LatelySince is when the first of those began.
	Lately      int64      `json:"-"`
	LatelySince *time.Time `json:"-"`
	// WaitingBehind are the events behind which the Waiting wait: up to three that failed, those
	// that have blocked their key for longest, and up to three that are not due, those with most
	// behind them.
	WaitingBehind []WaitingHead `json:"waiting_behind"`
}

// A WaitingHead is an event behind which later deliveries of its ordering key wait.
type WaitingHead struct {
	EventID      int64   `json:"event_id,string"`
	Waiting      int64   `json:"waiting"` // deliveries, up to 10,001
	Key          string  `json:"key"`
	Status       string  `json:"status"`   // failed, or pending: it is not due yet
	Attempts     int     `json:"attempts"` // of one that is not due; 0: its producer wants it sent later
	DueInSeconds float64 `json:"due_in_seconds"`

	Reason policy.Reason `json:"reason,omitempty"` // why it failed
}

// state returns State.
func (d DestinationStatus) state() string {
	switch {
	case d.Paused:
		return "paused"
	case !d.Served && d.Pending > 0: // before held: no relay probes it
		return "unserved"
	case d.Served && d.Breaker == "open":
		return "held"
	case d.Served && d.Breaker == "half_open":
		return "trying"
	case d.WaitUntil != nil && d.Pending > 0:
		return "slowed"
	case d.failing():
		return "failing"
	case !d.Routed:
		return "no route"
	case d.BlockedKeys > 0:
		return "blocked"
	case d.behindEarly() != nil:
		return "waiting"
	case d.SlowedTo > 0 && d.Pending > 0:
		return "slowed"
	}
	return "ok"
}

// behindEarly returns the events that their producers want sent later, and behind which others
// wait.
func (d DestinationStatus) behindEarly() (early []WaitingHead) {
	for _, h := range d.WaitingBehind {
		if h.Status == "pending" && h.Attempts == 0 && h.DueInSeconds > 0 {
			early = append(early, h)
		}
	}
	return early
}

// RelayStatus is one registered relay.
type RelayStatus struct {
	RelayID int32  `json:"relay_id,string"`
	Name    string `json:"name"`
	// Called is its name in sentences: with its number if another relay has the same name.
	Called string `json:"-" db:"-"`
	// State says in a word what the relay does: busy, idle, asleep, quarantined, or silent if it is
	// not alive.
	State     string    `json:"state" db:"-"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	// HeartbeatAgeSeconds is the age of the last heartbeat; a relay writes one every 4 to 6
	// seconds.
	HeartbeatAgeSeconds float64 `json:"heartbeat_age_seconds"`
	// Idle reports whether the relay has claimed nothing, and has no new events in hand.
	Idle bool `json:"idle"`
	// Session reports whether the relay has its own connection, which ends with it. Behind a
	// pooler it has none, and only the heartbeat shows that it lives.
	Session bool `json:"session"`
	// InFlight counts the deliveries that it has claimed or, of new events, in hand. Another relay
	// takes over those of one that is silent.
	InFlight int64 `json:"in_flight"`
	// Quarantined says why the relay does nothing here; empty: it works.
	Quarantined string `json:"quarantined,omitempty"`
	// Destinations that it serves, sorted, and how many [Status.Bounded] has left out.
	Destinations     []string `json:"destinations"`
	DestinationsLeft int      `json:"destinations_left,omitempty" db:"-"`
	// ReloadError says why it refused its latest configuration, at ReloadFailedAt; empty: it did
	// not.
	ReloadError    string     `json:"reload_error,omitempty"`
	ReloadFailedAt *time.Time `json:"reload_failed_at,omitempty"`
	// RefusedBy are the destinations that refuse this relay, while another relay may be accepted
	// there.
	RefusedBy     []string `json:"refused_by,omitempty"`
	RefusedByLeft int      `json:"refused_by_left,omitempty" db:"-"`
	// Asleep reports whether nothing of it runs, as nothing happens in its database: it writes a
	// heartbeat every 25 seconds, and is woken by the next event.
	Asleep bool `json:"asleep,omitempty"`
	// Cut reports whether its session has ended, as it does with its process.
	Cut bool `json:"-"`
}

// staleAfter is how old the heartbeat of a live relay can become at most, asleepStaleAfter that of
// one that is asleep. See [pg.IsAlive].
const (
	staleAfter       = 10
	asleepStaleAfter = 60
)

// Alive reports whether the relay has written a heartbeat lately, and has not lost its session.
func (r RelayStatus) Alive() bool {
	limit := float64(staleAfter)
	if r.Asleep {
		limit = asleepStaleAfter
	}
	return !r.Cut && r.HeartbeatAgeSeconds < limit
}

// state returns State.
func (r RelayStatus) state() string {
	switch {
	case !r.Alive():
		return "silent"
	case r.Quarantined != "":
		return "quarantined"
	case r.Asleep:
		return "asleep"
	case r.Idle:
		return "idle"
	}
	return "busy"
}
