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

)

// Keys are ordering keys that deliveries have to join, since they have become due, or that have to
// be claimed again. See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md.
type Keys struct {
	DB     pg.Pool
	Lanes  *lane.Lanes
	Agenda *agenda.Agenda
	keys   map[ordering.Key]join
}

type join struct {
	class lane.Class
	done  bool           // all have joined: the key waits for events in hand
	first ordering.Place // of those that have
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
		of.class, of.done = min(of.class, known.class), of.done && known.done
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
	var keys []intake.Key
	for key, of := range j.keys {
		switch {
		case j.Lanes.Get(key.Destination) == nil:
			delete(j.keys, key)
		case of.done:
			delete(j.keys, key)
			j.Lanes.MakeReady(key, of.first, of.class)
		case len(keys) < joinChunk:
			keys = append(keys, intake.Key{Destination: key.Destination, Key: key.Key})
		}
	}
	now := time.Now()
	if len(keys) > 0 {
		limit := joinRows / len(keys)
		done, err := intake.JoinKeys(ctx, j.DB, 0, keys, complete, limit)
		if err != nil {
			return err
		}
		for i, k := range keys {
			key := ordering.Key{Destination: k.Destination, Key: k.Key}
			of, joined := j.keys[key], done[i]
			if joined.Rows > 0 || !joined.InHand && !joined.Early {
				j.Lanes.MakeReady(key, joined.First, of.class)
			}
			switch {
			case joined.InHand:
				j.Agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
			case joined.Early:
				j.Agenda.At(agenda.CauseTakeAgain, now)
				j.Agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
			case joined.Rows == limit:
				j.Agenda.At(agenda.CauseJoinKeys, now)
			default:
				delete(j.keys, key)
			}
		}
		if len(j.keys) > len(keys) {
			j.Agenda.At(agenda.CauseJoinKeys, now.Add(joinAgain))
		}
	}
	return nil
}

// Before joins to keys of a range what was due before their first deliveries in the range, and
// places it before these. The caller asks again about the keys.
func (j *Keys) Before(ctx context.Context, seq int64, keys []intake.Key) error {
	if len(keys) == 0 {
		return nil
	}
	joined, err := intake.JoinKeys(ctx, j.DB, seq, keys, time.Time{}, max(joinRows/len(keys), 1))
	for i, k := range keys { // also after an error: they may have joined
		of := join{class: lane.Live, done: true}
		if err == nil {
			of.first = joined[i].First
		}
		j.add(ordering.Key{Destination: k.Destination, Key: k.Key}, of)
	}
	j.Agenda.At(agenda.CauseJoinKeys, time.Now())
	return err
}
