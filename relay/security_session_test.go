package relay

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relay/breaker"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A stranger holds the locks of the next 600 relays, of the watcher and of the archive. A relay
// registers all the same, delivers and looks around.
func TestSecurityStrangersLocksStopNoRelay(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	stranger := relaytest.Stranger(db, "psql")
	_, err := stranger.Exec(t.Context(), `SELECT pg_advisory_lock('outbox_relay'::regclass::oid::int, i) FROM generate_series(1, 600) i`)
	relaytest.Must(t, err)
	_, err = stranger.Exec(t.Context(), `SELECT pg_advisory_lock('outbox_watch'::regclass::oid::int, 0)`)
	relaytest.Must(t, err)
	db.Insert(1, "key")
	cfg := config(db, to(relaytest.NewReceiver(t, nil).URL))
	cfg.Watching.Interval = 10 * time.Millisecond
	began := time.Now()
	r := start(t, cfg)
	r.relayID()
	t.Logf("registered within %s", time.Since(began))
	r.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, true, `SELECT watched_at > $1 FROM outbox_watch`, began)
}

// A login with CONNECT alone listens, leaves a transaction open and fills the server's queue of
// notifications. Relays start with their own route, deliver, close breakers, obey operators
// and leave all the same.
func TestSecurityFullQueueStopsNoRelay(t *testing.T) {
	t.Parallel()
	if relaytest.Row[int](relaytest.Covered(t), `SELECT current_setting('server_version_num')::int`) < 170000 {
		t.Skip("the queue holds 8 GB before PostgreSQL 17")
	}
	_, fresh := relaytest.Serve(t, localpg.Options{Settings: map[string]string{"max_notify_queue_pages": "64"}})
	db := fresh
	listener, filler := relaytest.Stranger(db, "psql"), relaytest.Stranger(db, "psql")
	for _, statement := range []string{`LISTEN x`, `BEGIN`, `SELECT 1`} {
		_, err := listener.Exec(t.Context(), statement)
		relaytest.Must(t, err)
	}
	for i := range 100 {
		if _, err := filler.Exec(t.Context(), `SELECT pg_notify('x', $1)`, fmt.Sprint(i, strings.Repeat("x", 7900))); err != nil {
			break
		}
	}
	if _, err := db.Pool.Exec(t.Context(), `NOTIFY x`); err == nil {
		t.Fatal("the queue is not full")
	}
	cfg := config(db, to(relaytest.NewReceiver(t, nil).URL))
	cfg.Routes = []Route{{Event: "*", To: []string{"default"}}}
	r := start(t, cfg)
	relayID := r.relayID()
	db.Insert(1, "key")
	r.settles(t, policy.Delivered, 1)
	b, err := ops.New(db.Pool).Replay(t.Context(), ops.Selection{EventIDs: []int64{1}, Statuses: []string{"delivered"}}, 0, nil)
	relaytest.Must(t, err)
	if b.Done != 1 {
		t.Errorf("%+v", b)
	}
	r.settles(t, policy.Delivered, 2)
	db.Exec(`UPDATE outbox_destination SET breaker = 'half_open', breaker_relay_id = $1, breaker_opened_at = now(), breaker_until = now()`, relayID)
	relaytest.Must(t, breaker.CloseBreaker(t.Context(), r.store.pool, "default", relayID))
	testkit.Equal(t, "the breaker", relaytest.Row[string](db, `SELECT breaker FROM outbox_destination`), "closed")
	r.stop()
	testkit.Equal(t, "the relay is still registered", relaytest.Row[int](db, `SELECT count(*) FROM outbox_relay`), 0)
}
