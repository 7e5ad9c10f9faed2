package settle

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

// RowsAfter is how long deliveries of a range may have no rows. Then all that are left get rows,
// claimed by this relay, and the range ends. Each take reads the ranges from the oldest open one
// on, and other relays wait for the ordering keys of open ranges.
const RowsAfter = time.Second

// A TakenRange is a range of events in this relay's hand. Its deliveries have no rows until their
// outcome is known, or until RowsAfter.
type TakenRange struct {
	Seq, Fence int64
	RelayID    int32     // of the relay that took it
	Begun      time.Time // when the take began, on this process's clock
	Taken      time.Time // when it had ended
	Deliveries []InHand

	// Run owns these after Track.
	open   int       // deliveries without a row
	rowsAt time.Time // when to make rows of what is left
	parts  []part    // with rows that the server has acknowledged, and may still lose
}

// An InHand is a delivery of a range.
type InHand struct {
	Range        *TakenRange
	EventID      int64
	Destination  string
	OrderingKey  *string
	PayloadBytes int
	Wait         time.Duration // from the take until the delivery is due
	// Scheduled is when the delivery joins its ordering key, by the database's clock. It holds no
	// other one before. It gets a row by its own settlement, at once. Zero: it has joined.
	Scheduled time.Time
	NotAfter  time.Time
	LeaseEnds time.Time
	Rescues   int // how often a relay died that may have had it in flight

	// Awaits says that another relay may have an earlier event of the ordering key in hand. The
	// delivery gets no row until that is known: if this relay died, any relay could claim the row,
	// before the earlier event has one.
	Awaits atomic.Bool

	HasRow bool // Run owns it after Track
	undone bool // it had a row, which a crash of the server has undone: it gets one, whatever it waits for
}

// mayBlock reports whether other deliveries of the ordering key may have to wait for a row of this
// one.
func (d *InHand) mayBlock() bool { return d.OrderingKey != nil && d.Scheduled.IsZero() }

// Ref names the range as this relay has it.
func (r *TakenRange) Ref() intake.RangeRef { return intake.RangeRef{Seq: r.Seq, Fence: r.Fence} }

// UntilDue returns how long it is until the delivery is due; negative: how long ago it was. It may
// be too long, by the time from the database's answer until the end of the take, and is never too
// short: a claimer that came early would find nothing and not return.
func (d *InHand) UntilDue(now time.Time) time.Duration { return d.Wait - now.Sub(d.Range.Taken) }

// row returns the delivery as a pending row that this relay has claimed, for the rest of the lease.
func (d *InHand) row(now time.Time) intake.NewRow {
	return intake.NewRow{
		Range: d.Range.Ref(), EventID: d.EventID, Destination: d.Destination, Status: intake.Pending, Wait: d.UntilDue(now), OrderingKey: d.OrderingKey,
		PayloadBytes: d.PayloadBytes, NotAfter: d.NotAfter, Rescues: d.Rescues, DueAt: d.Scheduled, Lease: max(d.LeaseEnds.Sub(now), time.Second),
	}
}

// Track passes a range on to Run. It must be called before any delivery of it is settled.
func (w *Settler) Track(r *TakenRange) {
	for i := range r.Deliveries {
		if !r.Deliveries[i].HasRow {
			r.open++
		}
	}
	w.taken <- r
}

// addRange notes an open range. Run may read a settlement of it first: the two come through
// different channels.
func (w *Settler) addRange(r *TakenRange) {
	if r.open > 0 && !slices.Contains(w.ranges, r) {
		r.rowsAt = r.Begun.Add(RowsAfter)
		w.ranges = append(w.ranges, r)
	}
}

// resolveRanges decides for each settlement of a batch whether it has a row, and what else is
// written with them.
func (w *Settler) resolveRanges(b *batch) {
	left := map[*TakenRange]int{}
	inBatch := map[*InHand]bool{}
	b.ended = nil
	blocks := false
	for i := range b.settlements {
		s := &b.settlements[i]
		if s.rowless = !s.HasRow(); s.rowless {
			w.addRange(s.InHand.Range)
			left[s.InHand.Range]++
			inBatch[s.InHand] = true
			blocks = blocks || s.mayBlock()
		}
	}
	b.rows = slices.DeleteFunc(b.rows, func(d *InHand) bool { return d.HasRow })
	for _, d := range b.rows {
		inBatch[d] = true
		blocks = blocks || d.mayBlock()
	}
	if blocks {
		b.rows = append(b.rows, w.earlier(b, inBatch)...)
	}
	for _, d := range b.rows {
		left[d.Range]++
	}
	for r, n := range left {
		if r.open == n {
			b.ended = append(b.ended, r)
		}
	}
}

