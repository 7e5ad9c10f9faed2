// Package history remembers what a relay did in the last hour, for the charts of the page. It lives in memory alone: it costs the
// database nothing and begins anew with the process.
package history

import (
	"math"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

const (
	// Step is the width of one point.
	Step = 10 * time.Second
	// Span is how far back the history reaches.
	Span = time.Hour
	// maxLanes bounds the memory: a lane costs about 140 KiB. Destinations beyond it count in the total only.
	maxLanes = 50

	slots = int64(Span / Step)
)

// A Ring holds the last hour of every destination of one relay. It is safe for concurrent use.
type Ring struct {
	now func() time.Time

	mu     sync.Mutex // guards the fields below
	begun  int64
	total  lane
	lanes  map[string]*lane
	states map[string]relay.LaneState
}

// A lane is the history of one destination: slot n is at index n modulo slots.
type lane [slots]slot

// A slot counts what happened within one step.
type slot struct {
	number                     int64
	delivered, failed, retried uint32
	took, latency              durations // of the requests that delivered; from the commit until then
	backlog                    int64     // the last that was read, plus 1; 0: none was
}

// New returns an empty history.
func New() *Ring { return NewAt(time.Now) }

// NewAt returns an empty history with a clock of its own, for tests and previews.
func NewAt(now func() time.Time) *Ring {
	r := &Ring{now: now, lanes: map[string]*lane{}, states: map[string]relay.LaneState{}}
	r.begun = r.slotOf(now())
	return r
}

func (*Ring) slotOf(at time.Time) int64 { return at.UnixNano() / int64(Step) }

// Hooks returns hooks that fill the history and then call next.
func (r *Ring) Hooks(next relay.Hooks) relay.Hooks {
	hooks := next
	hooks.Attempted = func(a relay.Attempt) {
		took, latency := bucketOf(a.Duration), bucketOf(a.SinceCreated)
		r.note(a.Destination, func(s *slot) {
			if a.Outcome == policy.Delivered {
				s.took[took]++
				s.latency[latency]++
			}
		})
		if next.Attempted != nil {
			next.Attempted(a)
		}
	}
	hooks.Settled = func(destination string, outcome policy.Outcome, reason policy.Reason, deliveries int) {
		r.note(destination, func(s *slot) { s.count(outcome, deliveries) })
		if next.Settled != nil {
			next.Settled(destination, outcome, reason, deliveries)
		}
	}
	hooks.LaneChanged = func(state relay.LaneState) {
		r.mu.Lock()
		r.states[state.Destination] = state
		r.mu.Unlock()
		if next.LaneChanged != nil {
			next.LaneChanged(state)
		}
	}
	return hooks
}

func (s *slot) count(outcome policy.Outcome, deliveries int) {
	switch n := uint32(deliveries); outcome {
	case policy.Delivered:
		s.delivered += n
	case policy.Fail:
		s.failed += n
	case policy.Retry:
		s.retried += n
	case policy.Hold: // nothing was attempted
	}
}

// note changes the present slot of a destination, and of all together.
func (r *Ring) note(destination string, change func(*slot)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	number := r.slotOf(r.now())
	change(r.total.slot(number))
	l := r.lanes[destination]
	if l == nil {
		if len(r.lanes) >= maxLanes {
			return
		}
		l = new(lane)
		r.lanes[destination] = l
	}
	change(l.slot(number))
}

// slot returns the slot of a number, empty if an earlier one stood there.
func (l *lane) slot(number int64) *slot {
	s := &l[number%slots]
	if s.number != number {
		*s = slot{number: number}
	}
	return s
}

// NoteBacklog records a reading of how much is pending at each destination.
func (r *Ring) NoteBacklog(pending map[string]int64) {
	all := int64(0)
	for destination, n := range pending {
		all += n
		r.note(destination, func(s *slot) { s.backlog = n + 1 })
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total.slot(r.slotOf(r.now())).backlog = all + 1
}

// Lane returns what this relay last let a destination have.
func (r *Ring) Lane(destination string) (relay.LaneState, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	state, known := r.states[destination]
	return state, known
}

// A Series is a history, the oldest point first. Rates are per minute, times in seconds.
type Series struct {
	// Times of the points in seconds since 1970: when each step began.
	Times     []int64   `json:"times"`
	Delivered []float64 `json:"delivered"`
	Failed    []float64 `json:"failed"`
	Retried   []float64 `json:"retried"`
	// P50, P95 and P99 of how long the requests took that delivered; nil: there were none.
	P50 []*float64 `json:"p50"`
	P95 []*float64 `json:"p95"`
	P99 []*float64 `json:"p99"`
	// LatencyP50, LatencyP95 and LatencyP99 of how long it took from the commit until the receiver accepted, with all waits and attempts.
	LatencyP50 []*float64 `json:"latency_p50"`
	LatencyP95 []*float64 `json:"latency_p95"`
	LatencyP99 []*float64 `json:"latency_p99"`
	// Backlog as it was last read; nil: it was not.
	Backlog []*int64 `json:"backlog"`
}

// Series returns the history of a destination since the process began, at most an hour; the empty name stands for all.
// The present step is left out, as it is not over.
func (r *Ring) Series(destination string) Series {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := &r.total
	if destination != "" {
		if l = r.lanes[destination]; l == nil {
			l = new(lane)
		}
	}
	s := Series{
		Times: []int64{}, Delivered: []float64{}, Failed: []float64{}, Retried: []float64{}, P50: []*float64{}, P95: []*float64{}, P99: []*float64{},
		LatencyP50: []*float64{}, LatencyP95: []*float64{}, LatencyP99: []*float64{}, Backlog: []*int64{},
	}
	last := r.slotOf(r.now())
	for number := max(r.begun, last-slots+1); number < last; number++ {
		point := l[number%slots]
		if point.number != number {
			point = slot{}
		}
		s.append(number, point)
	}
	return s
}

func (s *Series) append(number int64, point slot) {
	const perMinute = float64(time.Minute / Step)
	s.Times = append(s.Times, number*int64(Step/time.Second))
	s.Delivered = append(s.Delivered, float64(point.delivered)*perMinute)
	s.Failed = append(s.Failed, float64(point.failed)*perMinute)
	s.Retried = append(s.Retried, float64(point.retried)*perMinute)
	s.P50 = append(s.P50, point.took.quantile(0.50))
	s.P95 = append(s.P95, point.took.quantile(0.95))
	s.P99 = append(s.P99, point.took.quantile(0.99))
	s.LatencyP50 = append(s.LatencyP50, point.latency.quantile(0.50))
	s.LatencyP95 = append(s.LatencyP95, point.latency.quantile(0.95))
	s.LatencyP99 = append(s.LatencyP99, point.latency.quantile(0.99))
	var backlog *int64
	if point.backlog > 0 {
		backlog = new(point.backlog - 1)
	}
	s.Backlog = append(s.Backlog, backlog)
}

// A Rate is what happened in the last minute.
type Rate struct {
	Delivered int64 `json:"delivered"`
	Failed    int64 `json:"failed"`
	Retried   int64 `json:"retried"`
	// P50, P95 and P99 in seconds of the requests that delivered; nil: there were none.
	P50 *float64 `json:"p50"`
	P95 *float64 `json:"p95"`
	P99 *float64 `json:"p99"`
	// LatencyP50, LatencyP95 and LatencyP99 in seconds from the commit until the receiver accepted.
	LatencyP50 *float64 `json:"latency_p50"`
	LatencyP95 *float64 `json:"latency_p95"`
	LatencyP99 *float64 `json:"latency_p99"`
}

// LastMinute returns what happened in the last minute, the present step included.
func (r *Ring) LastMinute(destination string) (rate Rate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := &r.total
	if destination != "" {
		if l = r.lanes[destination]; l == nil {
			return Rate{}
		}
	}
	var took, latency durations
	last := r.slotOf(r.now())
	for number := last - int64(time.Minute/Step) + 1; number <= last; number++ {
		point := l[number%slots]
		if point.number != number {
			continue
		}
		rate.Delivered += int64(point.delivered)
		rate.Failed += int64(point.failed)
		rate.Retried += int64(point.retried)
		took.merge(point.took)
		latency.merge(point.latency)
	}
	rate.P50, rate.P95, rate.P99 = took.quantile(0.50), took.quantile(0.95), took.quantile(0.99)
	rate.LatencyP50, rate.LatencyP95, rate.LatencyP99 = latency.quantile(0.50), latency.quantile(0.95), latency.quantile(0.99)
	return rate
}

// durations is a histogram whose bounds grow by half from 0.5 ms to about 5 hours.
type durations [44]uint32

// bound returns the upper end of a bucket in seconds.
func bound(i int) float64 { return 0.0005 * math.Pow(1.5, float64(i)) }

// bucketOf returns the bucket that a duration belongs to, without a search: each attempt is sorted into two histograms.
func bucketOf(took time.Duration) int {
	steps := math.Ceil(math.Log(took.Seconds()/bound(0)) / math.Log(1.5)) // minus infinity of 0
	return int(max(0, min(steps, float64(len(durations{})-1))))
}

func (d *durations) merge(other durations) {
	for i, n := range other {
		d[i] += n
	}
}

// quantile returns the value below which the share of all lies, in seconds; nil if there are none.
func (d *durations) quantile(share float64) *float64 {
	all := 0.0
	for _, n := range d {
		all += float64(n)
	}
	if all == 0 {
		return nil
	}
	want, seen := share*all, 0.0
	for i, n := range d {
		if seen += float64(n); seen >= want && n > 0 {
			lower := 0.0
			if i > 0 {
				lower = bound(i - 1)
			}
			value := lower + (bound(i)-lower)*(1-(seen-want)/float64(n))
			return &value
		}
	}
	return new(bound(len(d) - 1))
}
