package relay

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Who reads by "id > cursor" loses what commits late. A's transaction is open while B, inserted after
// it, is delivered and the lane's position moves past A's place.
func TestLateCommitsAreDelivered(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		age  string
		poll time.Duration
	}{
		// So young that looking back over the overlap must find it: the next sweep is an hour away.
		"within the overlap": {"0 seconds", time.Hour},
		// Found by the sweep alone.
		"beyond the overlap": {"1 minute", time.Second},
		"a day old":          {"1 day", time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			cfg := db.config(to(rc.URL))
			cfg.PollInterval = c.poll
			r := start(t, cfg)
			r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })

			late, err := pgx.Connect(t.Context(), db.dsn)
			must(t, err)
			defer func() { _ = late.Close(t.Context()) }()
			exec := func(statement string) {
				t.Helper()
				_, err := late.Exec(t.Context(), statement)
				must(t, err)
			}
			exec(`BEGIN`)
			exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'late')`)
			exec(`UPDATE outbox_delivery SET next_attempt_at = next_attempt_at - interval '` + c.age + `'`)
			db.insert(3, "early")
			r.settles(t, policy.Delivered, 3)
			exec(`COMMIT`)
			r.settles(t, policy.Delivered, 4)
			if keys := rc.keys(); len(keys) != 4 || keys[3] != "late" {
				t.Errorf("%v", keys)
			}
		})
	}
}

// A transaction that stays open for longer than the overlap is found when it commits, whatever the relay does meanwhile: the next
// sweep is an hour away.
func TestLateCommitIsFoundWhenItsTransactionEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ busyBefore, busyAfter bool }{
		"of an idle relay":                 {false, false},
		"of a busy relay":                  {true, true},
		"of a relay that becomes idle":     {true, false},
		"of a relay that does not stay so": {false, true},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 2)
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			cfg := db.config(to(rc.URL))
			cfg.PollInterval = time.Hour
			r := start(t, cfg)
			r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
			stop := func() {}
			busy := func() {
				done, ended := make(chan struct{}), make(chan struct{})
				go func() {
					defer close(ended)
					for ticker := time.NewTicker(20 * time.Millisecond); ; {
						select {
						case <-ticker.C:
							db.insert(1, rand.Text())
						case <-done:
							ticker.Stop()
							return
						}
					}
				}()
				stop = sync.OnceFunc(func() { close(done); <-ended })
			}
			defer func() { stop() }()
			if c.busyBefore {
				busy()
				r.settles(t, policy.Delivered, 5)
			}
			late, err := pgx.Connect(t.Context(), db.dsn)
			must(t, err)
			defer func() { _ = late.Close(t.Context()) }()
			_, err = late.Exec(t.Context(), `BEGIN; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'late')`)
			must(t, err)
			if !c.busyAfter {
				stop()
			} else if !c.busyBefore {
				busy()
			}
			_, err = late.Exec(t.Context(), `SELECT pg_sleep(3.5)`)
			must(t, err)
			if !c.busyAfter {
				idle := sees(r.observer, func(o *observer) int { return o.idle })
				if c.busyBefore && idle < 2 {
					t.Error("never became idle again")
				}
			}
			_, err = late.Exec(t.Context(), `COMMIT`)
			must(t, err)
			eventually(t, "the late event", func() bool { return slices.Contains(rc.keys(), "late") })
		})
	}
}

// turning returns the claimer of a relay with a session, and what takes a turn of it and waits for what that sends.
func turning(t *testing.T, cfg Config) (c *claimer, turn func() (wait time.Duration)) {
	t.Helper()
	r := sessionOf(t, cfg)
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	c = r.newClaimer()
	return c, func() time.Duration {
		t.Helper()
		wait, err := c.claimIfDue(t.Context())
		must(t, err)
		r.senders.wait()
		return wait
	}
}

// openLate returns an open transaction that has inserted an event so long ago.
func openLate(t *testing.T, db *database, ago time.Duration) pgx.Tx {
	t.Helper()
	late, err := db.pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = late.Rollback(context.WithoutCancel(t.Context())) })
	_, err = late.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'late')`)
	must(t, err)
	_, err = late.Exec(t.Context(), `UPDATE outbox_delivery SET next_attempt_at = next_attempt_at - $1::interval`, ago)
	must(t, err)
	return late
}