// earlier returns the deliveries in hand that precede a row of a batch in their ordering key, and
// are not in the batch themselves.
func (w *Settler) earlier(b *batch, inBatch map[*InHand]bool) (rows []*InHand) {
	last := map[ordering.Key]int64{}
	note := func(d *InHand) {
		key := ordering.Key{Destination: d.Destination, Key: *d.OrderingKey}
		last[key] = max(last[key], d.EventID)
	}
	for i := range b.settlements {
		if s := &b.settlements[i]; s.rowless && s.mayBlock() {
			note(s.InHand)
		}
	}
	for _, d := range b.rows {
		if d.mayBlock() {
			note(d)
		}
	}
	for _, r := range w.ranges {
		for i := range r.Deliveries {
			d := &r.Deliveries[i]
			if d.HasRow || d.OrderingKey == nil || inBatch[d] || d.Awaits.Load() || !d.Scheduled.IsZero() {
				continue
			}
			if d.EventID < last[ordering.Key{Destination: d.Destination, Key: *d.OrderingKey}] {
				rows = append(rows, d)
			}
		}
	}
	return rows
}

// A part is what one transaction wrote of a range: all of it is there or, after a crash of the
// server, nothing.
type part []*InHand

// witness names a row that is there if the part is.
func (p part) witness() intake.Witness {
	return intake.Witness{Range: p[0].Range.Ref(), EventID: p[0].EventID, Destination: p[0].Destination}
}

// rangesWritten notes what a batch has written of ranges.
func (w *Settler) rangesWritten(b *batch) {
	torn := w.forgetParts(b.missing)
	written := map[*TakenRange]part{}
	note := func(d *InHand) {
		d.HasRow = true
		d.Range.open--
		written[d.Range] = append(written[d.Range], d)
	}
	for i := range b.settlements {
		if s := &b.settlements[i]; s.rowless {
			note(s.InHand)
		}
	}
	for _, d := range b.rows {
		note(d)
	}
	for r, part := range written {
		r.parts = append(r.parts, part)
	}
	for _, r := range b.ended {
		if !torn[r] {
			w.forgetRange(r)
		}
	}
	for _, r := range b.lost { // another relay has taken it over: what this one has in hand is void
		for i := range r.Deliveries {
			r.Deliveries[i].HasRow = true
		}
		w.forgetRange(r)
	}
	if len(b.rows)+len(b.lost) == 0 {
		return
	}
	for i := range w.aside { // while this relay has the row claimed
		if s := &w.aside[i]; s.rowless && s.HasRow() {
			s.aside.again = time.Now()
		}
	}
}

// forgetParts makes open again what a crash of the server has undone of ranges, and returns these.
func (w *Settler) forgetParts(missing []intake.Witness) (torn map[*TakenRange]bool) {
	torn = map[*TakenRange]bool{}
	for _, r := range w.ranges {
		r.parts = slices.DeleteFunc(r.parts, func(p part) bool {
			if !slices.Contains(missing, p.witness()) {
				return false
			}
			for _, d := range p {
				d.HasRow, d.undone = false, true
			}
			r.open += len(p)
			r.rowsAt = time.Now().Add(RowsAfter) // when what was acknowledged is written again
			torn[r] = true
			return true
		})
	}
	return torn
}

func (w *Settler) forgetRange(r *TakenRange) {
	if i := slices.Index(w.ranges, r); i >= 0 {
		w.ranges = slices.Delete(w.ranges, i, i+1)
		w.RangeEnded(r.Ref())
	}
}

// nextRows returns when rows are due of the first of the open ranges.
func (w *Settler) nextRows() time.Time {
	return slices.MinFunc(w.ranges, func(a, b *TakenRange) int { return a.rowsAt.Compare(b.rowsAt) }).rowsAt
}

// endOldRanges makes rows of what is left of ranges that were taken long enough ago.
func (w *Settler) endOldRanges(ctx context.Context, now time.Time) {
	var b batch
	for _, r := range w.ranges {
		if now.Before(r.rowsAt) {
			continue
		}
		for i := range r.Deliveries {
			if d := &r.Deliveries[i]; !d.HasRow && (d.undone || !d.Awaits.Load() && d.Scheduled.IsZero()) {
				b.rows = append(b.rows, d)
			}
		}
	}
	if len(b.rows) > 0 {
		w.write(ctx, b)
	}
	open := 0
	for _, r := range w.ranges { // again later, if something awaits another relay
		open += r.open
		if !now.Before(r.rowsAt) {
			r.rowsAt = now.Add(RowsAfter)
		}
	}
	for _, d := range b.rows { // ever more rarely: each refused row is a statement
		if !d.HasRow {
			d.Range.rowsAt = now.Add(max(min(max(now.Sub(d.Range.Begun), RowsAfter), asideRefused), time.Duration(open)*refusedEach))
		}
	}
}
