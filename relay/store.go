package relay

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
)

// store runs the engine's statements. It is safe for concurrent use.
type store struct {
	pool   pg.Pool
	direct *pgxpool.Pool // behind pool

	producers session.Producers
	claimed   atomic.Int64 // deliveries of the last claim: about as many will be in the next
}

// A class is one of three kinds of deliveries that share a lane fairly.
type class int

const (
	live    class = iota // became due within liveWindow
	backlog              // became due before: what waited for its destination
	replays              // made pending again by an operator
	classes = 3
)

// liveWindow is how long after it became due a delivery goes before the backlog.
const liveWindow = 10 * time.Second

// rescuedWindow is how long ago a delivery became due that is looked for at once when its relay has died. It covers what was live
// when the relay claimed it, and the request.
const rescuedWindow = 2 * liveWindow

// keyset is a place in the order in which a lane is claimed.
type keyset struct {
	at time.Time
	id int64
}

// delivery is one event on its way to one destination. One with given is of a range, and has no row yet; others are claimed rows.
type delivery struct {
	eventID       int64
	destination   string
	fence         int64
	attempts      int
	rescues       int
	lost          bool // a suspect's previous claim was not settled
	alone         bool // a suspect is being sent with nothing beside it
	nextAttemptAt pgtype.Timestamptz
	payloadBytes  int
	replay        bool
	leaseEnds     time.Time // on this process's clock, never later than what the database holds
	notAfter      time.Time // the promise: no request is under way any more
	promiseEnds   time.Time // the same on this process's clock, like leaseEnds
	promised      bool      // by this claim: the receiver has not been told yet

	scan      int   // number of the scan that found it, from 1; 0: it was found by its ordering key
	after     int64 // event before it in its run; 0: the first
	joined    int64 // of its ordering.Place
	class     class
	lastOfRun bool

	given *settle.InHand // of a range; nil: it was claimed
	rule  string         // that the event breaks

	event post.Event
	span  trace.Span // of the attempt; nil: there is none, or traces are off
}

// inlinePayload is up to which size a claim brings the payload along, in bytes. It bounds what a lane holds in memory:
// 110 MiB, with maxTaken deliveries of each class and maxBehind in runs.
const inlinePayload = 8 << 10

// message returns what a request for the delivery says.
func (d *delivery) message() post.Message {
	return post.Message{
		EventID: d.eventID, Destination: d.destination, Fence: d.fence, Attempt: d.attempts + 1, NotAfter: d.notAfter, Replay: d.replay,
		Event: d.event,
	}
}

// place returns where a delivery stands in the order in which a lane is claimed.
func (d *delivery) place() keyset { return keyset{at: d.nextAttemptAt.Time, id: d.eventID} }

func (k keyset) compare(other keyset) int {
	if order := k.at.Compare(other.at); order != 0 {
		return order
	}
	return cmp.Compare(k.id, other.id)
}

const selectTime = `SELECT now()`

// now returns the database's time.
func (s *store) now(ctx context.Context) (now time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, selectTime).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read the database's time: %w", err)
	}
	return now, nil
}

// bound returns the keyset's time as the database compares it; for the zero keyset, which is a time too, the given end.
func (k keyset) bound(end pgtype.InfinityModifier) pgtype.Timestamptz {
	if k == (keyset{}) {
		return pgtype.Timestamptz{InfinityModifier: end, Valid: true}
	}
	return pgtype.Timestamptz{Time: k.at, Valid: true}
}

// arm makes producers notify, or stops them.
func (s *store) arm(ctx context.Context, armed bool) error {
	return s.producers.Arm(ctx, s.pool, armed)
}

const selectPayload = `SELECT payload FROM outbox WHERE id = $1`

// payload loads a payload that was too large to come with the claim.
func (s *store) payload(ctx context.Context, eventID int64) (payload []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, selectPayload, eventID).Scan(&payload); err != nil {
		return nil, fmt.Errorf("load payload: %w", err)
	}
	return payload, nil
}

// classAt returns the class of a delivery when the live window begins at the given time.
func (d *delivery) classAt(window time.Time) class {
	switch {
	case d.replay:
		return replays
	case d.nextAttemptAt.Time.Before(window):
		return backlog
	}
	return live
}

// databaseClock estimates the database's time from when it was last read.
type databaseClock struct{ shown, read time.Time }

func (c *databaseClock) set(shown time.Time) { c.shown, c.read = shown, time.Now() }

func (c *databaseClock) now() time.Time { return c.shown.Add(time.Since(c.read)) }
