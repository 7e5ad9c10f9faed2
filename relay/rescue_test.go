package relay

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// A relay in a process of its own, for tests that kill it: this test binary, told so by its environment.
func TestRelayProcess(t *testing.T) {
	dsn, url := os.Getenv("RELAY_TEST_DSN"), os.Getenv("RELAY_TEST_URL")
	if dsn == "" {
		return // only the body of a child process
	}
	lease, err := time.ParseDuration(os.Getenv("RELAY_TEST_LEASE"))
	must(t, err)
	d := to(url)
	d.Timeout = min(patience, lease-leaseMargin) // a POST that is under way while the process is frozen goes on afterwards
	r, err := New(Config{
		Pool: settings(t, dsn), Destinations: []post.Destination{d}, Lease: lease, Name: "victim",
		Hooks: Hooks{Claimed: func(_ string, n int) { fmt.Println("claimed", n) }},
	})
	must(t, err)
	must(t, r.Run(context.Background()))
}

// startProcess runs a relay that can be killed, and returns what it prints.
func startProcess(t testing.TB, dsn, url string) (victim *exec.Cmd, said func(word string)) {
	t.Helper()
	return startProcessWithLease(t, dsn, url, time.Hour)
}

func startProcessWithLease(t testing.TB, dsn, url string, lease time.Duration) (victim *exec.Cmd, said func(word string)) {
	t.Helper()
	victim = exec.Command(os.Args[0], "-test.run=^TestRelayProcess$", "-test.timeout=10m")
	victim.Env = append(os.Environ(), "RELAY_TEST_DSN="+dsn, "RELAY_TEST_URL="+url, "RELAY_TEST_LEASE="+lease.String())
	out, err := victim.StdoutPipe()
	must(t, err)
	must(t, victim.Start())
	t.Cleanup(func() {
		_ = victim.Process.Kill()
		_ = victim.Wait()
	})
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			lines <- scanner.Text()
		}
	}()
	return victim, func(word string) {
		t.Helper()
		deadline := time.After(patience)
		for {
			select {
			case line, open := <-lines:
				if strings.HasPrefix(line, word) {
					return
				}
				if !open {
					t.Fatalf("the process ended without having said %q", word)
				}
			case <-deadline:
				t.Fatalf("never came: %q", word)
			}
		}
	}
}

// A relay is killed with POSTs in flight and claims in its queue, all leased for an hour. The survivor takes over at
// once: the session of the dead one is gone.
func TestKilledRelayIsRescued(t *testing.T) {
	t.Parallel()
	const events = 200
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.number == 1 {
			g.pass(r)
		}
	})
	db.insert(events, "key")
	victim, said := startProcess(t, db.dsn, rc.URL)
	said("claimed")
	<-g.arrived
	dead := row[int32](db, `SELECT instance FROM outbox_relay`)
	rc.kill(t, victim)
	g.open()

	cfg := db.config(to(rc.URL))
	cfg.Lease = time.Hour
	survivor := start(t, cfg)
	becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	survivor.await(t, "the rescue", func(o *observer) bool { return len(o.rescued) == 1 })
	if got := sees(survivor.observer, func(o *observer) int32 { return o.rescued[0] }); got != dead {
		t.Errorf("rescued instance %d, want %d", got, dead)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_relay WHERE instance = $1`, dead); n != 0 {
		t.Error("the dead relay is still registered")
	}
	// What was in flight was sent again, under the same key; nothing more often than that.
	for key, n := range counted(rc.keys()) {
		if n > 2 {
			t.Errorf("%s came %d times", key, n)
		}
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND rescues = 0`); n != events {
		t.Errorf("%d of %d are delivered", n, events)
	}
}

func counted(keys []string) map[string]int {
	counts := map[string]int{}
	for _, key := range keys {
		counts[key]++
	}
	return counts
}

// terminate ends the relay's session.
func (db *database) terminate(instance int32) {
	db.Helper()
	db.exec(`SELECT pg_terminate_backend(session_pid) FROM outbox_relay WHERE instance = $1`, instance)
}

