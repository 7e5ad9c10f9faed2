package settle

import (
	"context"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
)

// A rangeBatch is what a batch writes of the ranges that were taken under one number of this relay.
type rangeBatch struct {
	intake.NewRows
	ranges   []*TakenRange
	outcomes []policy.Outcome // of each delivery; empty: it only gets a row
	done     intake.Settled
}

func newRangeBatches(b *batch, o *outcomes, now time.Time) (all []*rangeBatch) {
	of := func(d *InHand) *rangeBatch {
		i := slices.IndexFunc(all, func(r *rangeBatch) bool { return r.Relay == d.Range.RelayID })
		if i < 0 {
			i, all = len(all), append(all, &rangeBatch{NewRows: intake.NewRows{Relay: d.Range.RelayID}})
		}
		r := all[i]
		if !slices.Contains(r.ranges, d.Range) {
			r.ranges = append(r.ranges, d.Range)
		}
		return r
	}
	for _, d := range b.rows {
		r := of(d)
		r.Deliveries, r.outcomes = append(r.Deliveries, d.row(now)), append(r.outcomes, "")
	}
	for _, s := range o.rowless {
		r := of(s.InHand)
		r.Deliveries, r.outcomes = append(r.Deliveries, s.row(now)), append(r.outcomes, s.Outcome)
	}
	for _, r := range all {
		slices.SortFunc(r.ranges, func(a, b *TakenRange) int { return int(a.Seq - b.Seq) })
		for _, taken := range r.ranges {
			r.Ranges = append(r.Ranges, taken.Ref())
			if slices.Contains(b.ended, taken) {
				r.Ended = append(r.Ended, taken.Ref())
				for _, part := range taken.parts {
					r.Witnesses = append(r.Witnesses, part.witness())
				}
			}
		}
	}
	return all
}

// row returns the row of a delivery of a range with its outcome. A failed one is claimed: the next
// statement of the batch fails it.
func (s *Settlement) row(now time.Time) intake.NewRow {
	row := s.InHand.row(now)
	if s.Outcome == policy.Fail {
		return row
	}
	row.Lease = 0
	if !s.isBound() {
		row.NotAfter = time.Time{}
	}
	switch s.Outcome {
	case policy.Delivered:
		row.Status, row.NotAfter, row.Attempts, row.Code, row.Rescues = intake.Delivered, time.Time{}, 1, int16(s.StatusCode), 0
		row.Since = now.Sub(s.StartedAt)
	case policy.Retry:
		row.Attempts, row.Code, row.Reason, row.Error = 1, int16(s.StatusCode), string(s.Reason), s.Message
		row.Since, row.Wait = now.Sub(s.StartedAt), s.Delay
	}
	return row
}

// tooLate returns how many outcomes were not written: their range is another relay's, or they have
// a row already.
func (r *rangeBatch) tooLate() (n int) {
	for i, outcome := range r.outcomes {
		if outcome == "" || outcome == policy.Fail { // which its own statement counts
			continue
		}
		if slices.Contains(r.done.Existing, i) || slices.Contains(r.done.Lost, r.Deliveries[i].Range) {
			n++
		}
	}
	return n
}

// noteRanges notes what the database said of the ranges of a batch, and returns how many outcomes
// were not written.
func (b *batch) noteRanges(ranges []*rangeBatch) (tooLate int) {
	b.lost, b.missing = nil, nil
	for _, r := range ranges {
		tooLate += r.tooLate()
		b.missing = append(b.missing, r.done.Missing...)
		for _, of := range r.ranges {
			if slices.Contains(r.done.Lost, of.Ref()) {
				b.lost = append(b.lost, of)
			}
		}
	}
	return tooLate
}

// requestSweep wakes the relays that serve other destinations. If that fails, they find at their
// next poll what has become pending.
func (s store) requestSweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	_, _ = s.pool.Exec(ctx, pg.RequestSweep)
}
