package relay

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// keepsLocked is what the log says of rows that a settle met locked more than once.
const keepsLocked = "another session keeps deliveries locked"

// locker returns a session of an operator, who has begun a transaction with the given statement.
func (db *database) locker(statement string) *pgx.Conn {
	db.Helper()
	operator, err := pgx.Connect(db.Context(), db.dsn)
	must(db, err)
	db.Cleanup(func() { _ = operator.Close(context.WithoutCancel(db.Context())) })
	_, err = operator.Exec(db.Context(), `BEGIN; `+statement)
	must(db, err)
	return operator
}

// A person locks a row that is in flight, in a psql that is then forgotten. The outcome of that delivery
// cannot be written; all others can, and this one once the lock is gone. Nothing is sent twice for it.
func TestLockedRowKeepsNoOther(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]int{"delivered": 204, "failed": 422, "retry": 500} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 1000, "delivered")
			t.Parallel()
			db := newDatabase(t, "a", "b")
			g := newGate(t)
			a := newReceiver(t, func(w http.ResponseWriter, r request) {
				if r.key == "first-1" && r.number == 1 {
					g.pass(r)
					w.WriteHeader(answer)
				}
			})
			b := newReceiver(t, nil)
			db.insert(1, "first")
			toA, toB := to(a.URL), to(b.URL)
			toA.Name, toB.Name = "a", "b"
			toA.Retry.Schedule = []time.Duration{time.Hour}
			r := start(t, db.config(toA, toB))
			<-g.arrived
			operator := db.locker(`SELECT FROM outbox_delivery WHERE destination = 'a' AND event_id = 1 FOR UPDATE`)
			g.open()
			db.insert(1000, "more")
			r.settles(t, policy.Delivered, 2001)
			if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`); n != 2001 {
				t.Errorf("%d of the 2001 others are delivered", n)
			}
			_, err := operator.Exec(t.Context(), `ROLLBACK`)
			must(t, err)
			becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE destination = 'a' AND event_id = 1 AND attempts = 1 AND claimed_by IS NULL`)
			r.await(t, "all settled", func(o *observer) bool {
				return o.outcomes[policy.Delivered]+o.outcomes[policy.Fail]+o.outcomes[policy.Retry] == 2002
			})
			if a.total() != 1001 || r.lane("a").busy() || sees(r.observer, func(o *observer) int { return o.stale }) != 0 {
				t.Errorf("%d requests for 1001 events, or a lane without room, or a stale settle", a.total())
			}
		})
	}
}

// What else a failed delivery writes can be locked too: others need not wait for it.
func TestLockedAlertKeepsNoOther(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_alert (rule, subject, count) VALUES ('failed', 'default', 1)`)
	operator := db.locker(`SELECT FROM outbox_alert FOR UPDATE`)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.key == "first-1" {
			w.WriteHeader(422)
		}
	})
	db.insert(1, "first")
	db.insert(100, "more")
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 100)
	db.insert(100, "later")
	r.settles(t, policy.Delivered, 200)
	_, err := operator.Exec(t.Context(), `ROLLBACK`)
	must(t, err)
	r.settles(t, policy.Fail, 1)
	if count := row[int](db, `SELECT count FROM outbox_alert`); count != 2 || rc.total() != 201 {
		t.Errorf("the alert counts %d, %d requests", count, rc.total())
	}
}

// A stop does not wait for the lock for ever; the delivery is left as it is.
func TestStopDoesNotWaitForALockedRow(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(1, "key")
	logged := &safeBuffer{}
	cfg := db.config(to(rc.URL))
	cfg.Log = zerolog.New(logged)
	r := start(t, cfg)
	<-g.arrived
	operator := db.locker(`SELECT FROM outbox_delivery FOR UPDATE`)
	g.open()
	eventually(t, "vain settles", func() bool { return strings.Contains(logged.String(), keepsLocked) })
	r.stop()
	_, err := operator.Exec(t.Context(), `ROLLBACK`)
	must(t, err)
	if !row[bool](db, `SELECT status = 'pending' AND attempts = 0 AND lease_expires_at IS NOT NULL FROM outbox_delivery`) {
		t.Error(row[string](db, `SELECT d::text FROM outbox_delivery d`))
	}
}

// Another session changes a row while its settle waits for it: the settle then finds it elsewhere, under the same claim.
func TestChangedRowIsNotStale(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]int{"delivered": 204, "failed": 422, "retry": 500} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			g := newGate(t)
			rc := newReceiver(t, func(w http.ResponseWriter, r request) {
				g.pass(r)
				w.WriteHeader(answer)
			})
			db.insert(1, "key")
			d := to(rc.URL)
			d.Retry.Schedule = []time.Duration{time.Hour}
			cfg := db.config(d)
			cfg.Pool.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
				conn.RuntimeParams["lock_timeout"] = "0" // or a slow machine would never see the settle wait
				return nil
			}
			r := start(t, cfg)
			<-g.arrived
			operator := db.locker(`UPDATE outbox_delivery SET last_error = 'looked at'`)
			g.open()
			becomes(db, true, `SELECT count(*) > 0 FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = 'outbox-relay' AND wait_event_type = 'Lock'`)
			_, err := operator.Exec(t.Context(), `COMMIT`)
			must(t, err)
			becomes(db, true, `SELECT attempts = 1 AND claimed_by IS NULL FROM outbox_delivery`)
			r.await(t, "the settle", func(o *observer) bool { return len(o.outcomes) == 1 })
			if n := sees(r.observer, func(o *observer) int { return o.stale }); n != 0 || rc.total() != 1 {
				t.Errorf("%d stale, %d requests", n, rc.total())
			}
			if n := row[int](db, `SELECT coalesce(sum(count), 0) FROM outbox_alert`); n > 1 {
				t.Errorf("the alert counts %d", n)
			}
		})
	}
}

// A whole table is locked, as migrations do: that ends, and is waited for. Nothing is sent twice for it.
func TestLockedTableIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(20, "key")
	r := start(t, db.config(to(rc.URL)))
	for range 20 {
		<-g.arrived
	}
	migration := db.locker(`LOCK TABLE outbox_delivery IN ACCESS EXCLUSIVE MODE`)
	g.open()
	r.await(t, "two vain settles", func(o *observer) bool { return o.failures["settle"] >= 2 })
	_, err := migration.Exec(t.Context(), `COMMIT`)
	must(t, err)
	r.settles(t, policy.Delivered, 20)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`); n != 20 || rc.total() != 20 {
		t.Errorf("%d of 20 delivered, %d requests", n, rc.total())
	}
}

