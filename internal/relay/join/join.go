package join

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
)

const (
	joinAgain = 10 * time.Millisecond // between two tries to join a key, or to claim behind what joined it, while events of it are in hand
	joinRows  = 1000                  // that one statement joins at most
	joinChunk = 250                   // keys that one statement is asked about

	// failedAgain is how long a key is put off whose rows cannot be read or joined: twice as long
	// each time, up to failedMost.
	failedAgain = 5 * time.Second
	failedMost  = time.Minute
)

// Keys are ordering keys that deliveries have to join, since they have become due, or that have to
// be claimed again. See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md.
type Keys struct {
	DB     pg.Pool
	Lanes  *lane.Lanes
	Agenda *agenda.Agenda
	Failed func(operation string, err error)
	keys   map[ordering.Key]join
}

type join struct {
	class lane.Class
	done  bool           // all have joined: the key waits for events in hand
	first ordering.Place // of those that have
	again time.Time      // not before
	tries int            // that have failed
}

// Add notes a key of which something is due that has to join it.
func (j *Keys) Add(key ordering.Key, class lane.Class) {
	j.add(key, join{class: class})
	j.Agenda.At(agenda.CauseTakeAgain|agenda.CauseJoinKeys, time.Now()) // first, what was committed before it became due
}

// AddJoined notes a key that something has joined, which waits for events of the key in hand.
func (j *Keys) AddJoined(key ordering.Key) {
	j.add(key, join{class: lane.Live, done: true})
	j.Agenda.At(agenda.CauseJoinKeys, time.Now().Add(joinAgain))
}

// add notes a key, unless there are very many: scans find the others again.
func (j *Keys) add(key ordering.Key, of join) {
	if j.keys == nil {
		j.keys = map[ordering.Key]join{}
	}
	if known, is := j.keys[key]; is {
		of.class, of.done, of.again, of.tries = min(of.class, known.class), of.done && known.done, known.again, known.tries
		if of.first == (ordering.Place{}) || known.first != (ordering.Place{}) && known.first.Compare(of.first) < 0 {
			of.first = known.first
		}
	} else if len(j.keys) >= lane.MaxReady {
		return
	}
	j.keys[key] = of
}

// Run joins deliveries that have become due to their keys, and lets the keys be claimed.
func (j *Keys) Run(ctx context.Context, complete time.Time) error {
	now := time.Now()
	var keys []intake.Key
	for key, of := range j.keys {
		switch {
		case j.Lanes.Get(key.Destination) == nil:
			delete(j.keys, key)
		case of.done:
			delete(j.keys, key)
			j.Lanes.MakeReady(key, of.first, of.class)
		case now.Before(of.again):
			j.Agenda.At(agenda.CauseJoinKeys, of.again)
		case len(keys) < joinChunk:
			keys = append(keys, intake.Key{Destination: key.Destination, Key: key.Key})
		default:
			j.Agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
		}
	}
	return pg.Apart(keys, func(part []intake.Key) error {
		limit := joinRows / len(part)
		done, err := intake.JoinKeys(ctx, j.DB, 0, part, complete, limit)
		for i := range done {
			j.joined(part[i].OrderingKey(), done[i], limit, now)
		}
		return err
	}, func(k intake.Key, err error) {
		of := j.keys[k.OrderingKey()]
		of.again = now.Add(min(failedAgain<<min(of.tries, 8), failedMost))
		of.tries++
		j.keys[k.OrderingKey()] = of
		j.Agenda.At(agenda.CauseJoinKeys, of.again)
		j.Failed("join ordering keys", err)
	})
}

// joined notes what a statement, which joins at most limit rows of each key, has done with one.
func (j *Keys) joined(key ordering.Key, done intake.Joined, limit int, now time.Time) {
	if done.Rows > 0 || !done.InHand && !done.Early {
		j.Lanes.MakeReady(key, done.First, j.keys[key].class)
	}
	switch {
	case done.InHand:
		j.Agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
	case done.Early:
		j.Agenda.At(agenda.CauseTakeAgain, now)
		j.Agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
	case done.Rows == limit:
		j.Agenda.At(agenda.CauseJoinKeys, now)
	default:
		delete(j.keys, key)
	}
}

// Before joins to keys of a range what was due before their first deliveries in the range, and
// places it before these. The caller asks again about the keys, but not soon about those whose rows
// cannot be read or joined: it calls alone with each.
func (j *Keys) Before(ctx context.Context, seq int64, keys []intake.Key, alone func(k intake.Key, err error)) error {
	if len(keys) > 0 {
		j.Agenda.At(agenda.CauseJoinKeys, time.Now())
	}
	return pg.Apart(keys, func(part []intake.Key) error {
		joined, err := intake.JoinKeys(ctx, j.DB, seq, part, time.Time{}, max(joinRows/len(part), 1))
		if pg.IsOfRows(err) {
			return err
		}
		for i, k := range part { // also after another error: they may have joined
			of := join{class: lane.Live, done: true}
			if err == nil {
				of.first = joined[i].First
			}
			j.add(k.OrderingKey(), of)
		}
		return err
	}, alone)
}
