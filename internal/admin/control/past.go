package control

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// pastAge is for how long what was read of the history is shown: relays add to it once a
	// minute.
	pastAge = 10 * time.Second
	// maxPasts bounds what is kept of it.
	maxPasts = 32
)

// pastCache keeps what was read of the history lately.
type pastCache struct {
	mu   sync.Mutex // held while the database is asked
	read map[string]stored
}

type stored struct {
	at     time.Time
	points []history.Point
}

// points returns what is stored under a key, and reads it if it is not fresh.
func (c *Control) points(key string, read func() ([]history.Point, error)) ([]history.Point, error) {
	c.past.mu.Lock()
	defer c.past.mu.Unlock()
	now := c.now()
	if s, known := c.past.read[key]; known && now.Sub(s.at) < pastAge {
		return s.points, nil
	}
	points, err := read()
	if err != nil {
		return nil, err
	}
	if len(c.past.read) >= maxPasts || c.past.read == nil {
		c.past.read = map[string]stored{}
	}
	c.past.read[key] = stored{now, points}
	return points, nil
}

// Past returns the history of a destination; the empty name stands for all together.
func (c *Control) Past(ctx context.Context, destination string, span history.Span) (history.Past, error) {
	points, err := c.points(span.Name+destination, func() ([]history.Point, error) { return history.Read(ctx, c.Outbox.DB(), destination, span) })
	return history.Build(points, destination, c.History.Unwritten(), span, c.now()), err
}

// pasts are the last hours of many destinations.
type pasts struct {
	busy  map[string]history.Past
	quiet history.Past // of all others
}

func (p pasts) of(destination string) history.Past {
	if past, busy := p.busy[destination]; busy {
		return past
	}
	return p.quiet
}

// each returns the last hour of each of these destinations. Of thousands most are quiet, and share
// one.
func (c *Control) each(ctx context.Context, destinations []ops.DestinationStatus) (pasts, error) {
	var names []string
	for _, d := range destinations {
		names = append(names, d.Destination)
	}
	slices.Sort(names)
	points, err := c.points("each "+strings.Join(names, " "), func() ([]history.Point, error) { return history.ReadEach(ctx, c.Outbox.DB(), names) })
	if err != nil {
		return pasts{}, err
	}
	stored, unwritten := map[string][]history.Point{}, map[string]map[history.Key]*history.Counts{}
	for _, p := range points {
		stored[p.Destination] = append(stored[p.Destination], p)
	}
	for key, counts := range c.History.Unwritten() {
		if unwritten[key.Destination] == nil {
			unwritten[key.Destination] = map[history.Key]*history.Counts{}
		}
		unwritten[key.Destination][key] = counts
	}
	span, now := history.SpanOf("1h"), c.now()
	all := pasts{busy: map[string]history.Past{}, quiet: history.Build(nil, "", nil, span, now)}
	for _, name := range names {
		if stored[name] != nil || unwritten[name] != nil {
			all.busy[name] = history.Build(stored[name], name, unwritten[name], span, now)
		}
	}
	return all, nil
}

// Hooks returns hooks that note what the relay lets destinations have, and call next.
func (c *Control) Hooks(next relay.Hooks) relay.Hooks {
	hooks := next
	hooks.LaneChanged = func(state relay.LaneState) {
		c.mu.Lock()
		c.lanes[state.Destination] = state
		c.mu.Unlock()
		if next.LaneChanged != nil {
			next.LaneChanged(state)
		}
	}
	return hooks
}
