package metrics

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// DefaultMost is how many destinations have their own series.
	DefaultMost = 100
	// other is the destination as which those without their own series are counted.
	other = "other"
	// chooseEvery is the least time between two choices.
	chooseEvery = 10 * time.Second
	// troubleScore is what a delivery that failed, or a sign of trouble at a scrape, counts beside
	// a delivery without one.
	troubleScore = 100
	// A destination takes the series of another one only if its score is so many times as high, and
	// at least replaceScore: where all are about equally busy, chance would otherwise begin new
	// series at every scrape.
	replaceTimes = 4
	replaceScore = troubleScore
)

// destinations knows which destinations have their own series. While there are few, all have.
// Among many they are those with the most deliveries and troubles of late: each scrape chooses the
// first most of them. One that has series keeps them, until twice as many have: then one that is
// chosen takes the place of the one with the lowest score, whose series end. What was counted for a
// destination while it had none remains with the destination "other". So no counter ever goes back.
type destinations struct {
	most int

	mu    sync.RWMutex // held while something is counted, so that nothing is counted for series that ended
	known map[string]*destination
	own   int
	rest  *series // nil: every destination has its own series
	next  time.Time
}

// A destination is what its deliveries are counted by.
type destination struct {
	*series              // its own, or those of the rest
	recent  atomic.Int64 // deliveries since the last choice, those with trouble more often
	score   float64      // recent, halved at each choice
}

// series are those of one destination, or of the rest, found without a lookup of labels.
type series struct {
	name                                string
	claimed, duplicates, droppedHeaders prometheus.Counter
	settled                             map[result]prometheus.Counter
	answer                              map[policy.Outcome]prometheus.Observer
	latency, dueLatency                 map[string]prometheus.Observer // by class
}

// note counts deliveries whose outcome was written.
func (d *destination) note(outcome policy.Outcome, deliveries int) {
	if outcome != policy.Delivered {
		deliveries *= troubleScore
	}
	d.recent.Add(int64(deliveries))
}

// begin makes the series of the first configuration.
func (m *Metrics) begin(names []string) {
	d := &m.destinations
	if len(names) > d.most {
		d.rest = m.newSeries(other, true)
		return
	}
	for _, name := range names {
		m.add(name)
	}
}

// lock returns what counts a destination, and holds mu for reading: the caller must unlock it. It
// makes that when the destination is new: the caller has the name from the configuration.
func (m *Metrics) lock(name string) *destination {
	d := &m.destinations
	for {
		d.mu.RLock()
		if found := d.known[name]; found != nil {
			return found
		}
		d.mu.RUnlock()
		d.mu.Lock()
		if d.known[name] == nil {
			m.add(name)
		}
		d.mu.Unlock()
	}
}

// add makes a destination known, with its own series if it may have them. The caller holds mu,
// or is the only one.
func (m *Metrics) add(name string) {
	d := &m.destinations
	if name != other && d.own < d.most {
		d.known[name] = &destination{series: m.newSeries(name, d.rest == nil)}
		d.own++
		return
	}
	if d.rest == nil {
		d.rest = m.newSeries(other, true)
	}
	d.known[name] = &destination{series: d.rest}
}

// choose gives series to the destinations that had the most deliveries and troubles of late.
// troubled are those at which a scrape sees trouble.
func (m *Metrics) choose(now time.Time, troubled []string) {
	d := &m.destinations
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.rest == nil || now.Before(d.next) {
		return
	}
	d.next = now.Add(chooseEvery)
	for _, name := range troubled {
		if d.known[name] == nil {
			m.add(name)
		}
		d.known[name].recent.Add(troubleScore)
	}
	ranked := make([]string, 0, len(d.known))
	for name, k := range d.known {
		k.score = k.score/2 + float64(k.recent.Swap(0))
		if name != other {
			ranked = append(ranked, name)
		}
	}
	slices.SortFunc(ranked, func(a, b string) int {
		return cmp.Or(cmp.Compare(d.known[b].score, d.known[a].score), cmp.Compare(a, b))
	})
	lowest := len(ranked) - 1
	for _, name := range ranked[:min(len(ranked), d.most)] {
		k := d.known[name]
		if k.score < 1 {
			return
		}
		if k.series != d.rest {
			continue
		}
		if d.own >= 2*d.most {
			for d.known[ranked[lowest]].series == d.rest {
				lowest--
			}
			last := d.known[ranked[lowest]]
			if k.score < replaceScore || k.score < replaceTimes*last.score {
				return
			}
			m.end(ranked[lowest])
			last.series = d.rest
			d.own--
		}
		k.series = m.newSeries(name, false)
		d.own++
	}
}

// end removes the series of a destination.
func (m *Metrics) end(name string) {
	of := prometheus.Labels{"destination": name}
	for _, vec := range []interface{ DeletePartialMatch(prometheus.Labels) int }{
		m.claimed, m.duplicates, m.droppedHeaders, m.settled, m.answer, m.latency, m.dueLatency,
	} {
		vec.DeletePartialMatch(of)
	}
}

// chosen reports whether a destination has its own series.
func (d *destinations) chosen(name string) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	k := d.known[name]
	return k != nil && k.series != d.rest
}

// crowded reports whether some destinations, among so many, have no series of their own. These are
// counted as the destination "other".
func (d *destinations) crowded(destinations int) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.rest != nil || destinations > d.most
}

// newSeries makes the series of a destination: all of them or, of one that was chosen among many,
// those that most deliveries need.
func (m *Metrics) newSeries(name string, all bool) *series {
	s := &series{
		name:    name,
		claimed: m.claimed.WithLabelValues(name), duplicates: m.duplicates.WithLabelValues(name), droppedHeaders: m.droppedHeaders.WithLabelValues(name),
		settled: map[result]prometheus.Counter{}, answer: map[policy.Outcome]prometheus.Observer{},
		latency: map[string]prometheus.Observer{}, dueLatency: map[string]prometheus.Observer{},
	}
	for _, outcome := range policy.Outcomes() {
		s.answer[outcome] = m.answer.WithLabelValues(name, string(outcome))
		for _, reason := range policy.Reasons() {
			if (outcome == policy.Delivered) == (reason == policy.ReasonOK) && (all || outcome == policy.Delivered) {
				s.settled[result{outcome, reason}] = m.settled.WithLabelValues(name, string(outcome), string(reason))
			}
		}
	}
	for _, class := range relay.Classes() {
		s.latency[class] = m.latency.WithLabelValues(name, class)
		s.dueLatency[class] = m.dueLatency.WithLabelValues(name, class)
	}
	return s
}
