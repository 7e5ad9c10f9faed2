package history

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

const (
	// Busiest is how many destinations, and how many pairs of destination and event type, have rows
	// of their own in one minute. The rest is one row.
	Busiest = 100
	// Rest is the name of that row's destination.
	Rest = "*"
	// maxKeys bounds the memory of a minute, about half a kilobyte each: what comes beyond it
	// belongs to the rest.
	maxKeys = 2000
	// backlogs is of how many destinations the backlog is counted, up to 10,001 deliveries each.
	backlogs = 20
)

// A Key names what is counted together. An empty destination stands for all, an empty event type
// for all types.
type Key struct{ Destination, EventType string }

// Counts are what happened within some time.
type Counts struct {
	Delivered int64 `json:"delivered"`
	Failed    int64 `json:"failed"`
	Retried   int64 `json:"retried"`
	// Probes are failed requests that were held, so that they spent no attempt of a delivery: those
	// that opened the breaker, and the probes after.
	Probes int64 `json:"probes"`
	// Took are the times of the requests that delivered; Latency those from when the event became
	// due until then, without replays.
	Took    Durations `json:"took"`
	Latency Durations `json:"latency"`
}

// Attempts returns how many requests were sent.
func (c *Counts) Attempts() int64 { return c.Delivered + c.Failed + c.Retried + c.Probes }

// Add adds other counts.
func (c *Counts) Add(other *Counts) {
	c.Delivered += other.Delivered
	c.Failed += other.Failed
	c.Retried += other.Retried
	c.Probes += other.Probes
	c.Took.add(other.Took)
	c.Latency.add(other.Latency)
}

// A Recorder counts what one relay does until it is flushed. It is safe for concurrent use.
type Recorder struct {
	flushes int // that have written something

	mu     sync.Mutex // guards the fields below
	counts map[Key]*Counts
}

// New returns a Recorder that has counted nothing.
func New() *Recorder { return &Recorder{counts: map[Key]*Counts{}} }

// NoLatency is the latency of a replay, which is not counted.
const NoLatency time.Duration = -1

// Attempted counts one request, or a delivery that failed without one. took is its time, latency
// that from when the event became due to the end of the request, or [NoLatency]. A nil Recorder
// counts nothing.
func (r *Recorder) Attempted(key Key, outcome policy.Outcome, took, latency time.Duration) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.counts[key]
	if c == nil {
		if len(r.counts) >= maxKeys {
			key = Key{Destination: Rest}
		}
		if c = r.counts[key]; c == nil {
			c = &Counts{}
			r.counts[key] = c
		}
	}
	switch outcome {
	case policy.Delivered:
		c.Delivered++
		c.Took.note(took)
		if latency != NoLatency {
			c.Latency.note(latency)
		}
	case policy.Fail:
		c.Failed++
	case policy.Retry:
		c.Retried++
	case policy.Hold:
		c.Probes++
	}
}

// take returns what was counted since it was last called.
func (r *Recorder) take() map[Key]*Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.counts
	r.counts = map[Key]*Counts{}
	return taken
}

// giveBack adds what was taken and could not be written.
func (r *Recorder) giveBack(taken map[Key]*Counts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, c := range taken {
		if now := r.counts[key]; now != nil {
			c.Add(now)
		}
		r.counts[key] = c
	}
}

// Unwritten returns a copy of what was counted since the last flush, with sums for all destinations
// and all types. A nil Recorder has nothing.
func (r *Recorder) Unwritten() map[Key]*Counts {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return sum(r.counts)
}

// sum returns counts together with those of each destination, of each type, and of all.
func sum(counts map[Key]*Counts) map[Key]*Counts {
	all := map[Key]*Counts{}
	add := func(key Key, c *Counts) {
		if all[key] == nil {
			all[key] = &Counts{}
		}
		all[key].Add(c)
	}
	for key, c := range counts {
		add(Key{}, c)
		add(Key{Destination: key.Destination}, c)
		if key.EventType != "" { // else it is the rest
			add(key, c)
			add(Key{EventType: key.EventType}, c)
		}
	}
	return all
}

// busiest returns the keys of sums that get their own rows, and adds the destinations among the
// others to the rest.
func busiest(sums map[Key]*Counts) []Key {
	var destinations, pairs []Key
	for key := range maps.Keys(sums) {
		switch {
		case key.EventType != "":
			pairs = append(pairs, key)
		case key.Destination != "" && key.Destination != Rest:
			destinations = append(destinations, key)
		}
	}
	most := func(a, b Key) int { return cmp.Compare(sums[b].Attempts(), sums[a].Attempts()) }
	slices.SortFunc(destinations, most)
	slices.SortFunc(pairs, most)
	for _, key := range destinations[min(Busiest, len(destinations)):] {
		if sums[Key{Destination: Rest}] == nil {
			sums[Key{Destination: Rest}] = &Counts{}
		}
		sums[Key{Destination: Rest}].Add(sums[key])
	}
	keys := slices.Concat(destinations[:min(Busiest, len(destinations))], pairs[:min(Busiest, len(pairs))])
	for _, key := range []Key{{}, {Destination: Rest}} {
		if sums[key] != nil {
			keys = append(keys, key)
		}
	}
	return keys
}