// A producer that writes between the last look at open transactions and the declaration of idleness was told not to notify.
// The relay, which will not look again for an hour, finds its event when it commits.
func TestLateCommitBesidesTheDeclaration(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	c, turn := turning(t, db.config(to(rc.URL)))
	c.pace = policy.Pace{Poll: time.Hour, LastWork: time.Now()}
	turn()
	far := time.Now().Add(time.Hour)
	if c.pace.Idle || c.writers.Next.IsZero() {
		t.Fatal("not busy, or no look at open transactions")
	}
	// The next look takes what it finds for as old as that.
	c.writers.Observe(time.Now(), row[time.Time](db, `SELECT now() - interval '4 seconds'`), 0, nil, false)
	c.writers.Next = far

	late := openLate(t, db, 2*policy.Overlap)
	c.pace.LastWork = time.Time{} // which makes it idle
	turn()
	if !c.pace.Idle {
		t.Fatal("not idle")
	}
	c.pace.Interval, c.pace.NextLook = time.Hour, far
	must(t, late.Commit(t.Context()))
	eventually(t, "the late event", func() bool {
		wait := turn()
		return rc.total() == 1 || wait < 0 || wait > time.Second
	})
	if rc.total() != 1 {
		t.Error("the relay idles, and nothing will wake it")
	}
}

// An idle relay that is notified claims before it looks for open transactions. What one of them commits after that claim is found.
func TestLateCommitBesidesTheFirstClaim(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	c, turn := turning(t, db.config(to(rc.URL)))
	c.pace = policy.Pace{Poll: time.Hour, Armed: true}
	turn()
	if !c.pace.Idle {
		t.Fatal("not idle")
	}
	c.writers = policy.Writers{}
	c.writers.Observe(time.Now(), row[time.Time](db, `SELECT now() - interval '4 seconds'`), 0, nil, true)

	late := openLate(t, db, policy.Overlap+time.Second)
	db.insert(1, "first")
	c.notified(false)
	turn()
	if c.writers.Pending() || rc.total() != 1 {
		t.Fatalf("%d events arrived; the open transaction was seen first: %v", rc.total(), c.writers.Pending())
	}
	must(t, late.Commit(t.Context()))
	c.notified(false)
	eventually(t, "the late event", func() bool {
		wait := turn()
		return rc.total() == 2 || wait < 0 || wait > time.Second
	})
	if rc.total() != 2 {
		t.Error("the late event waits for a sweep")
	}
}

// A transaction that wrote long before the relay came is found when it commits.
func TestLateCommitFromBeforeTheRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	late := db.plain().Begin()
	_, err := late.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'late')`)
	must(t, err)
	_, err = late.Exec(t.Context(), `UPDATE outbox_delivery SET next_attempt_at = next_attempt_at - interval '1 minute'`)
	must(t, err)
	cfg := db.config(to(rc.URL))
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	must(t, late.Commit(t.Context()))
	eventually(t, "the late event", func() bool { return rc.total() == 1 })
}

// A lane that sends a burst for some seconds has passed the place of a short transaction when that commits.
func TestCommitBehindABurst(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	every := time.NewTicker(10 * time.Millisecond) // so that the burst lasts for longer than claims look back
	t.Cleanup(every.Stop)
	rc := newReceiver(t, func(w http.ResponseWriter, _ request) {
		<-every.C
		w.WriteHeader(http.StatusNoContent)
	})
	d := to(rc.URL)
	d.MaxInFlight = 1
	cfg := db.config(d)
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	short := db.plain().Begin()
	_, err := short.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'short')`)
	must(t, err)
	db.insert(400, "burst")
	r.settles(t, policy.Delivered, 10)
	must(t, short.Commit(t.Context()))
	r.settles(t, policy.Delivered, 401)
}

// A lane that had no room for long comes back to what became due meanwhile.
func TestLaneLooksAtWhatItHadNoRoomFor(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	c, turn := turning(t, db.config(to(rc.URL)))
	c.pace = policy.Pace{Poll: time.Hour, Armed: true}
	turn()
	c.lanes.get("default").walks[backlog].rest(time.Now().Add(time.Hour))
	db.insert(1, "waited")
	c.clock.set(c.clock.now().Add(2 * liveWindow)) // so long ago is the first turn
	c.writers.Next = time.Now().Add(time.Hour)
	c.pace.Look()
	turn()
	if rc.total() != 1 {
		t.Error("the event waits for a sweep")
	}
}

