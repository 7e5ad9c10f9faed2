package relay

import (
	"context"
	"time"
)

const (
	// claimApartFor is how long each ask has a statement of its own after one of them met data that cannot be read.
	claimApartFor = time.Minute
	// damagedAgain is when to try an ask again that met such data.
	damagedAgain = 10 * time.Second
)

// damaged are the asks that met data which the server cannot read. The claimer owns it.
type damaged struct {
	until time.Time                // claim apart until then
	again map[damagedAsk]time.Time // not before
}

type damagedAsk struct {
	destination string
	class       class
}

// claimAll claims for all asks in one statement. A damaged page fails the whole statement, so that each ask then gets one
// of its own for a while: the other destinations, and newer deliveries of the same one, go on.
func (c *claimer) claimAll(ctx context.Context, instance int32, asks []ask) (claimed []delivery, at time.Time, err error) {
	r, now := c.relay, time.Now()
	if !now.Before(c.damaged.until) {
		claimed, at, err = r.store.claim(ctx, instance, r.cfg.Lease, asks)
		if classifyError(err) != errorDamaged {
			return claimed, at, err
		}
		r.databaseError("claim", err)
		c.damaged = damaged{until: now.Add(claimApartFor), again: map[damagedAsk]time.Time{}}
	}
	at = c.clock.now()
	for i, a := range asks {
		which := damagedAsk{a.destination, a.class}
		if now.Before(c.damaged.again[which]) {
			continue
		}
		found, when, err := r.store.claim(ctx, instance, r.cfg.Lease, asks[i:i+1])
		if classifyError(err) == errorDamaged {
			r.databaseError("claim", err)
			c.damaged.again[which] = now.Add(damagedAgain)
			continue
		}
		if err != nil {
			if len(claimed) > 0 {
				break // what is claimed must be sent; the next claim meets the error again
			}
			return nil, time.Time{}, err
		}
		at = when
		for _, d := range found {
			if d.ask > 0 {
				d.ask = i + 1
			}
			claimed = append(claimed, d)
		}
	}
	return claimed, at, nil
}
