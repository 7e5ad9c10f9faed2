package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A load is what a system has to deliver, and under which conditions.
type load struct {
	events       int
	destinations int           // 0: one
	keys         int           // ordering keys; 0: none
	payload      int           // bytes; 0: 300
	delay        time.Duration // of the receiver's answers
	relays       int           // processes; 0: one
	inFlight     int           // requests that each relay may have under way; 0: 256
	distance     time.Duration // that a round trip to the database takes longer
	wire         string        // "tls", "h2"; empty: HTTP/1.1 without TLS
	settled      int           // events that were settled before
	holdVacuum   bool          // a session blocks vacuum
	dead, slow   int           // due events of a further destination where nothing listens, or that answers after 2 s
	direct       bool          // the receiver's process sends to itself, unsigned
}

// inFlight is how many requests every system may have under way: what River is given as workers
// when it is tuned.
const inFlight = 256

// riverCooldown is the least pause between two fetches that River is tuned to; its least is 1 ms.
const riverCooldown = time.Millisecond

func (l load) withDefaults() load {
	l.destinations, l.relays = max(l.destinations, 1), max(l.relays, 1)
	if l.payload == 0 {
		l.payload = 300
	}
	if l.inFlight == 0 {
		l.inFlight = inFlight
	}
	return l
}

// A system delivers events from a database.
type system interface {
	// prepare makes its tables, and what it needs to know of the load.
	prepare(ctx context.Context, r *rig, db *database, l load) error
	// fill adds count events, numbered from first.
	fill(ctx context.Context, db *database, l load, first, count int) error
	// producer returns a function that commits one event, over the connections of pool.
	producer(pool *pgxpool.Pool, l load) (func(ctx context.Context, n int) error, error)
	// start starts its processes.
	start(ctx context.Context, r *rig, db *database, l load) ([]*process, error)
	// unsettled is a query whether anything waits. Empty: nothing ever does.
	unsettled() string
}

// A loop is no system: it only sends. It shows what the requests alone cost.
type loop struct{ signed bool }

func (loop) prepare(context.Context, *rig, *database, load) error  { return nil }
func (loop) fill(context.Context, *database, load, int, int) error { return nil }
func (loop) unsettled() string                                     { return "" }
func (loop) producer(*pgxpool.Pool, load) (func(context.Context, int) error, error) {
	return nil, fmt.Errorf("a loop has no database")
}

func (s loop) start(ctx context.Context, r *rig, _ *database, l load) ([]*process, error) {
	p := r.peer(nil, l)
	p.Events, p.Signed = l.events, s.signed
	if l.direct {
		return nil, r.receiver.Call("loop", p, nil)
	}
	return r.startPeer(ctx, "loop", p)
}

// peer returns the part of a load that a process needs. db may be nil.
func (r *rig) peer(db *database, l load) peer {
	p := peer{URL: r.url(l.wire, l.delay), InFlight: inFlight, Payload: l.payload, Signed: true}
	if db != nil {
		p.DSN = db.dsn
	}
	if l.wire != "" {
		p.Authority = r.addresses.Authority
	}
	return p
}

func (r *rig) startPeer(ctx context.Context, role string, p peer) ([]*process, error) {
	arg, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	started, err := startRole(ctx, nil, role, string(arg))
	if err != nil {
		return nil, err
	}
	return []*process{started}, nil
}
