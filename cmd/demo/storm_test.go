package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

var (
	stormTime = flag.Duration("storm", 40*time.Second, "how long TestStorm makes faults")
	stormSeed = flag.Uint64("seed", 0, "repeats the faults of a storm that printed this seed; 0: a new one")
)

// A storm makes one fault after the other, drawn from a seed. What may have been hurt is noted before, so that the rules know a cause for
// each request that is more than one.
type storm struct {
	*stage
	t      *testing.T
	random *rand.Rand
	relays []*process.Unit
	made   map[string]int
}

// stormFaults are what a storm makes, beside answers that are late, lost, or 500.
var stormFaults = map[string]func(s *storm){
	"relay killed": func(s *storm) { s.killRelay(s.pick()) },
	"relay frozen": func(s *storm) { // for longer than it takes others to take it for dead
		life, p := s.pick().Current()
		s.shake(life)
		p.Signal("STOP")
		s.rest(time.Second, 8*time.Second)
		p.Signal("CONT")
	},
	"receiver killed": func(s *storm) {
		life, p := s.receiver.Current()
		p.Kill()
		s.until("the next life of the receiver", func(context.Context) (bool, error) {
			next, _ := s.receiver.Current()
			return next != life, nil
		})
	},
	"configuration read again": func(s *storm) {
		_, p := s.pick().Current()
		p.Signal("HUP")
	},
	"connections ended": func(s *storm) {
		s.shakeAll()
		s.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND application_name LIKE 'outbox-relay%' AND random() < 0.7`, financeName)
	},
	"receiver's connections ended": func(s *storm) {
		s.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()`, logisticsName)
		s.logistics.Reset()
	},
	"row locked": func(s *storm) { // by somebody who forgot a transaction
		tx, err := s.finance.Begin(s.Ctx)
		s.try(s.t, err)
		_, err = tx.Exec(s.Ctx, `SELECT FROM outbox_delivery WHERE status = 'pending' ORDER BY random() LIMIT 20 FOR UPDATE SKIP LOCKED`)
		s.rest(time.Second, 3*time.Second)
		s.try(s.t, errors.Join(err, tx.Rollback(s.Ctx)))
	},
	"database crashed": func(s *storm) { s.restart(s.Server.StopImmediate) },
	"database stopped": func(s *storm) { s.restart(s.Server.Shutdown) },
}

func (s *storm) pick() *process.Unit { return s.relays[s.random.IntN(len(s.relays))] }

// rest waits for between least and most.
func (s *storm) rest(least, most time.Duration) {
	select {
	case <-time.After(least + time.Duration(s.random.Int64N(int64(most-least)))):
	case <-s.Ctx.Done():
	}
}

func (s *storm) until(what string, done func(context.Context) (bool, error)) {
	s.try(s.t, s.Poll(patience, what, done))
}

func (s *storm) exec(query string, args ...any) {
	_, err := s.finance.Exec(s.Ctx, query, args...)
	s.try(s.t, err)
}

// shake notes that a life may send again what it has in hand, or another life what this one had.
func (s *storm) shake(life string) { s.note("shaken", life) }

func (s *storm) shakeAll() {
	for _, u := range s.relays {
		life, _ := u.Current()
		s.shake(life)
	}
}

// restart stops the database and starts it again. A crash loses what relays committed without waiting for the disk.
func (s *storm) restart(stop func(context.Context) error) {
	s.shakeAll()
	s.try(s.t, stop(s.Ctx))
	at := time.Now()
	s.rest(100*time.Millisecond, 2*time.Second)
	s.try(s.t, s.Server.StartAgain(s.Ctx))
	s.finance.Reset()
	s.logistics.Reset()
	s.until("the database", func(ctx context.Context) (bool, error) {
		return s.finance.Ping(ctx) == nil && s.logistics.Ping(ctx) == nil, nil
	})
	s.note("stopped", at.UTC().Format("2006-01-02 15:04:05.999999Z"))
	s.shakeAll()
}