// The sweep after an outage may fail, too. It is repeated before the next one.
func TestFailedSweepIsRepeated(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	cfg.PollInterval = time.Hour
	r := sessionOf(t, cfg)
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	c := r.newClaimer()
	c.pace = policy.Pace{Poll: time.Hour, Armed: true}
	_, err := c.claimIfDue(t.Context())
	must(t, err)
	for _, l := range c.lanes.list() {
		l.walkNow()
	}
	c.claimFailed(c.laneClaims(time.Now()))
	c.pace.Interval = 2 * time.Hour // so long has it been idle
	if wait, err := c.claimIfDue(t.Context()); err != nil || wait < 0 || wait > DefaultPollInterval {
		t.Errorf("next turn in %s, %v", wait, err)
	}
}

// An event that commits while a later one of its ordering key is being sent does not wait for that one's retry.
func TestLateCommitWhileItsKeyIsInFlight(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.key == "k-2" {
			g.pass(r)
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Retry.Schedule = []time.Duration{time.Hour}
	cfg := db.config(d)
	cfg.PollInterval = time.Hour
	r := start(t, cfg)
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	late := db.plain().Begin()
	_, err := late.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '1', 'k-1', 'k')`)
	must(t, err)
	db.keyed("k", 2, 2)
	<-g.arrived
	r.await(t, "idleness again", func(o *observer) bool { return o.idle > 1 })
	must(t, late.Commit(t.Context()))
	r.await(t, "the look at what was committed", func(o *observer) bool { return o.idle > 2 })
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = next_attempt_at - interval '1 minute' WHERE claimed_by IS NULL`) // so long is the other one sent
	g.open()
	r.settles(t, policy.Delivered, 1)
}

// An idle relay that has slept through the loss of its session relies on nothing that it knew before: the server may have failed over.
func TestLostSessionEndsWhatIsKnown(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	r := sessionOf(t, db.config(to("http://receiver.test/")))
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	c := r.newClaimer()
	c.writers.Closed = 1000
	instance, _ := r.current()
	r.presence.Set(instance, false)
	r.presence.Set(instance, true)
	for range 2 {
		_, err := c.claimIfDue(t.Context())
		must(t, err)
	}
	if c.writers.Closed == 1000 || c.writers.Next.IsZero() {
		t.Errorf("every event up to %d can be seen, next look at %s", c.writers.Closed, c.writers.Next)
	}
}

// BenchmarkLateCommit reports the longest time from a late commit to its receiver, for transactions that were open for 3 and 10
// seconds (30, too, with -full), in an idle relay and beside 20 and 1,000 events a second.
func BenchmarkLateCommit(b *testing.B) {
	open := []int{3, 10}
	switch {
	case *full:
		open = append(open, 30)
	case testing.Short():
		open = []int{1}
	}
	for _, perSecond := range []int{0, 20, 1000} {
		for _, seconds := range open {
			b.Run(fmt.Sprintf("%ds/%d", seconds, perSecond), func(b *testing.B) {
				for b.Loop() {
					took := lateCommit(b, seconds, perSecond)
					b.ReportMetric(float64(took.Milliseconds()), "ms-late")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

func lateCommit(b *testing.B, seconds, perSecond int) time.Duration {
	db := newDatabase(b)
	arrived := make(chan time.Time, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.Header.Get(webhook.IdempotencyKey) == "late" {
			arrived <- time.Now()
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	defer receiver.Close()
	cfg := db.config(to(receiver.URL))
	cfg.PollInterval = 5 * time.Second
	r := start(b, cfg)
	r.await(b, "idleness", func(o *observer) bool { return o.idle > 0 })
	done := make(chan struct{})
	var load sync.WaitGroup
	if perSecond > 0 {
		load.Go(func() {
			every := max(time.Second/time.Duration(perSecond), 10*time.Millisecond)
			ticker := time.NewTicker(every)
			defer ticker.Stop()
			for {
				select {
				case <-ticker.C:
					db.insert(max(1, perSecond/100), rand.Text())
				case <-done:
					return
				}
			}
		})
	}
	late, err := pgx.Connect(b.Context(), db.dsn)
	must(b, err)
	defer func() { _ = late.Close(context.WithoutCancel(b.Context())) }()
	_, err = late.Exec(b.Context(), `BEGIN; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'late')`)
	must(b, err)
	_, err = late.Exec(b.Context(), `SELECT pg_sleep($1)`, seconds)
	must(b, err)
	committed := time.Now()
	_, err = late.Exec(b.Context(), `COMMIT`)
	must(b, err)
	took := (<-arrived).Sub(committed)
	close(done)
	load.Wait()
	return took
}
