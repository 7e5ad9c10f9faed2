package relay

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A disk spoils a page of the deliveries' table, or of its index, while their requests are under
// way. Whatever stands on other pages continues, and what cannot be written is written once the
// page is fixed.
func TestDamagedPageKeepsNoOther(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for relation, block := range map[string]int64{
		"outbox_delivery":      0,
		"outbox_delivery_pkey": 1,
	} {
		t.Run(relation, func(t *testing.T) {
			t.Parallel()
			server := pgtest.StartCopy(t, localpg.Options{})
			pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
			db := relaytest.At(t, server.DSN(""))
			db.Cover()
			db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('bad', 'a'), ('good', 'b')`)
			insert := func(n int, kind string) {
				db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT $1, '{}', gen_random_uuid() FROM generate_series(1, $2)`, kind, n)
			}
			g := relaytest.NewGate(t)
			a, b := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { g.Pass(r) }), relaytest.NewReceiver(t, nil)
			toA, toB := named("a", to(a.URL)), named("b", to(b.URL))
			toA.Timeout = relaytest.Patience
			cfg := config(db, toA, toB)
			cfg.Routes = []Route{{Event: "bad", To: []string{"a"}}, {Event: "good", To: []string{"b"}}}
			cfg.Lease = time.Hour
			const bad, good = 5, 2000
			insert(bad, "bad")
			insert(good, "good")
			r := start(t, cfg)
			r.settles(t, policy.Delivered, good)
			for range bad {
				<-g.Arrived
			}
			path := filepath.Join(server.Dir(), "data", relaytest.Row[string](db, `SELECT pg_relation_filepath($1)`, relation))
			relaytest.Must(t, server.Shutdown(t.Context())) // in order: after a crash, the log would fix the page or stumble over it
			spoil(t, path, block)
			relaytest.Must(t, server.StartAgain(t.Context()))
			db.Pool.Reset()
			g.Open()
			r.await(t, "the refusals", func(o *observer) bool { return o.failures["settle"] > bad })
			for round := 1; round <= 3; round++ {
				insert(100, "good")
				r.settles(t, policy.Delivered, good+100*round)
			}
			if relation == "outbox_delivery_pkey" {
				db.Exec(`REINDEX TABLE outbox_delivery`)
				r.settles(t, policy.Delivered, good+300+bad)
			}
			if a.Total() != bad || b.Total() != good+300 {
				t.Errorf("%d and %d requests", a.Total(), b.Total())
			}
		})
	}
}

// spoil overwrites a page of a relation's file.
func spoil(t *testing.T, path string, block int64) {
	t.Helper()
	const page = 8192
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	relaytest.Must(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte{0xab}, page), block*page)
	relaytest.Must(t, err)
	relaytest.Must(t, f.Close())
}

// A payload that cannot be read keeps no other event from being taken, also not as part of a range
// of a dead relay.
func TestUnreadablePayloadKeepsNoOtherEvent(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := relaytest.At(t, server.DSN(""))
	db.Route()
	db.Exec(`ALTER TABLE outbox ALTER payload SET STORAGE EXTERNAL`)
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', to_json(repeat('x', 32768)), $1)`
	db.Exec(insert, "damaged-1")
	_, err := intake.TakeRange(t.Context(), db.Pool, deadRelay, intake.Terms{Events: 10}, false)
	relaytest.Must(t, err)
	db.Exec(insert, "damaged-2")
	path := filepath.Join(server.Dir(), "data", relaytest.Row[string](db, `SELECT pg_relation_filepath(reltoastrelid) FROM pg_class WHERE oid = 'outbox'::regclass`))
	relaytest.Must(t, server.Shutdown(t.Context()))
	spoil(t, path, 0)
	spoil(t, path, 6) // a payload has five pages
	relaytest.Must(t, server.StartAgain(t.Context()))
	db.Pool.Reset()
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(3, "whole")
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 3)
	db.Insert(3, "later")
	r.settles(t, policy.Delivered, 6)
	r.await(t, "the attempt to load them", func(o *observer) bool { return o.failures["load payload"] > 1 })
	relaytest.Becomes(db, 8, `SELECT count(*) FROM outbox_delivery`)
}
