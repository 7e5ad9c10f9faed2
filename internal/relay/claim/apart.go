package claim

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

const (
	// claimApartFor is how long each part of a claim has its own statement after one of them
	// met data that cannot be read.
	claimApartFor = time.Minute
	// damagedAgain is how long such a part is put off. It is shorter than lane.LiveWindow: what
	// becomes due meanwhile must still be live then.
	damagedAgain = lane.LiveWindow / 2
)

// damaged are the parts of claims that met data which the server cannot read. The claimer owns it.
type damaged struct {
	until time.Time                 // claim apart until then
	again map[damagedPart]time.Time // not before
}

// A damagedPart is a class of a destination or, with noClass, its ordering keys. A rescan is a part
// of its own, since it reads more than the scan behind the cursor.
type damagedPart struct {
	destination string
	class       lane.Class
	rescan      bool
}

const noClass lane.Class = -1

// claimAll claims for all requests in one statement. A damaged page fails the whole statement. Each
// scan, and the keys of each destination, then get their own statement for a while, so that
// other destinations, and newer deliveries of the same one, continue.
func (c *Rows) claimAll(ctx context.Context, instance int32, requests []Request) (Result, error) {
	now := time.Now()
	if !now.Before(c.damaged.until) {
		result, err := c.claimOnce(ctx, instance, requests)
		if pg.ClassifyError(err) != pg.ErrorDamaged {
			return result, err
		}
		c.Failed("claim", err)
		c.damaged = damaged{until: now.Add(claimApartFor), again: map[damagedPart]time.Time{}}
	}
	all := Result{at: c.Clock.Now(), reordered: map[int]int64{}, apart: true}
	var failed error
	for i, request := range requests {
		for _, part := range request.parts() {
			var found Result
			if failed == nil {
				found, failed = c.claimPart(ctx, instance, part, now)
			}
			if failed != nil { // what is claimed must be sent; the next claim asks for the rest again
				if len(all.Deliveries) == 0 {
					return Result{}, failed
				}
				for _, key := range part.Keys {
					c.Lanes.MakeReady(ordering.Key{Destination: part.Destination, Key: key.Key}, ordering.Place{}, key.Class)
				}
			}
			all.include(found, i, len(part.Scans))
		}
	}
	return all, nil
}

// parts returns the request in pieces that can be claimed one by one.
func (r Request) parts() (parts []Request) {
	one := r
	for _, s := range r.Scans {
		s.Shared = false
		one.Scans, one.Keys = []lane.Scan{s}, nil
		parts = append(parts, one)
	}
	if len(r.Keys) > 0 {
		one.Scans, one.Keys = nil, r.Keys
		parts = append(parts, one)
	}
	return parts
}

// claimPart claims one part, or nothing while it is put off.
func (c *Rows) claimPart(ctx context.Context, instance int32, part Request, now time.Time) (Result, error) {
	which := damagedPart{destination: part.Destination, class: noClass}
	if len(part.Scans) > 0 {
		which.class, which.rescan = part.Scans[0].Class, part.Scans[0].Rescan
	}
	forNew := which.class == lane.Live && !which.rescan
	if again := c.damaged.again[which]; now.Before(again) {
		c.Agenda.At(agenda.CauseDamage, again)
		return Result{scans: []lane.ScanResult{{Unread: forNew}}[:len(part.Scans)]}, nil
	}
	result, err := c.claimOnce(ctx, instance, []Request{part})
	if pg.ClassifyError(err) == pg.ErrorDamaged {
		c.Failed("claim", err)
		if forNew {
			result, err = c.claimBehind(ctx, instance, part)
			if pg.ClassifyError(err) != pg.ErrorDamaged {
				return result, err
			}
		}
		c.damaged.again[which] = now.Add(damagedAgain)
		c.Agenda.At(agenda.CauseDamage, c.damaged.again[which])
		result = Result{scans: make([]lane.ScanResult, len(part.Scans))}
		if forNew { // continue behind what cannot be read, with what becomes due from now on
			result.scans[0] = lane.ScanResult{Last: lane.Keyset{At: c.Clock.Now()}, More: true}
		}
		return result, nil
	}
	return result, err
}

// claimBehind claims the newer half of a part that met damaged data, or else the newer half of
// that, and so on.
func (c *Rows) claimBehind(ctx context.Context, instance int32, part Request) (result Result, err error) {
	end := c.Clock.Now()
	width := min(end.Sub(part.Scans[0].After.At), lane.LiveWindow)
	for range 6 {
		width /= 2
		newer := part
		newer.Scans = []lane.Scan{part.Scans[0]}
		newer.Scans[0].After = lane.Keyset{At: end.Add(-width)}
		if result, err = c.claimOnce(ctx, instance, []Request{newer}); pg.ClassifyError(err) != pg.ErrorDamaged {
			return result, err
		}
	}
	return result, err
}

// claimOnce runs one statement, and remembers whether its answer came.
func (c *Rows) claimOnce(ctx context.Context, instance int32, requests []Request) (Result, error) {
	begun := time.Now()
	result, err := c.Claim(ctx, instance, requests)
	if err != nil {
		c.lost.Failed(instance, err)
		return result, err
	}
	c.lost.Acknowledged(instance, result.at, c.Lease)
	if c.Ran != nil {
		c.Ran(len(result.Deliveries), time.Since(begun))
	}
	return result, err
}

// include adds what a part of the request with the given index has found, in as many scans.
func (r *Result) include(part Result, request, scans int) {
	if !part.at.IsZero() {
		r.at = part.at
	}
	for _, d := range part.Deliveries {
		if d.Scan > 0 {
			d.Scan = len(r.scans) + 1
		}
		r.Deliveries = append(r.Deliveries, d)
	}
	if part.scans == nil {
		part.scans = make([]lane.ScanResult, scans)
	}
	r.scans = append(r.scans, part.scans...)
	for _, head := range part.heads {
		head.request = request
		r.heads = append(r.heads, head)
	}
	if reordered, changed := part.reordered[0]; changed {
		r.reordered[request], r.newest = reordered, part.newest
	}
}
