package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A row whose request was held, while the breaker stays closed, is read again after a moment: the
// cursors have passed it. Once the breaker is open its probes lead to it.
func TestHeldRowIsReadAgain(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	for name, state := range map[string]policy.BreakerState{"closed": policy.BreakerClosed, "open": policy.BreakerOpen} {
		r := prepared(t, config(db, to("http://receiver.test/")))
		l := r.lanes.Get("default")
		now := time.Now()
		held := settle.Settlement{Destination: l.Name, EventID: 1, DueAt: now.Add(-5 * time.Second), Class: int(lane.Live)}
		held.Outcome, held.Posted, held.Reason = policy.Hold, true, policy.ReasonConnect
		l.CountTaken(lane.Live, 1)
		r.applyWritten([]settle.Settlement{held})
		if state != policy.BreakerClosed {
			l.Change(func(b *policy.Breaker) { b.Enter(now, state) })
		}
		if _, due := l.TakeDue(now); due {
			t.Errorf("%s: it is read again at once", name)
		}
		since, due := l.TakeDue(now.Add(2 * heldAgain))
		if due != (state == policy.BreakerClosed) || due && !since.Equal(held.DueAt) {
			t.Errorf("%s: read again: %t, what was due since %s", name, due, since)
		}
		var planned agenda.Agenda
		r.mailbox.retries.Plan(&planned, now)
		if wait, next := planned.Next(now); !next.Has(agenda.CauseRetry) || wait > 2*heldAgain {
			t.Errorf("%s: %s in %s", name, next, wait)
		}
	}
}
