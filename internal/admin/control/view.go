package control

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// A Destination is the state of one destination, with what this relay has seen of it.
type Destination struct {
	ops.DestinationStatus
	// LastHour of all relays; what others did in the last minute may be missing.
	LastHour       history.Sum    `json:"last_hour"`
	LastHourSeries history.Series `json:"-"`
	// Concurrency is how many requests this relay allows at once, and RateLimit how many a second
	// (0: any number); nil: this relay has not delivered there.
	Concurrency *int     `json:"concurrency"`
	RateLimit   *float64 `json:"rate_limit"`
}

// An Overview is what the first page shows.
type Overview struct {
	At time.Time `json:"at"`
	// Advice says what is wrong, the worst first; none: all is well.
	Advice []ops.Advice `json:"advice"`
	// AdviceLeft counts what [Overview.Bounded] has left out.
	AdviceLeft int `json:"advice_left"`
	// Backlog counts what is pending at all destinations, and LagSeconds is the largest lag of a
	// destination, as outbox_lag_seconds defines it.
	Backlog    int64   `json:"backlog"`
	LagSeconds float64 `json:"lag_seconds"`
	Failed     int64   `json:"failed"`
	// Untaken events are not routed yet, and Parked ones have no route. Neither are part of the
	// backlog.
	Untaken int64 `json:"untaken"`
	Parked  int64 `json:"parked"`
	// LastHour of all relays; what others did in the last minute may be missing.
	LastHour history.Sum `json:"last_hour"`
	// Destinations are those that a [List] chooses; all figures above are of all destinations.
	Destinations []Destination `json:"destinations"`
	ops.Listed
	// Relays counts those that live, and Alerts those that are open.
	Relays int `json:"relays"`
	Alerts int `json:"alerts"`
}

// Overview returns the state of everything, with the destinations that the list chooses. The error
// may be a [check.Problem] of the path after.
func (c *Control) Overview(ctx context.Context, list List) (Overview, error) {
	s, err := c.Status(ctx)
	if err != nil {
		return Overview{}, err
	}
	o := Overview{
		At: s.At, Advice: s.Advice, Untaken: s.Untaken.Events, Parked: s.Parked,
		Destinations: []Destination{}, Alerts: len(s.Alerts),
	}
	for _, d := range s.Destinations {
		o.Backlog += d.Pending
		o.Failed += d.Failed
		o.LagSeconds = max(o.LagSeconds, d.LagSeconds)
	}
	shown, past := s.Destinations, pasts{}
	if list.sortsByHistory() {
		if past, err = c.each(ctx, shown); err != nil {
			return Overview{}, err
		}
	}
	if shown, o.Listed, err = list.of(past).Choose(s.Status); err != nil {
		return Overview{}, err
	}
	if !list.sortsByHistory() {
		if past, err = c.each(ctx, shown); err != nil {
			return Overview{}, err
		}
	}
	for _, d := range shown {
		o.Destinations = append(o.Destinations, c.view(d, past.of(d.Destination)))
	}
	for _, r := range s.Relays {
		if r.Alive() {
			o.Relays++
		}
	}
	all, err := c.Past(ctx, "", history.SpanOf("1h"))
	o.LastHour = all.Sum
	return o, err
}

// Bounded returns the overview with at most [ops.MaxListed] pieces of advice.
func (o Overview) Bounded() Overview {
	o.Advice, o.AdviceLeft = ops.Bound(o.Advice, ops.MaxListed)
	return o
}

// Destination returns the state of one destination. The error wraps [ops.ErrUnknownDestination] if
// there is none.
func (c *Control) Destination(ctx context.Context, name string) (Destination, []ops.Advice, error) {
	for range 2 {
		s, err := c.Status(ctx)
		if err != nil {
			return Destination{}, nil, err
		}
		at := slices.IndexFunc(s.Destinations, func(d ops.DestinationStatus) bool { return d.Destination == name })
		if at >= 0 {
			others := func(a ops.Advice) bool { return a.Subject != name }
			past, err := c.Past(ctx, name, history.SpanOf("1h"))
			return c.view(s.Destinations[at], past), slices.DeleteFunc(slices.Clone(s.Advice), others), err
		}
		c.Forget() // it may be younger than the status that was read last
	}
	return Destination{}, nil, fmt.Errorf("%w %q", ops.ErrUnknownDestination, name)
}

func (c *Control) view(d ops.DestinationStatus, past history.Past) Destination {
	view := Destination{DestinationStatus: d, LastHour: past.Sum, LastHourSeries: past.Series}
	c.mu.Lock()
	defer c.mu.Unlock()
	if lane, known := c.lanes[d.Destination]; known {
		view.Concurrency, view.RateLimit = new(lane.Concurrency), new(lane.RateLimit)
	}
	return view
}
