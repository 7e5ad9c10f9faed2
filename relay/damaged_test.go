package relay

import (
	"bytes"
	"context"
	"crypto/rand"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
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
			server, db := relaytest.ServeCopy(t, localpg.Options{})
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
			db.WhileDown(server, func() { spoil(t, path, block) }) // after a crash, the log would fix the page or stumble over it
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

// spoil overwrites a page of a relation's file, and returns what was there.
func spoil(t *testing.T, path string, block int64) (before []byte) {
	t.Helper()
	const page = 8192
	before = make([]byte, page)
	f, err := os.Open(path)
	relaytest.Must(t, err)
	_, err = f.ReadAt(before, block*page)
	relaytest.Must(t, err)
	relaytest.Must(t, f.Close())
	overwrite(t, path, block*page, bytes.Repeat([]byte{0xab}, page))
	return before
}

func overwrite(t *testing.T, path string, at int64, with []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	relaytest.Must(t, err)
	_, err = f.WriteAt(with, at)
	relaytest.Must(t, err)
	relaytest.Must(t, f.Close())
}

// A row of an ordering key is on a damaged page. What follows in its key waits, and nothing else
// does: neither what is new, nor what a relay had in hand that died. Once the page is fixed, all is
// sent, and the key in its order.
func TestDamagedPageKeepsNoOtherKey(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, state := range map[string]string{
		"pending":   `next_attempt_at = now()`,
		"scheduled": `joined = NULL, next_attempt_at = now()`,
		"failed":    `status = 'failed', last_attempt_at = now(), last_reason = 'rejected', attempts = 1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, db := relaytest.ServeCopy(t, localpg.Options{})
			db.Route()
			db.Cover()
			db.InsertKeyed("k", 1, 1)
			db.Exec(`UPDATE outbox_delivery SET ` + state)
			db.Insert(500, "fill")
			db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now(), attempts = 1 WHERE ordering_key IS NULL`)
			db.Exec(`DROP TRIGGER relaytest_cover ON outbox`)
			testkit.Equal(t, "page", relaytest.Row[string](db, `SELECT split_part(ctid::text, ',', 1) FROM outbox_delivery WHERE ordering_key = 'k'`), "(0")
			db.InsertKeyed("k", 2, 2)
			db.InsertKeyed("other", 1, 1)
			takeAs(db, db.Pool, deadRelay)
			path := filepath.Join(server.Dir(), "data", relaytest.Row[string](db, `SELECT pg_relation_filepath('outbox_delivery')`))
			var page []byte
			db.WhileDown(server, func() { page = spoil(t, path, 0) })

			rc := relaytest.NewReceiver(t, nil)
			first := start(t, config(db, to(rc.URL)))
			db.InsertKeyed("k", 3, 3)
			db.Insert(50, "good")
			db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', 'keyed-' || i, 'key-' || i FROM generate_series(1, 50) i`)
			first.settles(t, policy.Delivered, 101)
			first.stop()
			second := start(t, config(db, to(rc.URL)))
			db.InsertKeyed("k", 4, 4)
			db.Insert(50, "more")
			second.settles(t, policy.Delivered, 50)
			sent := func() string {
				return strings.Join(slices.DeleteFunc(rc.Keys(), func(key string) bool { return !strings.HasPrefix(key, "k-") }), " ")
			}
			testkit.Equal(t, "sent of the key", sent(), "")

			db.WhileDown(server, func() { overwrite(t, path, 0, page) })
			want, delivered := "k-1 k-2 k-3 k-4", 4
			if name == "failed" {
				db.Exec(`UPDATE outbox_delivery SET status = 'discarded' WHERE status = 'failed'`)
				want, delivered = "k-2 k-3 k-4", 3
			}
			second.settles(t, policy.Delivered, 50+delivered)
			testkit.Equal(t, "sent of the key", sent(), want)
		})
	}
}

