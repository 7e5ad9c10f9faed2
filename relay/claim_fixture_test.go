package relay

import (
	"context"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A claimer claims for lanes of its own, which nothing is sent from.
type testRows struct {
	*rows
	instance int32
	handed   map[string]int
}

// newRows returns what claims for the destinations, as a relay that the database knows; without a database, it must not claim.
func newRows(t testing.TB, db *relaytest.Database, destinations ...post.Destination) testRows {
	t.Helper()
	all := newLanes(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	for i := range destinations {
		destinations[i] = destinations[i].WithDefaults(post.Egress{})
	}
	relaytest.Must(t, all.set(time.Now(), destinations, nil))
	c := testRows{handed: map[string]int{}, rows: &rows{
		lease: time.Hour, pollInterval: time.Hour, maxInFlight: func() int { return 256 }, restFactor: 1,
		lanes: all, agenda: &agenda.Agenda{}, pace: &agenda.Pace{Poll: time.Hour}, clock: &pg.Clock{}, settler: settle.New(),
		waiting: waiting.NewKeeper(), start: func(*lane) {}, failed: func(string, error) {},
	}}
	c.rows.handed = func(destination string, n int) { c.handed[destination] += n }
	c.clock.Set(time.Now())
	if db != nil {
		c.db = db.Pool
		_, c.instance = registered(db)
	}
	c.joins = &joins{db: c.db, lanes: all, agenda: c.agenda}
	return c
}

// next returns when the next turn is due; negative: never.
func (c testRows) next() time.Duration {
	wait, next := c.agenda.Next(time.Now())
	if next == 0 {
		return -1
	}
	return wait
}

// to returns a destination.
func named2(name string) post.Destination {
	return post.Destination{Name: name, URL: "http://receiver.test/"}
}

// claims makes single claims.
type claims struct{ db pg.Pool }

func (c claims) claim(ctx context.Context, instance int32, lease time.Duration, requests []claimRequest) (claimResult, error) {
	return (&rows{db: c.db, lease: lease}).readClaim(ctx, instance, requests)
}

// registered returns a relay that claims nothing by itself.
func registered(db *relaytest.Database) (claims, int32) {
	db.Helper()
	return claims{db.Pool}, relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version, session_pid) VALUES ('test', '', 0) RETURNING instance`)
}
