package relay

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// claims makes single claims.
type claims struct{ db pg.Pool }

func (c claims) Claim(ctx context.Context, relayID int32, lease time.Duration, requests []claim.Request) (claim.Result, error) {
	return (&claim.Rows{DB: c.db, Lease: lease}).Claim(ctx, relayID, requests)
}

// registered returns a relay that claims nothing by itself.
func registered(db *relaytest.Database) (claims, int32) {
	db.Helper()
	return claims{db.Pool}, relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version, session_pid) VALUES ('test', '', 0) RETURNING id`)
}

// claimKey claims what is due of an ordering key.
func (c claims) claimKey(db *relaytest.Database, relayID int32, key string) {
	db.Helper()
	_, err := c.Claim(db.Context(), relayID, time.Minute, []claim.Request{{Destination: "default", Run: 16, Promise: policy.DefaultNotAfter, Keys: []lane.ReadyKey{{Key: key, Floor: math.MinInt64}}}})
	relaytest.Must(db, err)
}

// engineConn returns a connection with the engine's settings.
func engineConn(db *relaytest.Database) *pgx.Conn {
	db.Helper()
	r, err := New(config(db, to("http://receiver.test/")))
	relaytest.Must(db, err)
	conn, err := pgx.ConnectConfig(db.Context(), r.session.Config.PoolConfig().ConnConfig)
	relaytest.Must(db, err)
	db.Cleanup(func() { _ = conn.Close(db.Context()) })
	return conn
}

// singly makes a run of each delivery.
func singly(deliveries []lane.Delivery) (all [][]lane.Delivery) {
	for i := range deliveries {
		all = append(all, deliveries[i:i+1])
	}
	return all
}
