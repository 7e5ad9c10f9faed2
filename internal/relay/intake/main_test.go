package intake

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// A room is an outbox, with a pool as relays have it.
type room struct {
	*relaytest.Database
	pool *pgxpool.Pool
}

// newRoom returns an outbox with the relays 1 to 4.
func newRoom(t testing.TB) *room {
	t.Helper()
	return registered(relaytest.New(t))
}

// onServer returns one on its own server.
func onServer(t testing.TB, options localpg.Options) *room {
	t.Helper()
	_, db := relaytest.ServeCopy(t, options)
	db.Route("default")
	return registered(db)
}

func registered(db *relaytest.Database) *room {
	db.Helper()
	for range 4 {
		db.Serve("default")
	}
	return &room{db, relayPool(db, db.DSN)}
}

func relayPool(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, dsn, func(cfg *pgxpool.Config) { pg.SetDirect(cfg, "") })
}

var usual = Terms{Events: 100, Inline: 1 << 20}

// take takes a range, which must be found.
func (r *room) take(relay int32, terms Terms) Range {
	r.Helper()
	got, err := TakeRange(r.Context(), r.pool, relay, terms, false)
	relaytest.Must(r, err)
	if got.Found != Taken {
		r.Fatalf("found %q, want a range", got.Found)
	}
	return got
}

// find takes nothing: it must find what is wanted.
func (r *room) find(relay int32, want Found) {
	r.Helper()
	got, err := TakeRange(r.Context(), r.pool, relay, usual, false)
	relaytest.Must(r, err)
	if got.Found != want {
		r.Fatalf("found %q with %d events, want %q", got.Found, len(got.Events), want)
	}
}

// settle makes all events of a range delivered to "default", and ends it.
func (r *room) settle(relay int32, of Range) Settled {
	r.Helper()
	done, err := SettleRanges(r.Context(), r.pool, settlement(relay, of, of.Events))
	relaytest.Must(r, err)
	return done
}

func settlement(relay int32, of Range, events []Event) NewRows {
	s := NewRows{Relay: relay, Ranges: []RangeRef{of.Ref()}, Ended: []RangeRef{of.Ref()}}
	for i := range events {
		e := &events[i]
		if !slices.Contains(e.Settled, "default") {
			s.Deliveries = append(s.Deliveries, NewRow{
				Range: of.Ref(), EventID: e.ID, Destination: "default", Status: Delivered, Attempts: 1, OrderingKey: e.OrderingKey,
				PayloadBytes: e.PayloadBytes,
			})
		}
	}
	return s
}

// keys returns the idempotency keys of events.
func keys(events []Event) string {
	var all []string
	for i := range events {
		all = append(all, *events[i].Key)
	}
	return strings.Join(all, " ")
}

const insertOne = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{"n": 1}', $1)`

const insertKeyed = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', $1, $2)`

const insertMany = `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{"n": 1}', $1 || i FROM generate_series(1, $2::int) i`