// tell says what is left of a backlog that does not drain.
func (s *storm) tell() {
	s.t.Logf("faults: %v", s.made)
	for what, query := range map[string]string{
		"relays":     `SELECT format('%s %s, beat %s ago', instance, name, now() - heartbeat_at) FROM outbox_relay`,
		"ranges":     `SELECT format('%s of %s, taken %s ago, unsettled %s', seq, relay, now() - taken_at, demo_unsettled(r)) FROM outbox_range r WHERE ended_at IS NULL LIMIT 10`,
		"deliveries": `SELECT format('event %s key %s joined %s due in %s, attempts %s, claimed by %s until %s, blocked by %s, %s', event_id, ordering_key, joined, next_attempt_at - now(), attempts, claimed_by, lease_expires_at - now(), blocked_by, last_reason) FROM outbox_delivery WHERE status = 'pending' ORDER BY event_id LIMIT 10`,
		"untaken":    `SELECT format('event %s key %s of xid %s', id, ordering_key, xid) FROM outbox WHERE NOT outbox_is_routed(id) LIMIT 10`,
		"states":     `SELECT format('%s %s paused %s', destination, breaker, paused) FROM outbox_destination`,
	} {
		rows, _ := s.finance.Query(s.t.Context(), query)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		s.t.Logf("%s: %v %s", what, err, strings.Join(lines, "\n\t"))
	}
}

// While relays, receivers and the database are killed, frozen and cut off at random, nothing is lost, nothing happens twice, each key keeps
// its order, and each request that is more than one has a cause.
func TestStorm(t *testing.T) {
	lasts := testsize.Of(*stormTime, min(*stormTime, 12*time.Second))
	seed := *stormSeed
	if seed == 0 {
		seed = rand.Uint64N(1_000_000)
	}
	t.Logf("repeat these faults with -seed %d", seed)
	s := &storm{stage: newStage(t), t: t, random: rand.New(rand.NewPCG(seed, 0)), made: map[string]int{}}
	s.absence = 200 * time.Millisecond
	s.network.seed = seed
	s.relays = s.enter(t, 3, faults{Refuse: 0.02, Lose: 0.02, Late: 0.01}, nil, "OUTBOX_RETRY_SCHEDULE=100ms,300ms,1s", "OUTBOX_LEASE=60s")
	s.outliveStart(t)

	calm, issued := make(chan struct{}), make(chan error, 1)
	s.Go(func(ctx context.Context) error {
		for n := 1; ; n++ {
			err := s.issue(order{Prefix: fmt.Sprintf("INV%d", n), Invoices: 1000, PerSecond: 300, Rollback: 0.05, PlainSQL: plainSQL, Keys: 50, Later: 0.05})
			if ctx.Err() != nil {
				return nil
			}
			select { // the database may have been away: what has committed is in it
			case <-calm:
				issued <- err
				return nil
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	names := slices.Sorted(maps.Keys(stormFaults))
	begun := time.Now()
	for told := begun; time.Since(begun) < lasts; {
		s.rest(50*time.Millisecond, 2*time.Second)
		name := names[s.random.IntN(len(names))]
		stormFaults[name](s)
		s.made[name]++
		if time.Since(told) > time.Minute {
			told = time.Now()
			t.Logf("%s: %v", time.Since(begun).Round(time.Second), s.made)
		}
	}
	close(calm)
	s.try(t, <-issued)
	ended := time.Now()
	if err := s.drained(drainPatience); err != nil {
		s.tell()
		s.try(t, err)
	}
	recovered := time.Since(ended)
	n := s.settle(t)
	var faults []string
	for _, name := range names {
		faults = append(faults, fmt.Sprintf("%s %d", name, s.made[name]))
	}
	t.Logf("storm for %s, seed %d: %s; %d committed, %d rolled back, %d requests, %d refused, %d answers lost, %d duplicates suppressed, %d effects, %d lost, %d doubled; "+
		"%d relays and %d receivers killed; all delivered %s after the last fault",
		lasts, seed, strings.Join(faults, ", "), n.Committed, n.RolledBack, n.Posts, n.Refused, n.AnswersLost, n.Suppressed, n.Effects, n.Lost, n.Doubled,
		n.RelaysKilled, n.ReceiversKilled, recovered.Round(time.Millisecond))
	if n.Committed == 0 || len(s.made) == 0 {
		t.Error("nothing was issued, or nothing went wrong")
	}
}
