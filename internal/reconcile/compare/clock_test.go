package compare_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/reconcile/compare"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// skewed lets the receiver's clock be ahead.
func skewed(ahead time.Duration) func(*compare.Options) {
	return func(o *compare.Options) {
		ask := o.Ask
		o.Ask = func(ctx context.Context, q reconcile.Request) (reconcile.Answer, error) {
			a, err := ask(ctx, q)
			if q.Ask == reconcile.AskDescribe {
				a.Now = a.Now.Add(ahead)
			}
			return a, err
		}
	}
}

// Both clocks are asked for: one that is wrong by almost an hour moves no event out of the window.
func TestClocksMayDiffer(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{59 * time.Minute, -59 * time.Minute} {
		s := newSides(t, 300)
		s.there(`UPDATE processed_events SET received_at = received_at + $1::interval`, ahead)
		s.there(`DELETE FROM processed_events WHERE idempotency_key = $1`, key(9))
		r := s.run(skewed(ahead))
		s.want(r, "never arrived", r.NeverArrived, keys(9))
		if r.Findings() != 1 || r.Sent != 300 || r.Received != 299 {
			t.Errorf("report %+v", r)
		}
	}
}

// Times of a clock that is years away say nothing: a comparison by them would pass, of nothing.
func TestAbsurdClocksAreRefused(t *testing.T) {
	t.Parallel()
	s := newSides(t, 3)
	s.there(`DELETE FROM processed_events`)
	for _, ahead := range []time.Duration{2 * time.Hour, -2 * time.Hour, 100 * 365 * 24 * time.Hour, -290 * 365 * 24 * time.Hour} {
		r, err := compare.Run(t.Context(), ops.New(s.outbox).DB(), s.options(skewed(ahead)))
		if err == nil || !strings.Contains(err.Error(), "they may differ by 1h0m0s") {
			t.Errorf("%v: %v, %+v", ahead, err, r)
		}
	}
}
