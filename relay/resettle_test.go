package relay

import (
	"context"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
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
	for {
		must(c, writer.Signal(syscall.SIGSTOP))
		// It may stand still with a lock that every commit needs. Then it goes on, and stops elsewhere.
		ctx, cancel := context.WithTimeout(c.Context(), time.Second)
		_, err := c.pool.Exec(ctx, `SELECT pg_logical_emit_message(true, 'flushed', '')`)
		cancel()
		if err == nil {
			return writer
		}
		must(c, writer.Signal(syscall.SIGCONT))
		must(c, c.Context().Err())
	}
}

// The server crashes after it has acknowledged an outcome, and loses it. The ordering key goes on at once, and its receiver
// sees nothing twice: also when the claim was lost as well, and when the server's processes crash but not the server.
func TestCrashLeavesNoKeyStanding(t *testing.T) {
	testsize.Long(t)
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
				if name != "the claim is lost, too" || restarted {
					testsize.Long(t) // each has a server of its own
				}
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

// A claim that is gone from its row is restored only where the row is certainly the one that was sent, and untouched since.
func TestLostClaimsAreRestoredWithCare(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const fence = 1000
	for name, c := range map[string]struct {
		change  string // to the row, as the crash left it
		outcome policy.Outcome
		key     string
		want    string // status, claim and attempts in the end
	}{
		"delivered":                        {"claim = 0", policy.Delivered, "key-1", "delivered 1000 1"},
		"an older lease has ended":         {"claim = 7, claimed_by = 9, lease_expires_at = now()", policy.Delivered, "key-1", "delivered 1000 1"},
		"to be retried":                    {"claim = 0", policy.Retry, "key-1", "pending 1000 1"},
		"failed":                           {"claim = 0", policy.Fail, "key-1", "failed 1000 1"},
		"another event got its id":         {"claim = 0", policy.Delivered, "key-2", "pending 0 0"},
		"claimed by another relay since":   {"claim = 1001", policy.Delivered, "key-1", "pending 1001 0"},
		"another relay is sending it":      {"claim = 7, claimed_by = 9, lease_expires_at = now() + interval '1 minute'", policy.Delivered, "key-1", "pending 7 0"},
		"attempted by another relay since": {"claim = 7, attempts = 1", policy.Delivered, "key-1", "pending 7 1"},
		"discarded":                        {"claim = 0, status = 'discarded'", policy.Delivered, "key-1", "discarded 0 0"},
		"given back unsent":                {"claim = 0", policy.Hold, "key-1", "pending 0 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			db.insert(1, "key")
			db.exec(`UPDATE outbox_delivery SET ` + c.change)
			s := settlement{
				delivery: delivery{eventID: 1, destination: "default", fence: fence, notAfter: time.Now().Add(time.Hour), event: post.Event{Key: &c.key}},
				Decision: policy.Decision{Outcome: c.outcome, Result: policy.Result{Reason: policy.ReasonServerError, Posted: c.outcome != policy.Hold}, Delay: time.Minute},
			}
			over := &store{pool: db.pool}
			for range 2 {
				_, _, err := over.settle(t.Context(), 5, &batch{settlements: []settlement{s}, apart: true})
				must(t, err)
			}
			got := row[string](db, `SELECT concat_ws(' ', status, claim, attempts) FROM outbox_delivery`)
			if got != c.want {
				t.Errorf("the row is %q, want %q", got, c.want)
			}
		})
	}
}

// What is remembered has an end: in number, and once the session has shown that the server lives.
func TestRecentSettlementsAreForgotten(t *testing.T) {
	t.Parallel()
	var r recentSettlements
	begun := time.Now()
	for i := range 3 * recentMost / 500 {
		r.add(begun.Add(time.Duration(i)*time.Second), make([]settlement, 500))
	}
	if r.size != recentMost || len(r.all()) != recentMost/500 {
		t.Errorf("%d settlements in %d batches are kept", r.size, len(r.all()))
	}
	newest := begun.Add(time.Duration(3*recentMost/500-1) * time.Second)
	r.forgetDurable(newest)
	if got := len(r.all()); got != 4 { // of 0, 1, 2 and 3 s ago
		t.Errorf("%d batches are kept", got)
	}
	r.forgetDurable(newest.Add(time.Minute))
	if r.size != 0 || len(r.all()) != 0 {
		t.Errorf("%d settlements are kept for ever", r.size)
	}
}
