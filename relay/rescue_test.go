package relay

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A relay in its own process, for tests that kill it: this test binary, told so by its
// environment.
func TestRelayProcess(t *testing.T) {
	dsn, url := os.Getenv("RELAY_TEST_DSN"), os.Getenv("RELAY_TEST_URL")
	if dsn == "" {
		return // only the body of a child process
	}
	lease, err := time.ParseDuration(os.Getenv("RELAY_TEST_LEASE"))
	relaytest.Must(t, err)
	d := to(url)
	d.Timeout = min(relaytest.Patience, lease-leaseMargin) // a POST that is under way while the process is frozen continues afterwards
	r, err := New(Config{
		Pool: settings(t, dsn), Destinations: []post.Destination{d}, Lease: lease, Name: "victim", AllowSuperuser: true,
		Hooks: Hooks{Claimed: func(_ string, n int) { fmt.Println("claimed", n) }},
	})
	relaytest.Must(t, err)
	relaytest.Must(t, r.Run(context.Background()))
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
	relaytest.Must(t, err)
	relaytest.Must(t, victim.Start())
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
		deadline := time.After(relaytest.Patience)
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

// A relay is killed with POSTs in flight and claims in its queue, all leased for an hour. The
// survivor takes over at once: the session of the dead one is gone.
func TestKilledRelayIsRescued(t *testing.T) {
	t.Parallel()
	const events = 200
	db := relaytest.Covered(t)
	g, rc := relaytest.NewGated(t)
	db.Insert(events, "key")
	victim, said := startProcess(t, db.DSN, rc.URL)
	said("claimed")
	<-g.Arrived
	dead := relaytest.Row[int32](db, `SELECT id FROM outbox_relay`)
	rc.Kill(t, victim)
	g.Open()

	cfg := config(db, to(rc.URL))
	cfg.Lease = time.Hour
	survivor := start(t, cfg)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
	survivor.await(t, "the rescue", func(o *observer) bool { return len(o.rescued) == 1 })
	testkit.Equal(t, "rescued relay", sees(survivor.observer, func(o *observer) int32 { return o.rescued[0] }), dead)
	testkit.Equal(t, "the dead relay is still registered", relaytest.Row[int](db, `SELECT count(*) FROM outbox_relay WHERE id = $1`, dead), 0)
	// What was in flight was sent again, under the same key; nothing more often than that.
	for key, n := range counted(rc.Keys()) {
		if n > 2 {
			t.Errorf("%s came %d times", key, n)
		}
	}
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered' AND rescues = 0`); n != events {
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

// Another session keeps a row of a dead relay locked: the others are sent at once, and this one
// when the lock is gone.
func TestLockedRowOfADeadRelayIsSentLater(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(10, "key")
	db.Exec(`UPDATE outbox_delivery SET claimed_by = $1, lease_expires_at = now() + interval '1 hour'`, dead(db))
	operator := db.Locker(`SELECT FROM outbox_delivery WHERE event_id = 5 FOR UPDATE`)
	r := start(t, config(db, to(relaytest.NewReceiver(t, nil).URL)))
	r.settles(t, policy.Delivered, 9)
	_, err := operator.Exec(t.Context(), `ROLLBACK`)
	relaytest.Must(t, err)
	r.settles(t, policy.Delivered, 10)
}

// A relay freezes while the server sends it a large claim. The claim is still open then: it keeps
// its deliveries locked, and its relay's row, which a rescue needs.
func TestRelayFrozenInItsClaimIsRescued(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	const events = 100 // with payloads of more than the connection holds
	l := newLink(t, db.DSN)
	frozen, _ := startProcess(t, l.dsn, rc.URL)
	relaytest.Becomes(db, 1, `SELECT count(*) FROM outbox_relay`)
	insert := func() {
		db.Exec(`INSERT INTO outbox (event_type, idempotency_key, payload) SELECT 't', i, to_json(repeat('x', $1)) FROM generate_series(1, $2) i`, lane.InlinePayload-100, events)
	}
	within(t, "a claim", l.holdAfter(insert, claim.ClaimDue))
	relaytest.Becomes(db, 1, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'ClientWrite'`)
	relaytest.Must(t, frozen.Process.Signal(syscall.SIGSTOP))
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '14 seconds'`) // instead of as long a wait
	survivor := prepared(t, config(db, to(rc.URL)))
	survivor.session.WatchFor = time.Nanosecond
	survivor.begin()
	survivor.settles(t, policy.Delivered, events)
	relaytest.Must(t, frozen.Process.Signal(syscall.SIGCONT))
}

// dead registers a relay that does not live, and returns its number.
func dead(db *relaytest.Database) int32 {
	db.Helper()
	return relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version, lease, session_pid) VALUES ('dead', '', '1 hour', 0) RETURNING id`)
}

// What a dead relay had in flight is sent at once, although a scan of a large backlog of blocked
// ordering keys is under way: it is not behind that backlog, as it was not before.
func TestRescuedDeliveriesGoBeforeTheBacklog(t *testing.T) {
	t.Parallel()
	const dead = 1000
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '1', 'blocked-' || i, 'key' FROM generate_series(1, 5000) i`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour', status = CASE WHEN event_id = (SELECT min(id) FROM outbox) THEN 'failed' ELSE 'pending' END`)
	rc := relaytest.NewReceiver(t, nil)
	rescued := make(chan struct{}, 1)
	cfg := config(db, to(rc.URL))
	cfg.Hooks.Rescued = func(int32) { rescued <- struct{}{} }
	r := sessionOf(t, cfg)
	c := r.newClaimer()
	c.pace = agenda.Pace{Poll: time.Hour}
	turns := func(n int) {
		for range n {
			turnOf(t, c)
			r.senders.Wait()
		}
	}
	db.Insert(1, "in-flight")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '5 seconds', claim = 1, claimed_by = $1, lease_expires_at = now() + interval '50 seconds'
		WHERE event_id = (SELECT max(id) FROM outbox)`, dead)
	awaitPost(t, r, agenda.CauseSweep)
	c.readMailbox(time.Now())
	turns(3)
	if w := &r.lane("default").Cursors[lane.Backlog]; !w.More || rc.Total() > 0 {
		t.Fatalf("not in a scan of the backlog, or %d were sent", rc.Total())
	}
	db.Exec(`INSERT INTO outbox_relay (id, name, version, session_pid) OVERRIDING SYSTEM VALUE VALUES ($1, 'dead', '', 0)`, dead)
	<-rescued
	awaitPost(t, r, agenda.CauseRescue)
	c.readMailbox(time.Now())
	turns(3)
	testkit.Equal(t, "what the dead relay had in flight waits for the scan", rc.Total(), 1)
}