// A session that breaks is not a relay that dies: it comes back under its number, and its claims stay its own.
func TestCutSessionResumes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	db.insert(100, "key")
	cfg := db.config(to(rc.URL))
	cfg.Lease = time.Hour
	r := start(t, cfg)
	<-g.arrived
	instance := r.instance()
	for n := 1; n <= 3; n++ {
		db.terminate(instance)
		r.await(t, "the loss of the session", func(o *observer) bool { return o.failures["session"] >= n })
		if again := r.instance(); again != instance {
			t.Fatalf("instance %d became %d", instance, again)
		}
	}
	g.open()
	r.settles(t, policy.Delivered, 100)
	if rc.total() != 100 || sees(r.observer, func(o *observer) int { return len(o.rescued) + o.stale }) != 0 {
		t.Errorf("%d requests, rescued %v", rc.total(), r.rescued)
	}
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 AND rescues = 0`); n != 100 {
		t.Errorf("%d of 100 were delivered without a rescue", n)
	}
}

// Another relay took this one for dead while its session was away: its claims are another's, and it starts anew.
func TestRelayTakenForDeadRegistersAnew(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	l := newLink(t, db.dsn)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.number == 1 {
			g.pass(r)
		}
	})
	db.insert(3, "key")
	cfg := db.config(to(rc.URL))
	cfg.Lease = time.Hour
	cut := cfg
	cut.Pool = settings(t, l.dsn)
	a := start(t, cut)
	for range 3 {
		<-g.arrived
	}
	instance := a.instance()
	db.knows(db.dsn)
	l.block(true)
	b := start(t, cfg)
	b.await(t, "the rescue", func(o *observer) bool { return len(o.rescued) == 1 })
	b.settles(t, policy.Delivered, 3)
	before := rows[string](db, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`)
	g.open()
	a.await(t, "the first relay's answers", func(o *observer) bool { return len(o.attempts) == 3 })
	l.block(false)
	a.await(t, "the first relay's settle", func(o *observer) bool { return o.outcomes[policy.Delivered] == 3 })
	if again := a.instance(); again == instance {
		t.Error("it goes on under the number of which others know that it is dead")
	}
	after := rows[string](db, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`)
	if strings.Join(before, "\n") != strings.Join(after, "\n") {
		t.Errorf("the first relay overwrote %v with %v", before, after)
	}
	db.insert(10, "then")
	becomes(db, 13, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND attempts = 1`)
	becomes(db, 2, `SELECT count(*) FROM outbox_relay`)
}