// The rows of a damaged page stand among others of their destination, which are delivered. So is
// what came after a cut and got rows before, once.
func TestDamagedPageKeepsNoOtherRow(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server, db := relaytest.ServeCopy(t, localpg.Options{})
	db.Route()
	db.Insert(4, "cut")
	_, err := intake.TakeRange(t.Context(), db.Pool, deadRelay, intake.Terms{Events: 2, Inline: 1 << 20}, true)
	relaytest.Must(t, err)
	db.Insert(2, "beyond")
	found, err := intake.FindBeyond(t.Context(), db.Pool)
	relaytest.Must(t, err)
	_, _, err = intake.WriteBeyond(t.Context(), db.Pool, deadRelay, found.Seq, []intake.BeyondRow{{EventID: found.Events[0].ID, Destination: "default"}})
	relaytest.Must(t, err)
	// Four rows of the first page are due among others, one of these at the same time.
	db.Insert(300, "old")
	db.Exec(`UPDATE outbox SET xid = '2' WHERE idempotency_key LIKE 'old-%'`)
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination, status, payload_bytes, next_attempt_at, delivered_at)
		SELECT id, 'default', CASE WHEN n BETWEEN 5 AND 270 THEN 'delivered' ELSE 'pending' END, 8, now() - interval '1 hour' + n % 7 * interval '1 minute' + n / 7 * interval '1 ms',
			CASE WHEN n BETWEEN 5 AND 270 THEN now() END
		FROM (SELECT id, substr(idempotency_key, 5)::int AS n FROM outbox WHERE idempotency_key LIKE 'old-%') o ORDER BY n`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = (SELECT min(next_attempt_at) FROM outbox_delivery WHERE status = 'pending') WHERE event_id = (SELECT max(event_id) FROM outbox_delivery)`)
	whole := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending' AND ctid >= '(1,0)'`)
	testkit.Equal(t, "due rows on other pages", whole, 30)
	path := filepath.Join(server.Dir(), "data", relaytest.Row[string](db, `SELECT pg_relation_filepath('outbox_delivery')`))
	var page []byte
	db.WhileDown(server, func() { page = spoil(t, path, 0) })

	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, whole+5) // all but the event beyond the cut that had a row
	db.WhileDown(server, func() { overwrite(t, path, 0, page) })
	relaytest.Becomes(db, 306, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	for key, n := range counted(rc.Keys()) {
		if n != 1 {
			t.Errorf("%s was sent %d times", key, n)
		}
	}
}

