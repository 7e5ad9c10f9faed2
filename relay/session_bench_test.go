package relay

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// BenchmarkRescue measures how long it takes beside many parked and held deliveries until the deliveries of a killed relay
// are sent by another one, until a relay has left, and until a health check is answered. With -full, 5 million are
// parked and 3 million held.
func BenchmarkRescue(b *testing.B) {
	parked, held := 100_000, 60_000
	if *full {
		parked, held = 5_000_000, 3_000_000
	}
	db := newDatabase(b)
	db.exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('held', true, now())`)
	for destination, n := range map[string]int{"": parked, "held": held} {
		db.exec(`INSERT INTO outbox_delivery (event_id, destination) SELECT -i, $1 FROM generate_series(1, $2::int) i`, destination, n)
	}
	db.exec(`ANALYZE outbox_delivery`)
	var takeover, leaving, health time.Duration
	for b.Loop() {
		g := newGate(b)
		rc := newReceiver(b, func(_ http.ResponseWriter, r request) {
			if r.number == 1 {
				g.pass(r)
			}
		})
		victim, said := startProcess(b, db.dsn, rc.URL)
		db.insert(200, time.Now().String())
		said("claimed")
		<-g.arrived
		cfg := db.config(to(rc.URL))
		cfg.Lease = time.Hour
		survivor := start(b, cfg)
		survivor.instance()
		becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`)
		rc.kill(b, victim)
		killed := time.Now()
		g.open()
		becomes(db, 0, `SELECT count(*) FROM (SELECT FROM outbox_delivery WHERE destination = 'default' AND status = 'pending' LIMIT 1) p`)
		takeover += time.Since(killed)
		asked := time.Now()
		if _, err := ops.New(db.pool).LifeSigns(b.Context()); err != nil {
			b.Fatal(err)
		}
		health += time.Since(asked)
		stopped := time.Now()
		survivor.stop()
		leaving += time.Since(stopped)
	}
	b.ReportMetric(takeover.Seconds()/float64(b.N), "takeover-s")
	b.ReportMetric(leaving.Seconds()/float64(b.N), "leaving-s")
	b.ReportMetric(health.Seconds()/float64(b.N), "health-s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkWake measures how long after its commit an event reaches the receiver of an idle relay: a single event, and each
// of a burst of 16 producers that begin together.
func BenchmarkWake(b *testing.B) {
	const producers, events = 16, 20
	db := newDatabase(b)
	var mu sync.Mutex
	committed, arrived := map[string]time.Time{}, map[string]time.Time{}
	rc := newReceiver(b, func(_ http.ResponseWriter, r request) {
		mu.Lock()
		defer mu.Unlock()
		arrived[r.key] = time.Now()
	})
	r := start(b, db.config(to(rc.URL)))
	insert := func(conn *pgx.Conn, key string) {
		_, err := conn.Exec(b.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', $1)`, key)
		must(b, err)
		mu.Lock()
		defer mu.Unlock()
		committed[key] = time.Now()
	}
	var conns []*pgx.Conn
	for range producers {
		conn, err := pgx.Connect(b.Context(), db.dsn)
		must(b, err)
		b.Cleanup(func() { _ = conn.Close(context.WithoutCancel(b.Context())) })
		conns = append(conns, conn)
	}
	n, round := 0, 0
	for b.Loop() {
		round++
		for kind, each := range map[string]int{"single": 0, "burst": events} {
			becomes(db, true, armed)
			insert(conns[0], fmt.Sprint(kind, round))
			n++
			var inserting sync.WaitGroup
			for i, conn := range conns {
				inserting.Go(func() {
					for j := range each {
						insert(conn, fmt.Sprint(kind, round, "-", i, "-", j))
					}
				})
			}
			inserting.Wait()
			n += producers * each
			r.settles(b, policy.Delivered, n)
		}
	}
	for _, kind := range []string{"single", "burst"} {
		var took []time.Duration
		for key, at := range arrived {
			if strings.HasPrefix(key, kind) {
				took = append(took, at.Sub(committed[key]))
			}
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, kind+"-p50-ms")
		b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, kind+"-p99-ms")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkInsertAfterWakes measures an insert after relays were woken many times while vacuum was blocked, as a multiple
// of one where none was woken. The same with a trigger that reads a flag in a row, before and after. All take turns.
func BenchmarkInsertAfterWakes(b *testing.B) {
	wakes, inserts := 2_000, 1_000
	if *full {
		wakes, inserts = 50_000, 5_000
	}
	db, calm, old := newDatabase(b), newDatabase(b), newDatabase(b)
	old.exec(`DO $$ BEGIN
		ALTER TABLE outbox_relay ADD COLUMN idle boolean NOT NULL DEFAULT false;
		INSERT INTO outbox_relay (name, version) VALUES ('a', '');
		EXECUTE replace(pg_get_functiondef('outbox_fan_out'::regproc),
			'pg_sequence_last_value(''public.outbox_armed'') > date_part(''epoch'', inserted_at) * 1000',
			'EXISTS (SELECT FROM public.outbox_relay WHERE idle AND heartbeat_at > now() - interval ''10 seconds'')');
	END $$`)
	if !strings.Contains(row[string](old, `SELECT pg_get_functiondef('outbox_fan_out'::regproc)`), "WHERE idle") {
		b.Fatal("the trigger does not read the flag")
	}
	one := func(db *database) func() time.Duration {
		conn, err := pgx.Connect(b.Context(), db.dsn)
		must(b, err)
		b.Cleanup(func() { _ = conn.Close(context.WithoutCancel(b.Context())) })
		return func() time.Duration {
			began := time.Now()
			_, err := conn.Exec(b.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', gen_random_uuid())`)
			must(b, err)
			return time.Since(began)
		}
	}
	median := func(insert ...func() time.Duration) (each []float64) {
		took := make([][]time.Duration, len(insert))
		for range inserts {
			for i := range insert {
				took[i] = append(took[i], insert[i]())
			}
		}
		for i := range took {
			slices.Sort(took[i])
			each = append(each, float64(took[i][inserts/2].Nanoseconds()))
		}
		return each
	}
	for b.Loop() {
		median(one(db), one(calm), one(old)) // warm
		before := median(one(db), one(calm), one(old))
		for _, each := range []*database{db, calm, old} {
			each.locker(`SELECT pg_current_xact_id()`)
		}
		s := &store{pool: db.pool}
		for i := range 2 * wakes {
			must(b, s.arm(b.Context(), i%2 == 0))
			old.exec(`UPDATE outbox_relay SET idle = $1`, i%2 == 0)
		}
		after := median(one(db), one(calm), one(old))
		b.ReportMetric(before[0]/before[1], "before-woken/calm")
		b.ReportMetric(before[1]/1000, "insert-µs")
		b.ReportMetric(before[1]/before[2], "insert/v11")
		b.ReportMetric(after[0]/after[1], "woken/calm")
		b.ReportMetric(after[2]/after[1], "v11-woken/calm")
	}
	b.ReportMetric(0, "ns/op")
}

// faultTime is how long the faults below last.
func faultTime() time.Duration {
	if *full {
		return 20 * time.Second
	}
	return 4 * time.Second
}

// produce inserts events, a number every 10 ms, until done; with keys, of as many ordering keys. It returns how many.
func (db *database) produce(done <-chan struct{}, every, keys int) (n int) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return n
		case <-tick.C:
		}
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
			SELECT 't', '{}', 'key-' || i, CASE WHEN $3 > 0 THEN 'k' || i % nullif($3, 0) END FROM generate_series($1::int + 1, $1 + $2) i`, n, every, keys)
		n += every
	}
}

// late returns how many events were delivered later than limit after they were inserted, and the longest time one took.
func (db *database) late(limit time.Duration) (n int, worst float64) {
	const took = `extract(epoch FROM d.delivered_at - e.created_at)::float8`
	const from = ` FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id`
	return row[int](db, `SELECT count(*) FILTER (WHERE `+took+` > $1)`+from, limit.Seconds()), row[float64](db, `SELECT max(`+took+`)`+from)
}

// BenchmarkLostAnswers delivers 1,000 events a second with two relays while the database's answers to claims are lost and
// the connections reset. It reports how many events were late by more than 5 s; none may be.
func BenchmarkLostAnswers(b *testing.B) {
	for name, keys := range map[string]int{"keyless": 0, "500 keys": 500} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				db := newDatabase(b)
				rc := newReceiver(b, nil)
				var links []*link
				for range 2 {
					l := newLink(b, db.dsn)
					cfg := db.config(to(rc.URL))
					cfg.Pool, cfg.PollInterval = settings(b, l.dsn), 5*time.Second
					start(b, cfg).instance()
					links = append(links, l)
				}
				done := make(chan struct{})
				time.AfterFunc(faultTime(), func() { close(done) })
				var faults sync.WaitGroup
				for _, l := range links {
					faults.Go(func() {
						for {
							held := l.holdFrom(claimDue)
							select {
							case <-held:
							case <-done:
								l.pass()
								return
							}
							l.cut()
							l.pass()
							select {
							case <-time.After(3 * time.Second):
							case <-done:
								return
							}
						}
					})
				}
				n := db.produce(done, 10, keys)
				faults.Wait()
				becomes(db, n, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
				late, worst := db.late(5 * time.Second)
				if late > 0 {
					b.Errorf("%d of %d events are more than 5 s late", late, n)
				}
				b.ReportMetric(float64(late), "late")
				b.ReportMetric(worst, "worst-s")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkKills kills one of two relays every 500 ms while the receiver takes a second. No delivery may fail.
func BenchmarkKills(b *testing.B) {
	for b.Loop() {
		db := newDatabase(b)
		rc := newReceiver(b, func(http.ResponseWriter, request) { <-time.After(time.Second) })
		db.insert(1000, "key")
		becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`)
		enter := func() (victim *exec.Cmd) {
			victim, _ = startProcessWithLease(b, db.dsn, rc.URL, time.Minute)
			return victim
		}
		relays := []*exec.Cmd{enter(), enter()}
		end := time.Now().Add(faultTime())
		kills := 0
		for tick := time.NewTicker(500 * time.Millisecond); time.Now().Before(end); kills++ {
			<-tick.C
			rc.kill(b, relays[kills%2])
			relays[kills%2] = enter()
		}
		failed := `SELECT count(*) FROM outbox_delivery WHERE status = 'failed'`
		eventually2(b, 4*time.Minute, func() bool {
			return row[int](db, failed) > 0 || row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status <> 'delivered'`) == 0
		})
		if n := row[int](db, failed); n > 0 {
			b.Errorf("%d deliveries failed", n)
		}
		_, worst := db.late(0)
		b.ReportMetric(float64(kills), "kills")
		b.ReportMetric(float64(rc.total()), "requests")
		b.ReportMetric(worst, "worst-s")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkFreeze stops one of two relays at 1,000 events a second, with -full for 75 s, and lets it go on. No event may
// wait for longer than 20 s, and nothing may be overwritten.
func BenchmarkFreeze(b *testing.B) {
	frozenFor := 20 * time.Second
	switch {
	case *full:
		frozenFor = 75 * time.Second
	case testing.Short():
		frozenFor = 4 * time.Second
	}
	for b.Loop() {
		db := newDatabase(b)
		db.exec(`CREATE TABLE overwritten (event_id bigint);
			CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO overwritten VALUES (OLD.event_id); RETURN NULL; END $$;
			CREATE TRIGGER note AFTER UPDATE ON outbox_delivery FOR EACH ROW WHEN (OLD.status = 'delivered') EXECUTE FUNCTION note()`)
		rc := newReceiver(b, nil)
		frozen, said := startProcessWithLease(b, db.dsn, rc.URL, time.Minute)
		start(b, db.config(to(rc.URL))).instance()
		done := make(chan struct{})
		produced := make(chan int)
		go func() { produced <- db.produce(done, 10, 0) }()
		said("claimed")
		must(b, frozen.Process.Signal(syscall.SIGSTOP))
		<-time.After(frozenFor)
		must(b, frozen.Process.Signal(syscall.SIGCONT))
		<-time.After(2 * time.Second)
		close(done)
		becomes(db, <-produced, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
		late, worst := db.late(20 * time.Second)
		overwritten := row[int](db, `SELECT count(*) FROM overwritten`)
		if late > 0 || overwritten > 0 {
			b.Errorf("%d events waited for longer than 20 s, %d were overwritten", late, overwritten)
		}
		b.ReportMetric(worst, "worst-s")
		b.ReportMetric(float64(rc.total()), "requests")
	}
	b.ReportMetric(0, "ns/op")
}

// eventually2 is eventually with a patience of its own.
func eventually2(b *testing.B, patience time.Duration, done func() bool) {
	b.Helper()
	deadline := time.Now().Add(patience)
	for tick := time.NewTicker(200 * time.Millisecond); !done(); <-tick.C {
		if time.Now().After(deadline) {
			b.Fatal(fmt.Sprint("not within ", patience))
		}
	}
}
