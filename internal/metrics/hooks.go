package metrics

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay"
)

// Hooks returns what a relay has to call. None of them allocates or waits.
func (m *Metrics) Hooks() relay.Hooks {
	return relay.Hooks{
		Claimed: m.claimedFor,
		ClaimRan: func(deliveries int, took time.Duration) {
			m.claimSize.Observe(float64(deliveries))
			m.claimTime.Observe(took.Seconds())
		},
		Woken:     m.woken,
		Attempted: m.attempted,
		Settled:   m.written,
		SettleRan: func(deliveries int, took time.Duration) {
			m.settleSize.Observe(float64(deliveries))
			m.settleTime.Observe(took.Seconds())
		},
		StaleSettle: func(deliveries int) { m.stale.Add(float64(deliveries)) },
		Rescued:     func(int32) { m.rescues.Inc() },
		Archived:    func(batch archive.Result) { m.archived.Add(float64(batch.Events)) },
		Notified:    func(_ string, _ alert.Alert, err error) { m.notified[outcomeOf(err)].Inc() },
		Reloaded:    func(_ []string, err error) { m.reloads[outcomeOf(err)].Inc() },
		DatabaseError: func(_ string, err error) {
			m.errors.Inc()
			m.health.failed(time.Now(), err)
		},
		Quarantined: func(reason string) { m.health.quarantined.Store(reason != "") },
	}
}

// CountSpans counts spans of attempts that were exported, or dropped. It is safe for concurrent
// use.
func (m *Metrics) CountSpans(exported bool, spans int) { m.spans[exported].Add(float64(spans)) }

func outcomeOf(err error) string {
	if err != nil {
		return failed
	}
	return succeeded
}

func (m *Metrics) woken(by relay.Wake) {
	if counter := m.wakes[by]; counter != nil {
		counter.Inc()
	}
}

func (m *Metrics) claimedFor(destination string, deliveries int) {
	s := m.lock(destination)
	defer m.destinations.mu.RUnlock()
	s.claimed.Add(float64(deliveries))
}

func (m *Metrics) attempted(a relay.Attempt) {
	s := m.lock(a.Destination)
	defer m.destinations.mu.RUnlock()
	if observer := s.answer[a.Outcome]; observer != nil {
		observer.Observe(a.Duration.Seconds())
	}
	if a.Duplicate {
		s.duplicates.Inc()
	}
	s.droppedHeaders.Add(float64(a.DroppedHeaders))
	if a.Batch > 0 {
		m.batchSize.Observe(float64(a.Batch))
	}
	if a.Outcome == policy.Delivered {
		if observer := s.latency[a.Class]; observer != nil {
			observer.Observe(a.SinceFirstDue.Seconds())
			s.dueLatency[a.Class].Observe(a.SinceDue.Seconds())
		}
	}
}

func (m *Metrics) written(destination string, outcome policy.Outcome, reason policy.Reason, deliveries int) {
	s := m.lock(destination)
	defer m.destinations.mu.RUnlock()
	counter := s.settled[result{outcome, reason}]
	if counter == nil { // a pair that the policy does not make, or that a chosen destination has not had before
		counter = m.settled.WithLabelValues(s.name, string(outcome), string(reason))
	}
	counter.Add(float64(deliveries))
	s.note(outcome, deliveries)
}
