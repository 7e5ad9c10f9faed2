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
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// A disk spoils a page of the deliveries' table, or of its index, while their requests are under way. Whatever stands on
// other pages goes on, and what cannot be written is written once the page is mended.
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
			db := &database{TB: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
			db.exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('bad', 'a'), ('good', 'b')`)
			insert := func(n int, kind string) {
				db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT $1, '{}', gen_random_uuid() FROM generate_series(1, $2)`, kind, n)
			}
			g := newGate(t)
			a, b := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) }), newReceiver(t, nil)
			toA, toB := to(a.URL), to(b.URL)
			toA.Name, toB.Name = "a", "b"
			toA.Timeout = patience
			cfg := db.config(toA, toB)
			cfg.Routes = []Route{{Event: "bad", To: []string{"a"}}, {Event: "good", To: []string{"b"}}}
			cfg.Lease = time.Hour
			const bad, good = 5, 2000
			insert(bad, "bad")
			insert(good, "good")
			r := start(t, cfg)
			r.settles(t, policy.Delivered, good)
			for range bad {
				<-g.arrived
			}
			path := filepath.Join(server.Dir(), "data", row[string](db, `SELECT pg_relation_filepath($1)`, relation))
			must(t, server.Shutdown(t.Context())) // in order: after a crash, the log would mend the page or stumble over it
			spoil(t, path, block)
			must(t, server.StartAgain(t.Context()))
			db.pool.Reset()
			g.open()
			r.await(t, "the refusals", func(o *observer) bool { return o.failures["settle"] > bad })
			for round := 1; round <= 3; round++ {
				insert(100, "good")
				r.settles(t, policy.Delivered, good+100*round)
			}
			if relation == "outbox_delivery_pkey" {
				db.exec(`REINDEX TABLE outbox_delivery`)
				r.settles(t, policy.Delivered, good+300+bad)
			}
			if a.total() != bad || b.total() != good+300 {
				t.Errorf("%d and %d requests", a.total(), b.total())
			}
		})
	}
}

// spoil overwrites a page of a relation's file.
func spoil(t *testing.T, path string, block int64) {
	t.Helper()
	const page = 8192
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte{0xab}, page), block*page)
	must(t, err)
	must(t, f.Close())
}