// River's rescuer was starved by rows that it could not rescue: those of the living are not touched, however many.
func TestRescueTakesOnlyTheDeadOnesRows(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "default", "elsewhere")
	db.insert(3000, "key")
	// A living relay's claims, a dead one's, and a row that another session has locked.
	db.exec(`INSERT INTO outbox_relay (name, version, lease, heartbeat_at, session_pid) SELECT n, '', '1 hour', now() + interval '1 hour', 0 FROM unnest(ARRAY['alive', 'dead']) n`)
	living, err := db.pool.Acquire(t.Context())
	must(t, err)
	defer living.Release()
	alive, dead := row[int32](db, `SELECT min(instance) FROM outbox_relay`), row[int32](db, `SELECT max(instance) FROM outbox_relay`)
	db.connectAs(living, alive)
	db.exec(`UPDATE outbox_delivery SET claimed_by = CASE WHEN event_id > 2990 THEN $2::int ELSE $1::int END, lease_expires_at = now() + interval '1 hour'
		WHERE destination = 'default'`, alive, dead)
	_, err = living.Exec(t.Context(), `BEGIN; SELECT FROM outbox_delivery WHERE event_id = 2995 FOR UPDATE`)
	must(t, err)

	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 9)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE claimed_by = $1 AND rescues = 0`, alive); n != 2990 {
		t.Errorf("%d of the living relay's 2990 claims are left", n)
	}
	_, err = living.Exec(t.Context(), `ROLLBACK`)
	must(t, err)
	r.settles(t, policy.Delivered, 10)
}

// A relay that is frozen keeps its connection, its session. When it was not heard of for 15 s, another one takes
// over, and nothing that it does when it goes on overwrites what the other one wrote.
func TestFrozenRelayIsRescued(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.number == 1 {
			g.pass(r)
		}
	})
	db.insert(3, "key")
	frozen, said := startProcess(t, db.dsn, rc.URL)
	said("claimed")
	for range 3 {
		<-g.arrived
	}
	must(t, frozen.Process.Signal(syscall.SIGSTOP))
	db.exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '14 seconds'`) // instead of as long a wait
	cfg := db.config(to(rc.URL))
	cfg.Lease = time.Hour
	survivor := prepared(t, cfg)
	survivor.session.WatchFor = time.Nanosecond
	survivor.begin()
	survivor.settles(t, policy.Delivered, 3)
	before := rows[string](db, `SELECT d::text FROM outbox_delivery d ORDER BY event_id`)
	g.open()
	must(t, frozen.Process.Signal(syscall.SIGCONT))
	becomes(db, 2, `SELECT count(*) FROM outbox_relay`) // it has noticed, and registered anew
	db.insert(3, "then")
	becomes(db, 6, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`)
	after := rows[string](db, `SELECT d::text FROM outbox_delivery d WHERE event_id <= 3 ORDER BY event_id`)
	if strings.Join(before, "\n") != strings.Join(after, "\n") {
		t.Errorf("the frozen relay overwrote %v with %v", before, after)
	}
}

// A relay freezes while the server sends it a large claim. The claim is still open then: it keeps its deliveries locked, and its
// relay's row, which a rescue needs.
func TestRelayFrozenInItsClaimIsRescued(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	const events = 100 // with payloads of more than the connection holds
	l := newLink(t, db.dsn)
	frozen, _ := startProcess(t, l.dsn, rc.URL)
	becomes(db, 1, `SELECT count(*) FROM outbox_relay`)
	insert := func() {
		db.exec(`INSERT INTO outbox (event_type, idempotency_key, payload) SELECT 't', i, to_json(repeat('x', $1)) FROM generate_series(1, $2) i`, inlinePayload-100, events)
	}
	within(t, "a claim", l.holdAfter(insert, claimDue))
	becomes(db, 1, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'ClientWrite'`)
	must(t, frozen.Process.Signal(syscall.SIGSTOP))
	db.exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '14 seconds'`) // instead of as long a wait
	survivor := prepared(t, db.config(to(rc.URL)))
	survivor.session.WatchFor = time.Nanosecond
	survivor.begin()
	survivor.settles(t, policy.Delivered, events)
	must(t, frozen.Process.Signal(syscall.SIGCONT))
}

// The database stands still for all relays. None of them is dead because its heartbeat is old.
func TestStandstillIsNoDeath(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	relays := []*running{start(t, cfg), start(t, cfg)}
	instances := []int32{relays[0].instance(), relays[1].instance()}
	becomes(db, true, `SELECT pg_postmaster_start_time() < now() - interval '4 seconds'`)
	for range 5 {
		db.exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 hour'`)
		becomes(db, 2, `SELECT count(*) FROM outbox_relay WHERE heartbeat_at > now() - interval '1 minute'`)
	}
	for i, r := range relays {
		if again := r.instance(); again != instances[i] || sees(r.observer, func(o *observer) int { return len(o.rescued) }) != 0 {
			t.Errorf("instance %d became %d", instances[i], again)
		}
	}
}

