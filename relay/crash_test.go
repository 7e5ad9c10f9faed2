package relay

import (
	"context"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A crashing is a server that loses in a crash all that no session waited for.
type crashing struct {
	*relaytest.Database
	server *localpg.Server
}

func newCrashing(t *testing.T) *crashing {
	server, db := relaytest.Serve(t, localpg.Options{Durable: true})
	db.Route()
	return &crashing{Database: db, server: server}
}

// freeze stops the process that writes the log for sessions that do not wait for it.
func (c *crashing) freeze() (writer *os.Process) {
	c.Helper()
	pid := relaytest.Row[int](c.Database, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`)
	writer, err := os.FindProcess(pid)
	relaytest.Must(c, err)
	for {
		relaytest.Must(c, writer.Signal(syscall.SIGSTOP))
		// It may stand still with a lock that every commit needs. Then it continues, and stops
		// elsewhere.
		ctx, cancel := context.WithTimeout(c.Context(), time.Second)
		_, err := c.Pool.Exec(ctx, `SELECT pg_logical_emit_message(true, 'flushed', '')`)
		cancel()
		if err == nil {
			return writer
		}
		relaytest.Must(c, writer.Signal(syscall.SIGCONT))
		relaytest.Must(c, c.Context().Err())
	}
}

// The server crashes after it has acknowledged an outcome, and loses it. The ordering key continues
// at once, and its receiver sees nothing twice: also when the claim was lost as well, and when the
// server's processes crash but not the server.
func TestCrashLeavesNoKeyStanding(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, c := range map[string]struct {
		losesClaim bool
		scheduled  bool // the first event: the crash undoes that it joined its key, too
		answer     int  // to the first request
		requests   int  // in all, for two events
	}{
		"the outcome is lost":           {false, false, http.StatusNoContent, 2},
		"the claim is lost, too":        {true, false, http.StatusNoContent, 2},
		"a retry is lost":               {false, false, http.StatusInternalServerError, 3},
		"a retry and its claim is lost": {true, false, http.StatusInternalServerError, 3},
		"a retry and its place is lost": {true, true, http.StatusInternalServerError, 3},
	} {
		for _, restarted := range []bool{true, false} {
			if restarted && c.answer != http.StatusNoContent {
				continue // the server waits five seconds for the frozen process
			}
			kind := map[bool]string{true: "restarted", false: "recovered"}[restarted]
			t.Run(name+", "+kind, func(t *testing.T) {
				if name != "the claim is lost, too" || restarted {
					testsize.Long(t) // each has its own server
				}
				t.Parallel()
				db := newCrashing(t)
				if !c.scheduled {
					db.Cover()
				}
				g := relaytest.NewGate(t)
				rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
					if r.Key == "key-1" && r.Number == 1 {
						g.Pass(r)
						w.WriteHeader(c.answer)
					}
				})
				d := to(rc.URL)
				d.Retry.Schedule = []time.Duration{time.Second}
				cfg := config(db.Database, d)
				cfg.Lease = time.Hour
				r := start(t, cfg)
				r.relayID()
				writer := db.freeze()
				insert := func(key string, after time.Duration) {
					db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
						VALUES ('t', '{}', $1, 'k', now() + make_interval(secs => $2))`, key, after.Seconds())
				}
				if c.scheduled {
					insert("key-1", 2*time.Second)
					relaytest.Becomes(db.Database, 1, `SELECT count(*) FROM outbox_delivery`)
					db.Exec(`CREATE TABLE flushed ()`)
				} else {
					insert("key-1", 0)
				}
				<-g.Arrived
				if !c.losesClaim {
					db.Exec(`CREATE TABLE flushed ()`) // waits for the disk, and so has all that came before
				}
				g.Open()
				r.await(t, "the settle", func(o *observer) bool { return len(o.outcomes) == 1 })
				if restarted {
					relaytest.Must(t, db.server.StopImmediate(t.Context()))
					relaytest.Must(t, db.server.StartAgain(t.Context()))
				} else {
					relaytest.Must(t, writer.Kill())
				}
				relaytest.Eventually(t, "the server after its crash", func() (back bool) {
					db.Pool.Reset()
					err := db.Pool.QueryRow(t.Context(), `SELECT pid <> $1 FROM pg_stat_activity WHERE backend_type = 'walwriter'`, writer.Pid).Scan(&back)
					return err == nil && back
				})
				db.Pool.Reset()
				insert("key-2", 0)
				relaytest.Becomes(db.Database, 2, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
				if keys := rc.Keys(); len(keys) != c.requests || keys[len(keys)-1] != "key-2" {
					t.Errorf("%v were sent, want %d requests", keys, c.requests)
				}
				if attempts := relaytest.Row[int](db.Database, `SELECT attempts FROM outbox_delivery WHERE event_id = 1`); attempts != c.requests-1 {
					t.Errorf("%d attempts are counted", attempts)
				}
			})
		}
	}
}
