package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

const (
	// claimApartFor is how long each part of a claim has a statement of its own after one of them met data that cannot be read.
	claimApartFor = time.Minute
	// damagedAgain is how long such a part is put off. It is shorter than liveWindow: what becomes due meanwhile must still be live then.
	damagedAgain = liveWindow / 2
)

// damaged are the parts of claims that met data which the server cannot read. The claimer owns it.
type damaged struct {
	until time.Time                 // claim apart until then
	again map[damagedPart]time.Time // not before
}

// A damagedPart is a class of a destination or, with noClass, its ordering keys. A rescan is a part of its own, since it reads
// more than the scan behind the cursor.
type damagedPart struct {
	destination string
	class       class
	rescan      bool
}

const noClass class = -1

// claimAll claims for all requests in one statement. A damaged page fails the whole statement. Each scan, and the keys of each
// destination, then get a statement of their own for a while, so that other destinations, and newer deliveries of the same one, go on.
func (c *rows) claimAll(ctx context.Context, instance int32, requests []claimRequest) (claimResult, error) {
	now := time.Now()
	if !now.Before(c.damaged.until) {
		result, err := c.claimOnce(ctx, instance, requests)
		if pg.ClassifyError(err) != pg.ErrorDamaged {
			return result, err
		}
		c.failed("claim", err)
		c.damaged = damaged{until: now.Add(claimApartFor), again: map[damagedPart]time.Time{}}
	}
	all := claimResult{at: c.clock.Now(), reordered: map[int]int64{}}
	var failed error
	for i, request := range requests {
		for _, part := range request.parts() {
			var found claimResult
			if failed == nil {
				found, failed = c.claimPart(ctx, instance, part, now)
			}
			if failed != nil { // what is claimed must be sent; the next claim asks for the rest again
				if len(all.deliveries) == 0 {
					return claimResult{}, failed
				}
				for _, key := range part.keys {
					c.lanes.makeReady(ordering.Key{Destination: part.destination, Key: key.key}, ordering.Place{}, key.class)
				}
			}
			all.include(found, i, len(part.scans))
		}
	}
	return all, nil
}

// parts returns the request in pieces that can be claimed one by one.
func (r claimRequest) parts() (parts []claimRequest) {
	one := r
	for _, s := range r.scans {
		s.shared = false
		one.scans, one.keys = []scan{s}, nil
		parts = append(parts, one)
	}
	if len(r.keys) > 0 {
		one.scans, one.keys = nil, r.keys
		parts = append(parts, one)
	}
	return parts
}

// claimPart claims one part, or nothing while it is put off.
func (c *rows) claimPart(ctx context.Context, instance int32, part claimRequest, now time.Time) (claimResult, error) {
	which := damagedPart{destination: part.destination, class: noClass}
	if len(part.scans) > 0 {
		which.class, which.rescan = part.scans[0].class, part.scans[0].rescan
	}
	forNew := which.class == live && !which.rescan
	if again := c.damaged.again[which]; now.Before(again) {
		c.agenda.At(agenda.CauseDamage, again)
		return claimResult{scans: []scanResult{{unread: forNew}}[:len(part.scans)]}, nil
	}
	result, err := c.claimOnce(ctx, instance, []claimRequest{part})
	if pg.ClassifyError(err) == pg.ErrorDamaged {
		c.failed("claim", err)
		if forNew {
			result, err = c.claimBehind(ctx, instance, part)
			if pg.ClassifyError(err) != pg.ErrorDamaged {
				return result, err
			}
		}
		c.damaged.again[which] = now.Add(damagedAgain)
		c.agenda.At(agenda.CauseDamage, c.damaged.again[which])
		result = claimResult{scans: make([]scanResult, len(part.scans))}
		if forNew { // go on behind what cannot be read, with what becomes due from now on
			result.scans[0] = scanResult{last: keyset{at: c.clock.Now()}, more: true}
		}
		return result, nil
	}
	return result, err
}

// claimBehind claims the newer half of a part that met damaged data, or else the newer half of that, and so on.
func (c *rows) claimBehind(ctx context.Context, instance int32, part claimRequest) (result claimResult, err error) {
	end := c.clock.Now()
	width := min(end.Sub(part.scans[0].after.at), liveWindow)
	for range 6 {
		width /= 2
		newer := part
		newer.scans = []scan{part.scans[0]}
		newer.scans[0].after = keyset{at: end.Add(-width)}
		if result, err = c.claimOnce(ctx, instance, []claimRequest{newer}); pg.ClassifyError(err) != pg.ErrorDamaged {
			return result, err
		}
	}
	return result, err
}

// claimOnce runs one statement, and remembers whether its answer came.
func (c *rows) claimOnce(ctx context.Context, instance int32, requests []claimRequest) (claimResult, error) {
	begun := time.Now()
	result, err := c.readClaim(ctx, instance, requests)
	if err != nil {
		c.lost.Failed(instance, err)
		return result, err
	}
	c.lost.Acknowledged(instance, result.at, c.lease)
	if c.ran != nil {
		c.ran(len(result.deliveries), time.Since(begun))
	}
	return result, err
}

// include adds what a part of the request with the given index has found, in as many scans.
func (r *claimResult) include(part claimResult, request, scans int) {
	if !part.at.IsZero() {
		r.at = part.at
	}
	for _, d := range part.deliveries {
		if d.scan > 0 {
			d.scan = len(r.scans) + 1
		}
		r.deliveries = append(r.deliveries, d)
	}
	if part.scans == nil {
		part.scans = make([]scanResult, scans)
	}
	r.scans = append(r.scans, part.scans...)
	for _, head := range part.heads {
		head.request = request
		r.heads = append(r.heads, head)
	}
	if reordered, changed := part.reordered[0]; changed {
		r.reordered[request] = reordered
	}
}