// Another session holds the routes for longer than a settle would wait: who wants to change them waits.
func TestLockedRoutesAreWaitedFor(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	operator := db.locker(`LOCK TABLE outbox_route IN SHARE ROW EXCLUSIVE MODE`)
	r := start(t, db.config(to(rc.URL)))
	becomes(db, true, `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()
		AND application_name = 'outbox-relay' AND wait_event_type = 'Lock' AND query_start < clock_timestamp() - interval '1 second'`)
	_, err := operator.Exec(t.Context(), `COMMIT`)
	must(t, err)
	r.instance()
	if n := sees(r.observer, func(o *observer) int { return o.failures["session"] }); n != 0 {
		t.Errorf("%d failures", n)
	}
}

// Another relay's claim began before this one's, and finds deliveries that this one has claimed meanwhile. It leaves them, but keeps
// their rows locked until it commits, which a slow machine may put off. That is no failure of the database, and nothing is sent twice.
func TestClaimOfAnotherRelayFailsNoSettle(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(3, "key")
	slow := db.locker(`SET LOCAL application_name = 'slow'`)
	instance, err := session.Register(t.Context(), db.pool, false, "slow", "", time.Hour)
	must(t, err)
	rescuer := db.locker(`SELECT FROM outbox_relay WHERE name = 'slow' FOR UPDATE`) // the claim waits for it when it has its snapshot
	claimed := make(chan struct{})
	var result claimResult
	go func() {
		defer close(claimed)
		request := claimRequest{destination: "default", scans: []scan{{free: 10}}}
		result, err = (&store{pool: slow}).claim(t.Context(), instance, time.Hour, []claimRequest{request})
	}()
	becomes(db, true, `SELECT count(*) = 1 FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'slow' AND wait_event_type = 'Lock'`)
	logged := &safeBuffer{}
	cfg := db.config(to(rc.URL))
	cfg.Log = zerolog.New(logged)
	r := start(t, cfg)
	for range 3 {
		<-g.arrived
	}
	_, errRescuer := rescuer.Exec(t.Context(), `ROLLBACK`)
	must(t, errRescuer)
	within(t, "the other claim", claimed)
	if must(t, err); len(result.deliveries) != 0 {
		t.Fatalf("it claimed %d deliveries that were claimed already", len(result.deliveries))
	}
	g.open()
	eventually(t, "vain settles", func() bool { return strings.Contains(logged.String(), keepsLocked) })
	_, err = slow.Exec(t.Context(), `COMMIT`)
	must(t, err)
	r.settles(t, policy.Delivered, 3)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1 AND rescues = 0`); n != 3 || rc.total() != 3 {
		t.Errorf("%d of 3 are delivered at the first attempt, %d requests", n, rc.total())
	}
	if sees(r.observer, func(o *observer) int { return o.stale + len(o.failures) }) != 0 {
		t.Errorf("stale %d, failed %v", r.stale, r.failures)
	}
}
