package relay

import (
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A crashing is a server that loses in a crash all that no session waited for.
type crashing struct {
	*database
	server *localpg.Server
}

func newCrashing(t *testing.T) *crashing {
	server := pgtest.Start(t, localpg.Options{Durable: true})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := &database{TB: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
	db.route()
	return &crashing{database: db, server: server}
}

// freeze stops the process that writes the log for sessions that do not wait for it.
func (c *crashing) freeze() (writer *os.Process) {
	c.Helper()
	pid := row[int](c.database, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`)
	writer, err := os.FindProcess(pid)
	must(c, err)
	must(c, writer.Signal(syscall.SIGSTOP))
	return writer
}

// The server crashes after it has acknowledged an outcome, and loses it. The ordering key goes on at once, and its receiver
// sees nothing twice: also when the claim was lost as well, and when the server's processes crash but not the server.
func TestCrashLeavesNoKeyStanding(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		losesClaim bool
		answer     int // to the first request
		requests   int // in all, for two events
	}{
		"the outcome is lost":           {false, http.StatusNoContent, 2},
		"the claim is lost, too":        {true, http.StatusNoContent, 2},
		"a retry is lost":               {false, http.StatusInternalServerError, 3},
		"a retry and its claim is lost": {true, http.StatusInternalServerError, 3},
	} {
		for _, restarted := range []bool{true, false} {
			if restarted && c.answer != http.StatusNoContent {
				continue // the server waits five seconds for the frozen process
			}
			kind := map[bool]string{true: "restarted", false: "recovered"}[restarted]
			t.Run(name+", "+kind, func(t *testing.T) {
				t.Parallel()
				db := newCrashing(t)
				g := newGate(t)
				rc := newReceiver(t, func(w http.ResponseWriter, r request) {
					if r.key == "key-1" && r.number == 1 {
						g.pass(r)
						w.WriteHeader(c.answer)
					}
				})
				d := to(rc.URL)
				d.Retry.Schedule = []time.Duration{time.Second}
				cfg := db.config(d)
				cfg.Lease = time.Hour
				r := start(t, cfg)
				r.instance()
				writer := db.freeze()
				insert := func(key string) {
					db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', $1, 'k')`, key)
				}
				insert("key-1")
				<-g.arrived
				if !c.losesClaim {
					db.exec(`CREATE TABLE flushed ()`) // waits for the disk, and so has all that came before
				}
				g.open()
				r.await(t, "the settle", func(o *observer) bool { return len(o.outcomes) == 1 })
				if restarted {
					must(t, db.server.StopImmediate(t.Context()))
					must(t, db.server.StartAgain(t.Context()))
				} else {
					must(t, writer.Kill())
				}
				eventually(t, "the server after its crash", func() (back bool) {
					db.pool.Reset()
					err := db.pool.QueryRow(t.Context(), `SELECT pid <> $1 FROM pg_stat_activity WHERE backend_type = 'walwriter'`, writer.Pid).Scan(&back)
					return err == nil && back
				})
				db.pool.Reset()
				insert("key-2")
				becomes(db.database, 2, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
				if rc.total() != c.requests {
					t.Errorf("%v were sent, want %d requests", rc.keys(), c.requests)
				}
				if attempts := row[int](db.database, `SELECT attempts FROM outbox_delivery WHERE event_id = 1`); attempts != c.requests-1 {
					t.Errorf("%d attempts are counted", attempts)
				}
			})
		}
	}
}
