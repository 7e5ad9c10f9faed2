package history

import (
	"cmp"
	"slices"
	"time"
)

// A Span is how far back a chart reaches.
type Span struct {
	Name string
	Back time.Duration
	// Step is the width of one point.
	Step time.Duration
	// Title in words.
	Title string
	rows  int // the stored step, in minutes
}

// Spans returns all of them, the shortest first.
func Spans() []Span {
	return []Span{
		{"1h", time.Hour, time.Minute, "last hour", 1},
		{"24h", 24 * time.Hour, 10 * time.Minute, "last 24 hours", 1},
		{"14d", 14 * 24 * time.Hour, time.Hour, "last 14 days", 60},
	}
}

// SpanOf returns the span of a name; the shortest, if there is none.
func SpanOf(name string) Span {
	all := Spans()
	return all[max(0, slices.IndexFunc(all, func(s Span) bool { return s.Name == name }))]
}

// Quantiles of durations in seconds; nil: there were none.
type Quantiles struct {
	P50 *float64 `json:"p50"`
	P95 *float64 `json:"p95"`
	P99 *float64 `json:"p99"`
}

// Quantiles returns those that a page shows.
func (d Durations) Quantiles() Quantiles {
	return Quantiles{d.Quantile(0.50), d.Quantile(0.95), d.Quantile(0.99)}
}

// A Sum is what happened within a span.
type Sum struct {
	Delivered int64 `json:"delivered"`
	Failed    int64 `json:"failed"`
	Retried   int64 `json:"retried"`
	// Probes are failed requests that were held, so that they spent no attempt of a delivery: those
	// that opened the breaker, and the probes after.
	Probes int64 `json:"probes"`
	// Response is how long the requests took that delivered. Latency is from when the event became
	// due until then, with all waits and attempts, without replays.
	Response Quantiles `json:"response"`
	Latency  Quantiles `json:"latency"`
}

// Sum returns the counts with quantiles.
func (c *Counts) Sum() Sum {
	return Sum{c.Delivered, c.Failed, c.Retried, c.Probes, c.Took.Quantiles(), c.Latency.Quantiles()}
}

// A Series is a history, the oldest point first. Rates are per minute, times in seconds; nil: there
// is nothing.
type Series struct {
	// From and To bound the span, and Times are when the step of each point began, in seconds since
	// 1970.
	From      int64      `json:"from"`
	To        int64      `json:"to"`
	Times     []int64    `json:"times"`
	Delivered []*float64 `json:"delivered"`
	Failed    []*float64 `json:"failed"`
	Retried   []*float64 `json:"retried"`
	Probes    []*float64 `json:"probes"`
	// P50, P95 and P99 of the response times.
	P50 []*float64 `json:"p50"`
	P95 []*float64 `json:"p95"`
	P99 []*float64 `json:"p99"`
	// LatencyP50, LatencyP95 and LatencyP99 of the times from when the event became due.
	LatencyP50 []*float64 `json:"latency_p50"`
	LatencyP95 []*float64 `json:"latency_p95"`
	LatencyP99 []*float64 `json:"latency_p99"`
	// Backlog is the highest that was counted within the step.
	Backlog []*int64 `json:"backlog"`
}

// A TypeSum is what happened to the events of one type.
type TypeSum struct {
	EventType string `json:"event_type"`
	Sum
}

// A Past is the history of one destination, or of all together.
type Past struct {
	Span   string    `json:"span"`
	Series Series    `json:"series"`
	Sum    Sum       `json:"sum"`
	Types  []TypeSum `json:"types"`
}

// Build makes a history at a time of what is stored of one destination and what is not written yet.
func Build(stored []Point, destination string, unwritten map[Key]*Counts, span Span, now time.Time) Past {
	for key, c := range unwritten {
		if key.Destination == destination {
			stored = append(stored[:len(stored):len(stored)], Point{EventType: key.EventType, At: now, Counts: *c})
		}
	}
	steps, types, all := map[int64]*Point{}, map[string]*Counts{}, &Counts{}
	for i := range stored {
		p := &stored[i]
		if p.EventType != "" {
			if types[p.EventType] == nil {
				types[p.EventType] = &Counts{}
			}
			types[p.EventType].Add(&p.Counts)
			continue
		}
		all.Add(&p.Counts)
		at := p.At.Truncate(span.Step).Unix()
		step := steps[at]
		if step == nil {
			step = &Point{}
			steps[at] = step
		}
		step.Add(&p.Counts)
		if p.Backlog != nil && (step.Backlog == nil || *step.Backlog < *p.Backlog) {
			step.Backlog = p.Backlog
		}
	}
	past := Past{Span: span.Name, Series: seriesOf(steps, span, now), Sum: all.Sum(), Types: []TypeSum{}}
	for name, c := range types {
		past.Types = append(past.Types, TypeSum{name, c.Sum()})
	}
	slices.SortFunc(past.Types, func(a, b TypeSum) int {
		return cmp.Or(cmp.Compare(b.Delivered+b.Failed+b.Retried, a.Delivered+a.Failed+a.Retried), cmp.Compare(a.EventType, b.EventType))
	})
	return past
}

// seriesOf returns the points of a span. Before the first that is known nothing is; after it, a
// step without counts had none. The present step, which is not over, is left out unless it is the
// only one.
func seriesOf(steps map[int64]*Point, span Span, now time.Time) Series {
	last := now.Truncate(span.Step)
	s := Series{From: last.Add(span.Step - span.Back).Unix(), To: last.Unix()}
	known := false
	perMinute := 1 / span.Step.Minutes()
	for at := s.From; at <= s.To; at += int64(span.Step / time.Second) {
		if known && at == s.To {
			break
		}
		p := steps[at]
		known = known || p != nil
		if p == nil {
			p = &Point{}
		}
		rate := func(n int64) *float64 {
			if !known {
				return nil
			}
			return new(float64(n) * perMinute)
		}
		s.Times = append(s.Times, at)
		s.Delivered, s.Failed = append(s.Delivered, rate(p.Delivered)), append(s.Failed, rate(p.Failed))
		s.Retried, s.Probes = append(s.Retried, rate(p.Retried)), append(s.Probes, rate(p.Probes))
		took, latency := p.Took.Quantiles(), p.Latency.Quantiles()
		s.P50, s.P95, s.P99 = append(s.P50, took.P50), append(s.P95, took.P95), append(s.P99, took.P99)
		s.LatencyP50, s.LatencyP95, s.LatencyP99 = append(s.LatencyP50, latency.P50), append(s.LatencyP95, latency.P95), append(s.LatencyP99, latency.P99)
		s.Backlog = append(s.Backlog, p.Backlog)
	}
	return s
}
