package watch

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
)

// A Backlog is what waits at one moment. Its counts stop at a limit.
type Backlog struct {
	At    time.Time // by the database's clock
	Limit int       // at least this many where a count reaches it
	Lanes []LaneBacklog
	// Parked deliveries match no route.
	Parked int
	// Untaken events are not routed yet: no relay has taken them.
	Untaken int
	// Unserved destinations have pending deliveries, and no registered relay delivers there.
	Unserved int
	// Undelivered events have no deliveries, as far as relays have searched.
	Undelivered int
}

// A LaneBacklog is what waits for one destination.
type LaneBacklog struct {
	Destination string `json:"destination"`
	// Pending deliveries are neither delivered, failed nor discarded. Failed ones wait for an
	// operator.
	Pending int `json:"pending"`
	Failed  int `json:"failed"`
	// Paused reports a pause, and Held also an open breaker: nothing is sent.
	Paused bool `json:"paused"`
	Held   bool `json:"held"`
	// LagSeconds is as [Lag] defines it.
	LagSeconds float64 `json:"lag"`
	// Waiting of the Pending wait behind an earlier one of their ordering key, which failed or is
	// retried later.
	Waiting int `json:"waiting"`
	// BlockedKeys are ordering keys that wait behind a failed delivery.
	BlockedKeys int `json:"blocked"`
}

// backlogSample is a Backlog as the statement returns it: the lanes that the watcher sees have
// pending deliveries.
type backlogSample struct {
	Lanes       []LaneBacklog     `json:"lanes"`
	Seen        []laneSample      `json:"seen"`
	Untaken     untakenSample     `json:"untaken"`
	Parked      *parkedSample     `json:"parked"`
	Unserved    int               `json:"unserved"`
	Undelivered UndeliveredSample `json:"undelivered"`
}

// backlog joins what was counted with what the watcher saw.
func (s backlogSample) backlog(at time.Time, limit int) Backlog {
	b := Backlog{At: at, Limit: limit, Lanes: s.Lanes, Untaken: s.Untaken.Count, Unserved: s.Unserved, Undelivered: s.Undelivered.Count}
	if s.Parked != nil {
		b.Parked = min(s.Parked.Count, limit)
	}
	seen := map[string]laneSample{}
	for _, l := range s.Seen {
		seen[l.Destination] = l
	}
	for i := range b.Lanes {
		l := &b.Lanes[i]
		l.LagSeconds, l.BlockedKeys = max(0, seen[l.Destination].LagSeconds), min(seen[l.Destination].Blocked, limit)
	}
	return b
}

// CountBacklog counts what waits for the given destinations, each kind up to limit.
func (w *Watcher) CountBacklog(ctx context.Context, destinations []string, limit int) (Backlog, error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	at, s, err := w.countBacklog(ctx, destinations, w.Lenient(), limit, w.Alerts().LagOver)
	if err != nil {
		return Backlog{}, err
	}
	return s.backlog(at, limit), nil
}
