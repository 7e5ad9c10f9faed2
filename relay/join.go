package relay

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

const (
	joinAgain = 10 * time.Millisecond // between two tries to join a key, or to claim behind what joined it, while events of it are in hand
	joinRows  = 1000                  // that one statement joins at most
	joinChunk = 250                   // keys that one statement is asked about

	// lateAfter is how long after its insert an event must become due, at least, to join its key by its time if no relay took it before.
	// Producers whose clock runs ahead set available_at some milliseconds into the future of the database.
	lateAfter = 100 * time.Millisecond
)

// joins are ordering keys that deliveries have to join, since they have become due, or that have to be claimed again.
// See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md.
type joins struct {
	db     pg.Pool
	lanes  *lanes
	agenda *agenda.Agenda
	keys   map[ordering.Key]join
}

type join struct {
	class class
	done  bool           // all have joined: the key waits for events in hand
	first ordering.Place // of those that have
}

// add notes a key, unless there are very many: scans find the others again.
func (j *joins) add(key ordering.Key, of join) {
	if j.keys == nil {
		j.keys = map[ordering.Key]join{}
	}
	if known, is := j.keys[key]; is {
		of.class, of.done = min(of.class, known.class), of.done && known.done
		if of.first == (ordering.Place{}) || known.first != (ordering.Place{}) && known.first.Compare(of.first) < 0 {
			of.first = known.first
		}
	} else if len(j.keys) >= maxReady {
		return
	}
	j.keys[key] = of
}

// run joins deliveries that have become due to their keys, and lets the keys be claimed.
func (j *joins) run(ctx context.Context, complete time.Time) error {
	var keys []intake.Key
	for key, of := range j.keys {
		switch {
		case j.lanes.get(key.Destination) == nil:
			delete(j.keys, key)
		case of.done:
			delete(j.keys, key)
			j.lanes.makeReady(key, of.first, of.class)
		case len(keys) < joinChunk:
			keys = append(keys, intake.Key{Destination: key.Destination, Key: key.Key})
		}
	}
	now := time.Now()
	if len(keys) > 0 {
		limit := joinRows / len(keys)
		done, err := intake.JoinKeys(ctx, j.db, 0, keys, complete, limit)
		if err != nil {
			return err
		}
		for i, k := range keys {
			key := ordering.Key{Destination: k.Destination, Key: k.Key}
			of, joined := j.keys[key], done[i]
			if joined.Rows > 0 || !joined.InHand && !joined.Early {
				j.lanes.makeReady(key, joined.First, of.class)
			}
			switch {
			case joined.InHand:
				j.agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
			case joined.Early:
				j.agenda.At(agenda.CauseTakeAgain, now)
				j.agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
			case joined.Rows == limit:
				j.agenda.At(agenda.CauseJoinKeys, now)
			default:
				delete(j.keys, key)
			}
		}
		if len(j.keys) > len(keys) {
			j.agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
		}
	}
	return nil
}

// before joins to keys of a range what was due before their first deliveries in the range, and places it before these. The caller asks
// again about the keys.
func (j *joins) before(ctx context.Context, seq int64, keys []intake.Key) error {
	if len(keys) == 0 {
		return nil
	}
	joined, err := intake.JoinKeys(ctx, j.db, seq, keys, time.Time{}, max(joinRows/len(keys), 1))
	for i, k := range keys { // also after an error: they may have joined
		of := join{class: live, done: true}
		if err == nil {
			of.first = joined[i].First
		}
		j.add(ordering.Key{Destination: k.Destination, Key: k.Key}, of)
	}
	j.agenda.At(agenda.CauseJoinKeys, time.Now())
	return err
}

// A schedule finds out which events of a range join their ordering keys later, by their time: those that are not due, and those whose time
// came after their insert but before the take. Events of the same key that were inserted after that time follow these.
type schedule map[string]*keySchedule

type keySchedule struct {
	first time.Time // when the first event became due that joins its key although it is due
	last  time.Time // when the last event that follows it was due; zero: none does
}

// joinsAt returns when an event joins its key. due is when it is due, inserted when its transaction began, wait how long it is until it is
// due. Zero: it joins with its range.
func (s schedule) joinsAt(key string, due, inserted time.Time, wait time.Duration) time.Time {
	of := s[key]
	switch {
	case wait > 0:
		return due
	case due.Sub(inserted) >= lateAfter:
		if of == nil {
			s[key] = &keySchedule{first: due}
		} else if due.Before(of.first) {
			of.first = due
		}
		return due
	case of == nil || of.last.IsZero() && due.Before(of.first):
		return time.Time{}
	}
	if due.After(of.last) { // the order of ids is kept: transactions may begin in another one
		of.last = due
	}
	return of.last
}
