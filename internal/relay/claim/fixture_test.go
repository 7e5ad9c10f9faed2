package claim

import (
	"context"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/join"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relay/waiting"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// testRows claims for its own lanes, from which nothing is sent.
type testRows struct {
	*Rows
	relayID int32
	handed  map[string]int
}

// newRows returns what claims for the destinations, as a relay that the database knows; without a
// database, it must not claim.
func newRows(t testing.TB, db *relaytest.Database, destinations ...post.Destination) testRows {
	t.Helper()
	all := lane.New(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	for i := range destinations {
		destinations[i] = destinations[i].WithDefaults(post.Egress{})
	}
	relaytest.Must(t, all.Set(time.Now(), destinations, nil))
	c := testRows{handed: map[string]int{}, Rows: &Rows{
		Lease: time.Minute, PollInterval: time.Hour, MaxInFlight: func() int { return 256 }, RestFactor: 1,
		Lanes: all, Agenda: &agenda.Agenda{}, Pace: &agenda.Pace{Poll: time.Hour}, Clock: &pg.Clock{}, Settler: settle.New(),
		Waiting: waiting.NewKeeper(), Start: func(*lane.Lane) {}, Failed: func(string, error) {},
	}}
	c.Rows.Handed = func(destination string, n int) { c.handed[destination] += n }
	c.Clock.Set(time.Now())
	if db != nil {
		c.DB = db.Pool
		_, c.relayID = registered(db)
	}
	c.Joins = &join.Keys{DB: c.DB, Lanes: all, Agenda: c.Agenda}
	return c
}

// next returns when the next turn is due; negative: never.
func (c testRows) next() time.Duration {
	wait, next := c.Agenda.Next(time.Now())
	if next == 0 {
		return -1
	}
	return wait
}

// named returns a destination.
func named(name string) post.Destination {
	return post.Destination{Name: name, URL: "http://receiver.test/"}
}

// claims makes single claims.
type claims struct{ db pg.Pool }

func (c claims) Claim(ctx context.Context, relayID int32, lease time.Duration, requests []Request) (Result, error) {
	rows := &Rows{DB: c.db, Lease: lease}
	if err := c.db.QueryRow(ctx, `SELECT max(seq) FROM outbox_range`).Scan(&rows.floors.Range); err != nil {
		return Result{}, err
	}
	return rows.Claim(ctx, relayID, requests)
}

// registered returns a relay that claims nothing by itself.
func registered(db *relaytest.Database) (claims, int32) {
	db.Helper()
	return claims{db.Pool}, relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version, session_pid) VALUES ('test', '', 0) RETURNING id`)
}

// singly makes a run of each delivery.
func singly(deliveries []lane.Delivery) (all [][]lane.Delivery) {
	for i := range deliveries {
		all = append(all, deliveries[i:i+1])
	}
	return all
}
