package claim

import (
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

const (
	// claimApartFor is how long each part of a claim has its own statement after one of them met
	// rows that cannot be read or claimed.
	claimApartFor = time.Minute
	// damagedAgain is how long such a part is put off. It is shorter than lane.LiveWindow: what
	// becomes due meanwhile must still be live then.
	damagedAgain = lane.LiveWindow / 2
	// An ordering key is put off twice as long each time, up to damagedMost. All wait longer for
	// each of them: each costs a few statements.
	damagedMost = time.Minute
	damagedEach = 10 * time.Millisecond
)

// damaged are the parts of claims that met rows which cannot be read or claimed. The claimer owns
// it.
type damaged struct {
	until time.Time // claim apart until then
	scans map[damagedScan]time.Time
	reads map[damagedScan]int32 // how many rows the next such scan reads, if not all
	keys  map[ordering.Key]damagedKey
	rows  map[damagedRow]time.Time
}

// A damagedScan names a class of a destination that is not read before its time. A rescan reads
// more than the scan behind the cursor.
type damagedScan struct {
	destination string
	class       lane.Class
	rescan      bool
}

// A damagedKey is an ordering key that is not claimed before its time.
type damagedKey struct {
	class lane.Class
	again time.Time
	tries int
	ready bool // it is being tried again
}

// A damagedRow has no ordering key, and scans do not claim it before its time.
type damagedRow struct {
	destination string
	event       int64
}

// tryDamaged ends what has been put off for long enough.
func (c *Rows) tryDamaged(now time.Time) {
	maps.DeleteFunc(c.damaged.scans, func(_ damagedScan, again time.Time) bool { return c.isOver(now, again) })
	maps.DeleteFunc(c.damaged.rows, func(_ damagedRow, again time.Time) bool { return !now.Before(again) })
	for key, of := range c.damaged.keys {
		switch {
		case !of.ready && c.isOver(now, of.again):
			of.ready = true
			c.damaged.keys[key] = of
			c.Lanes.MakeReady(key, ordering.Place{}, of.class)
		case of.ready && now.Sub(of.again) > damagedMost: // it has not failed since
			delete(c.damaged.keys, key)
		}
	}
}

// isOver reports whether it is time to try again, and otherwise plans that.
func (c *Rows) isOver(now, again time.Time) bool {
	if now.Before(again) {
		c.Agenda.At(agenda.CauseDamage, again)
		return false
	}
	return true
}

// deferDamaged leaves out scans that are put off.
func (c *Rows) deferDamaged(l *lane.Lane, scans []lane.Scan) []lane.Scan {
	return slices.DeleteFunc(scans, func(s lane.Scan) bool {
		_, off := c.damaged.scans[damagedScan{l.Name, s.Class, s.Rescan}]
		l.ScanOverdue = l.ScanOverdue || off && s.Class == lane.Live
		return off
	})
}

// claimAll claims for all requests in one statement. A row that cannot be read or claimed fails the
// whole statement. Each scan, and the keys of each destination, then get their own statement for a
// while, so that other destinations, keys and rows continue.
func (c *Rows) claimAll(ctx context.Context, relayID int32, requests []Request) (Result, error) {
	now := time.Now()
	if !now.Before(c.damaged.until) {
		result, err := c.claimOnce(ctx, relayID, requests)
		if !pg.IsOfRows(err) {
			return result, err
		}
		c.Failed("claim", err)
		c.damaged.until = now.Add(claimApartFor)
	}
	if c.damaged.scans == nil {
		c.damaged = damaged{c.damaged.until, map[damagedScan]time.Time{}, map[damagedScan]int32{}, map[ordering.Key]damagedKey{}, map[damagedRow]time.Time{}}
	}
	all := Result{at: c.Clock.Now(), reordered: map[int]int64{}, apart: true}
	var failed error
	for i, request := range requests {
		for _, s := range request.Scans {
			var found Result
			if failed == nil {
				found, failed = c.claimScan(ctx, relayID, request, s, now)
			}
			if failed != nil {
				found.scans = []lane.ScanResult{{Unread: true}}
			}
			all.include(found, i)
		}
		if failed == nil {
			failed = c.claimKeysApart(ctx, relayID, request, now, func(found Result) { all.include(found, i) })
		}
		if failed != nil {
			for _, key := range request.Keys {
				c.Lanes.MakeReady(ordering.Key{Destination: request.Destination, Key: key.Key}, ordering.Place{}, key.Class)
			}
		}
	}
	switch {
	case failed == nil:
	case len(all.Deliveries) == 0:
		return Result{}, failed
	default: // what is claimed must be sent; the next claim asks for the rest again
		c.Failed("claim", failed)
		c.Agenda.At(agenda.CauseScan, now)
	}
	return all, nil
}

// claimKeysApart claims for the ordering keys of a request, and puts those off that fail alone.
func (c *Rows) claimKeysApart(ctx context.Context, relayID int32, request Request, now time.Time, found func(Result)) error {
	part := request
	part.Scans = nil
	return pg.Apart(request.Keys, func(keys []lane.ReadyKey) error {
		part.Keys, part.Run = keys, request.Run
		result, err := c.claimOnce(ctx, relayID, []Request{part})
		for _, part.Run = range []int{1, headAlone} { // what follows the first fails it, perhaps
			if len(keys) == 1 && pg.IsOfRows(err) {
				result, err = c.claimOnce(ctx, relayID, []Request{part})
			}
		}
		if err == nil {
			found(result)
		}
		return err
	}, func(key lane.ReadyKey, err error) {
		c.Failed("claim", err)
		name := ordering.Key{Destination: request.Destination, Key: key.Key}
		tries := c.damaged.keys[name].tries
		wait := max(min(damagedAgain<<min(tries, 8), damagedMost), time.Duration(len(c.damaged.keys))*damagedEach)
		of := damagedKey{class: key.Class, again: now.Add(wait), tries: tries + 1}
		c.damaged.keys[name] = of
		c.Agenda.At(agenda.CauseDamage, of.again)
	})
}

// claimScan claims for one scan of a request: around rows that cannot be claimed, and up to the
// first one that cannot be read. The next scan continues behind that one, and reads little at
// first: on a damaged page the next row cannot be read either.
func (c *Rows) claimScan(ctx context.Context, relayID int32, request Request, s lane.Scan, now time.Time) (Result, error) {
	s.Shared = false
	part := request
	part.Keys, part.Scans = nil, []lane.Scan{s}
	name := damagedScan{request.Destination, s.Class, s.Rescan}
	reads, narrow := c.damaged.reads[name]
	if !narrow {
		result, err := c.claimOnce(ctx, relayID, []Request{part})
		if !pg.IsOfRows(err) {
			return result, err
		}
		c.Failed("claim", err)
		reads = s.Reads()
	}
	for part.reads = reads; part.reads > 0; part.reads /= 2 {
		result, err := c.claimAround(ctx, relayID, part, now)
		if pg.IsOfRows(err) {
			continue
		}
		if c.damaged.reads[name] = 2 * part.reads; 2*part.reads >= s.Reads() {
			delete(c.damaged.reads, name)
		}
		return result, err
	}
	c.damaged.reads[name] = 1
	place, found, err := c.findUnreadable(ctx, relayID, part)
	if err == nil && !found {
		again := now.Add(damagedAgain)
		c.damaged.scans[name] = again
		c.Agenda.At(agenda.CauseDamage, again)
		// A cursor begins again at the front, and a rescan ends: at their places they would find
		// nothing any more, nor what becomes due before these.
		return Result{scans: []lane.ScanResult{{Unread: s.Class == lane.Live}}}, nil
	}
	return Result{scans: []lane.ScanResult{{Last: place, More: true}}}, err
}

// findUnreadable returns the place of the first row of a scan, which cannot be read: up to there
// the scan finds nothing. found is false if not even that can be asked.
func (c *Rows) findUnreadable(ctx context.Context, relayID int32, part Request) (place lane.Keyset, found bool, err error) {
	part.only, part.reads = []int64{}, 1
	scan := part.Scans[0]
	isBehind := func(until lane.Keyset) bool {
		if err != nil {
			return false
		}
		shorter := scan
		shorter.Until = until
		part.Scans = []lane.Scan{shorter}
		_, failed := c.claimOnce(ctx, relayID, []Request{part})
		if pg.IsOfRows(failed) {
			return false
		}
		err = failed
		return err == nil
	}
	from, to := scan.After, scan.Until
	if from == (lane.Keyset{}) {
		from.At = time.Unix(0, 0)
	}
	if to == (lane.Keyset{}) {
		to.At = c.Clock.Now()
	}
	if !isBehind(from) {
		return place, false, err
	}
	upTo := func(microseconds int64) lane.Keyset {
		at := from.At.Truncate(time.Microsecond).Add(time.Duration(microseconds) * time.Microsecond)
		return lane.Keyset{At: at, ID: math.MaxInt64}
	}
	most := to.At.Sub(from.At).Microseconds() + 1
	place = upTo(firstFailing(most, func(n int64) bool { return isBehind(upTo(n)) }))
	first := int64(0) // of the rows of that time; most have come one after the other
	if isBehind(lane.Keyset{At: place.At, ID: from.ID}) {
		first = from.ID
	}
	place.ID = first + firstFailing(math.MaxInt64-first, func(n int64) bool { return isBehind(lane.Keyset{At: place.At, ID: first + n}) })
	return place, true, err
}

// firstFailing returns the least number, up to most, for which holds is false. It tries few numbers
// if that one is small.
func firstFailing(most int64, holds func(n int64) bool) int64 {
	low, high := int64(-1), int64(0)
	for high < most && holds(high) {
		low, high = high, high+min(most-high, max(high, 1))
	}
	for high-low > 1 {
		if middle := low + (high-low)/2; holds(middle) {
			low = middle
		} else {
			high = middle
		}
	}
	return high
}

// claimAround claims what a scan reads but for the rows that fail alone. With an error, too, it may
// return what earlier statements have claimed.
func (c *Rows) claimAround(ctx context.Context, relayID int32, part Request, now time.Time) (Result, error) {
	part.only = []int64{} // read what there is
	all, err := c.claimOnce(ctx, relayID, []Request{part})
	if err != nil {
		return all, err
	}
	events := slices.DeleteFunc(all.free, func(event int64) bool {
		_, off := c.damaged.rows[damagedRow{part.Destination, event}]
		return off
	})
	err = pg.Apart(events, func(some []int64) error {
		part.only = some
		found, err := c.claimOnce(ctx, relayID, []Request{part})
		all.Deliveries = append(all.Deliveries, found.Deliveries...)
		return err
	}, func(event int64, err error) {
		c.Failed("claim", err)
		c.damaged.rows[damagedRow{part.Destination, event}] = now.Add(damagedAgain)
	})
	return all, err
}

// claimOnce runs one statement, and remembers whether its answer came.
func (c *Rows) claimOnce(ctx context.Context, relayID int32, requests []Request) (Result, error) {
	begun := time.Now()
	result, err := c.Claim(ctx, relayID, requests)
	if err != nil {
		c.lost.Failed(relayID, err)
		return result, err
	}
	c.lost.Acknowledged(relayID, result.at, c.Lease)
	if c.Ran != nil {
		c.Ran(len(result.Deliveries), time.Since(begun))
	}
	return result, err
}

// include adds what a part of the request with the given index has found.
func (r *Result) include(part Result, request int) {
	if !part.at.IsZero() {
		r.at = part.at
	}
	for _, d := range part.Deliveries {
		if d.Scan > 0 {
			d.Scan = len(r.scans) + 1
		}
		r.Deliveries = append(r.Deliveries, d)
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