// A foreign trigger refuses that rows are claimed, or join their keys. All others are.
func TestRefusedClaimKeepsNoOther(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.InsertKeyed("k", 1, 2)
	db.InsertKeyed("late", 1, 2)
	db.Insert(1, "bad")
	db.Insert(20, "good")
	db.InsertKeyed("other", 1, 3)
	db.Exec(`UPDATE outbox_delivery SET joined = NULL WHERE ordering_key = 'late'`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour' + event_id * interval '1 ms'`)
	db.Refuse("UPDATE ON outbox_delivery", "OLD.destination = 'a' AND OLD.event_id IN (1, 3, 5)")
	a, b := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	r := start(t, config(db, named("a", to(a.URL)), named("b", to(b.URL))))
	r.settles(t, policy.Delivered, 28+23)
	db.Exec(`DROP TRIGGER relaytest_cover ON outbox`)
	db.InsertKeyed("k", 3, 3)
	db.InsertKeyed("late", 3, 3)
	db.Insert(20, "new")
	r.settles(t, policy.Delivered, 28+23+22+20)
	of := func(rc *relaytest.Receiver, prefix string) string {
		return strings.Join(slices.DeleteFunc(rc.Keys(), func(key string) bool { return !strings.HasPrefix(key, prefix) }), " ")
	}
	testkit.Equal(t, "sent", of(a, "k-")+of(a, "late-")+of(a, "bad-"), "")
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	r.settles(t, policy.Delivered, 2*(28+22))
	for _, rc := range []*relaytest.Receiver{a, b} {
		testkit.Equal(t, "sent", of(rc, "k-")+", "+of(rc, "late-"), "k-1 k-2 k-3, late-1 late-2 late-3")
	}
}

// A payload that cannot be read keeps no other event from being taken, also not as part of a range
// of a dead relay. It is tried again now and then, not all the time.
func TestUnreadablePayloadKeepsNoOtherEvent(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server, db := relaytest.ServeCopy(t, localpg.Options{})
	db.Route()
	db.Exec(`ALTER TABLE outbox ALTER payload SET STORAGE EXTERNAL`)
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', to_json(repeat('x', 32768)), $1)`
	db.Exec(insert, "damaged-1")
	_, err := intake.TakeRange(t.Context(), db.Pool, deadRelay, intake.Terms{Events: 10, Inline: intake.Blind}, false)
	relaytest.Must(t, err)
	db.Exec(insert, "damaged-2")
	path := filepath.Join(server.Dir(), "data", relaytest.Row[string](db, `SELECT pg_relation_filepath(reltoastrelid) FROM pg_class WHERE oid = 'outbox'::regclass`))
	db.WhileDown(server, func() {
		spoil(t, path, 0)
		spoil(t, path, 6) // a payload has five pages
	})
	rc := relaytest.NewReceiver(t, nil)
	db.Insert(3, "whole")
	began := time.Now()
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 3)
	db.Insert(3, "later")
	r.settles(t, policy.Delivered, 6)
	const times = 6
	r.await(t, "the attempts to load them", func(o *observer) bool { return o.failures["load payload"] >= 2*times })
	if took := time.Since(began); took < (times-2)*time.Second/2 {
		t.Errorf("tried %d times each within %s", times, took)
	}
	relaytest.Becomes(db, 8, `SELECT count(*) FROM outbox_delivery`)
}

// A range of a dead relay cannot be read, for days perhaps. The relay tries it again now and then,
// takes and claims all else meanwhile, and is in no trouble. It is while it cannot take.
func TestStepThatRowsFailWaitsAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Insert(1, "lost")
	takeAs(db, db.Pool, deadRelay)
	rc := relaytest.NewReceiver(t, nil)
	r := sessionOf(t, config(db, to(rc.URL)))
	c := r.newClaimer()
	pool := &spoiledPool{Pool: c.db, arguments: 3} // of the statement that reads a range
	c.taker.DB = pool
	turns := func() {
		for range 5 {
			db.Insert(1, rand.Text())
			c.agenda.At(agenda.CauseRescue|agenda.CauseTakeAgain, time.Now())
			turnOf(t, c)
			r.senders.Wait()
		}
	}
	turns()
	testkit.Equal(t, "sent", rc.Total(), 5)
	testkit.Equal(t, "statements that failed", pool.failed, 2) // with rows and without
	testkit.Equal(t, "an error of claims", c.takeErr, nil)
	c.putOff, pool.arguments, pool.failed = nil, 4, 0 // of a take
	turns()
	testkit.Equal(t, "sent", rc.Total(), 5)
	testkit.Equal(t, "takes that failed", pool.failed, 2)
	testkit.Equal(t, "an error of claims", c.takeErr != nil, true)
	c.putOff, pool.arguments = nil, 0
	turns()
	testkit.Equal(t, "sent", rc.Total(), 15)
	testkit.Equal(t, "an error of claims", c.takeErr, nil)
}

// A spoiledPool fails each query with so many arguments, as if it met a damaged page.
type spoiledPool struct {
	pg.Pool
	arguments, failed int
}

func (p *spoiledPool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if len(args) == p.arguments {
		p.failed++
		return nil, &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "XX001", Message: "invalid page"}
	}
	return p.Pool.Query(ctx, sql, args...)
}
