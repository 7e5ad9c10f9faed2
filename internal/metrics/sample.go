package metrics

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
)

const (
	// sampleInterval is the time between two samples.
	sampleInterval = 15 * time.Second
	// scrapedWithin is how long after a scrape samples continue: an idle relay that is not scraped
	// asks nothing.
	scrapedWithin = 5 * time.Minute
	// staleSample is how old a sample may be before its gauges are left out.
	staleSample = 5 * time.Minute
	// freshWithin bounds how long the first scrape after a rest waits for a sample. Prometheus
	// itself waits for ten seconds.
	freshWithin = time.Second
	// restFactor is how many times its own duration a sample is followed by a rest: samples take a
	// hundredth of the time.
	restFactor = 100
	// failedRest bounds the rest after a sample that failed: a database that hung for seconds would
	// leave no gauge for a quarter of an hour. It is well below staleSample, so that one failure
	// loses no gauge.
	failedRest = 2 * time.Minute
	// sampleTimeout bounds a sample, for whose end a stop waits.
	sampleTimeout = 10 * time.Second
	// unregistered is when to try again while the relay is not registered.
	unregistered = 250 * time.Millisecond
	// Counts of all destinations together read at most sampleEntries index entries of each kind.
	sampleEntries = 80_000
	sampleMost    = 10_000
	sampleLeast   = 1_000
)

// A sample is what one statement saw of the database.
type sample struct {
	backlog watch.Backlog
	at      time.Time // by this process's clock
	took    time.Duration
}

// A sampler keeps the last sample, and knows whether anything reads it.
type sampler struct {
	wanted chan struct{} // holds a token after a scrape

	mu    sync.Mutex // guards the fields below
	last  sample
	rests chan struct{} // while nothing is sampled; closed when the next sample has ended
}

func newSampler() sampler { return sampler{wanted: make(chan struct{}, 1)} }

func (s *sampler) keep(taken sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = taken
}

// renew makes the last sample, if there is one, that of now: nothing waits in an outbox that is
// asleep, and what has failed is as it was.
func (s *sampler) renew(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last.at.IsZero() {
		return
	}
	b := s.last.backlog
	b.At, b.Lanes = b.At.Add(now.Sub(s.last.at)), slices.Clone(b.Lanes)
	b.Parked, b.Untaken, b.Unserved = 0, 0, 0
	for i := range b.Lanes {
		lane := &b.Lanes[i]
		lane.Pending, lane.Waiting, lane.BlockedKeys, lane.LagSeconds = 0, 0, 0, 0
	}
	s.last.backlog, s.last.at = b, now
}

// recent returns the last sample; false if there is none that is still true.
func (s *sampler) recent(now time.Time) (sample, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last, !s.last.at.IsZero() && now.Sub(s.last.at) < staleSample
}

// rest notes that no sample is taken before the next scrape.
func (s *sampler) rest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rests == nil {
		s.rests = make(chan struct{})
	}
}

// endRest ends the wait of scrapes for the first sample after a rest.
func (s *sampler) endRest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rests != nil {
		close(s.rests)
		s.rests = nil
	}
}

// scraped notes that the gauges are read. After a rest it waits for the sample that this begins, so
// that the first scrape is not shown what was true long ago; not for a database that takes long.
func (s *sampler) scraped(ctx context.Context) {
	s.mu.Lock()
	rests := s.rests
	s.mu.Unlock()
	select {
	case s.wanted <- struct{}{}:
	default:
	}
	if rests == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, freshWithin)
	defer cancel()
	select {
	case <-rests:
	case <-ctx.Done():
	}
}

// Sample samples the database until ctx is done: once at the start and then for some minutes after
// each scrape.
func (m *Metrics) Sample(ctx context.Context) {
	interval := m.cfg.SampleInterval
	if interval <= 0 {
		interval = sampleInterval
	}
	var scraped time.Time
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer m.sampler.endRest()
	next := time.Now() // when a sample may be taken
	for {
		select {
		case <-timer.C:
		case <-m.sampler.wanted:
			scraped = time.Now()
		case <-ctx.Done():
			return
		}
		now := time.Now()
		_, have := m.sampler.recent(now)
		switch {
		case now.Before(next):
		case !have && scraped.IsZero(), now.Sub(scraped) < scrapedWithin:
			next = now.Add(m.take(ctx, interval))
			m.sampler.endRest()
		default:
			timer.Stop() // until the next scrape
			m.sampler.rest()
			continue
		}
		timer.Reset(max(time.Until(next), 0))
	}
}

// take takes one sample and returns how long to wait for the next one.
func (m *Metrics) take(ctx context.Context, interval time.Duration) (wait time.Duration) {
	f := m.follows.Load()
	if f == nil || !f.state().Registered {
		return unregistered
	}
	if f.state().Asleep { // nothing has changed
		m.sampler.renew(time.Now())
		return interval
	}
	if m.turns != nil {
		select {
		case m.turns <- struct{}{}:
			defer func() { <-m.turns }()
		case <-ctx.Done():
			return interval
		}
	}
	counting, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	began := time.Now()
	backlog, err := f.count(counting, sampleLimit(len(f.state().Lanes)))
	took := time.Since(began)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		m.cfg.Log.Warn().Err(err).Msg("metrics: the database was not sampled; trying again")
	default:
		m.sampler.keep(sample{backlog, time.Now(), took})
	}
	return sampleRest(interval, time.Duration(m.restFactor)*took, err)
}

// sampleRest returns how long to wait after a sample: rest is what it costs, err why it failed.
func sampleRest(interval, rest time.Duration, err error) time.Duration {
	if err != nil {
		rest = min(rest, failedRest)
	}
	return max(interval, rest)
}

// sampleLimit returns where counts stop, so that a sample costs the same with many destinations as
// with few.
func sampleLimit(destinations int) int {
	return min(sampleMost, max(sampleLeast, sampleEntries/max(1, destinations)))
}