// Rescuing, leaving and the health check touch no delivery, so that they cost the same whatever is pending or locked.
func TestRescueTouchesNoDelivery(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(10, "key")
	dead, leaving := db.dead(), db.dead()
	db.exec(`UPDATE outbox_delivery SET claimed_by = CASE WHEN event_id > 5 THEN $1 ELSE $2::int END, lease_expires_at = now() + interval '1 hour'`, dead, leaving)
	db.exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_owner)
		VALUES ('a', 'half_open', now(), now(), $1), ('b', 'half_open', now(), now(), $1)`, dead)
	operator := db.locker(`LOCK TABLE outbox_delivery; SELECT FROM outbox_destination WHERE destination = 'a' FOR UPDATE`)
	within(t, "a rescue, a departure and a health check", func() chan struct{} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if rescued, _, err := session.Rescue(t.Context(), db.pool, dead); err != nil || !rescued {
				t.Errorf("rescued %t, %v", rescued, err)
			}
			if err := session.Deregister(t.Context(), db.pool, leaving); err != nil {
				t.Error(err)
			}
			if _, err := ops.New(db.pool).LifeSigns(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		return done
	}())
	_, err := operator.Exec(t.Context(), `COMMIT`)
	must(t, err)
	if n := row[int](db, `SELECT count(*) FROM outbox_delivery d WHERE `+pg.IsFree); n != 10 {
		t.Errorf("%d of 10 are free", n)
	}
	if got := row[string](db, `SELECT string_agg(destination, ' ') FROM outbox_destination WHERE breaker_owner IS NOT NULL`); got != "a" {
		t.Errorf("trials of %s go on", got)
	}
}

// dead registers a relay that does not live, and returns its instance.
func (db *database) dead() int32 {
	db.Helper()
	return row[int32](db, `INSERT INTO outbox_relay (name, version, lease, session_pid) VALUES ('dead', '', '1 hour', 0) RETURNING instance`)
}

// connectAs makes a connection the session of a relay whose heartbeat stays young.
func (db *database) connectAs(conn pg.DB, instance int32) {
	db.Helper()
	resumed, err := session.Resume(db.Context(), conn, true, instance)
	if must(db, err); !resumed {
		db.Fatalf("relay %d is not registered", instance)
	}
	db.exec(`UPDATE outbox_relay SET heartbeat_at = now() + interval '1 hour' WHERE instance = $1`, instance)
}

// What a dead relay had in flight is sent at once, although a walk through a large backlog of blocked ordering keys goes on: it is not
// behind that backlog, as it was not before.
func TestRescuedDeliveriesGoBeforeTheBacklog(t *testing.T) {
	t.Parallel()
	const dead = 1000
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '1', 'blocked-' || i, 'key' FROM generate_series(1, 5000) i`)
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour', status = CASE WHEN event_id = (SELECT min(id) FROM outbox) THEN 'failed' ELSE 'pending' END`)
	rc := newReceiver(t, nil)
	rescued := make(chan struct{}, 1)
	cfg := db.config(to(rc.URL))
	cfg.Hooks.Rescued = func(int32) { rescued <- struct{}{} }
	r := sessionOf(t, cfg)
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	c := r.newClaimer()
	c.pace = policy.Pace{Poll: time.Hour}
	turns := func(n int) {
		for range n {
			_, err := c.claimIfDue(t.Context())
			must(t, err)
			r.senders.wait()
		}
	}
	db.insert(1, "in-flight")
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '5 seconds', claim = 1, claimed_by = $1, lease_expires_at = now() + interval '50 seconds'
		WHERE event_id = (SELECT max(id) FROM outbox)`, dead)
	c.notified(wakeUp(t, r))
	turns(3)
	if walk := &r.lane("default").walks[backlog]; !walk.more || rc.total() > 0 {
		t.Fatalf("not in a walk through the backlog, or %d were sent", rc.total())
	}
	db.exec(`INSERT INTO outbox_relay (instance, name, version, session_pid) OVERRIDING SYSTEM VALUE VALUES ($1, 'dead', '', 0)`, dead)
	<-rescued
	c.notified(wakeUp(t, r))
	turns(3)
	if rc.total() != 1 {
		t.Error("what the dead relay had in flight waits for the walk")
	}
}
