package inbox_test

import (
	"cmp"
	"context"
	"flag"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// chaosInbox plays TestInboxChaos in full: `make chaos-inbox`.
var chaosInbox = flag.Bool("chaos-inbox", false, "TestInboxChaos brings 100,000 events and kills once a second for a minute, instead of a little of both")

// chaosPlan is how much of everything a chaos has.
type chaosPlan struct {
	events, keys     int
	perSecond, lanes int
	kills            int
	every            time.Duration
	repeat           time.Duration // between two duplicates
	patience         time.Duration // for everything to be done once the faults have ended
}

// While workers are killed, frozen and told to stop, while handlers fail and events are brought
// again, every event takes effect once, those of one ordering key in order, and nothing is left
// behind.
func TestInboxChaos(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	plan := chaosPlan{events: 2000, keys: 40, perSecond: 500, lanes: 16, kills: 12, every: 300 * time.Millisecond, repeat: 10 * time.Millisecond, patience: time.Minute}
	if *chaosInbox {
		plan = chaosPlan{events: 100_000, keys: 200, perSecond: 1600, lanes: 64, kills: 60, every: time.Second, repeat: 5 * time.Millisecond, patience: 10 * time.Minute}
	}
	s := newChaosStage(t, 3)
	load := newChaosLoad(s, plan.events, plan.keys)
	recorder, workers := s.cast[0], s.cast[1:]

	faults, calm := context.WithCancel(s.ctx)
	defer calm()
	s.units.Go(func() { load.repeat(faults, plan.repeat) })
	done := make(chan struct{})
	s.units.Go(func() {
		load.bring(s.ctx, plan.lanes, plan.perSecond)
		close(done)
		s.add("test", entry{Op: opBrought})
	})
	s.units.Go(func() { s.operate(load) })
	over := func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}

	tick := time.NewTicker(plan.every)
	defer tick.Stop()
	for n := range plan.kills {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			t.Fatal(context.Cause(s.ctx))
		}
		target := workers[n%len(workers)]
		// On a slow machine a tick may come before the next life has begun to work: a kill is to
		// cut a run off.
		s.await(target.name+" to run a handler", func() bool { return over() || s.inRun(target) })
		s.kill(target)
		switch n % 8 {
		case 3:
			s.kill(recorder)
		case 5:
			s.retire(workers[(n+1)%len(workers)])
		case 7:
			s.units.Go(func() { s.freeze(workers[(n+2)%len(workers)], 1500*time.Millisecond) })
		}
	}
	select {
	case <-done:
	case <-s.ctx.Done():
		t.Fatal(context.Cause(s.ctx))
	}
	brought := time.Since(load.begun)
	s.awaitRow(plan.patience, plan.every/5, "the inbox to drain",
		`SELECT NOT EXISTS (SELECT FROM inbox_events WHERE processing_state IN ('pending', 'processing'))`)
	drained := time.Since(load.begun)
	calm()
	s.stop()

	f := s.gather(load)
	for _, p := range f.check() {
		for i, breach := range p.broken {
			if i == 20 {
				t.Errorf("%s: … and %d more", p.text, len(p.broken)-i)
				break
			}
			t.Errorf("%s: %s", p.text, breach)
		}
	}
	s.wantNeighbours(load)
	n := f.figures()
	// A chaos in which nothing went wrong proves nothing.
	if n.kills < plan.kills || n.cutOff == 0 || n.failed == 0 || load.unanswered.Load() == 0 || load.duplicates.Load() == 0 || load.reused.Load() == 0 {
		t.Errorf("%d kills, %d runs cut off, %d failed; want %d and more than 0 of each", n.kills, n.cutOff, n.failed, plan.kills)
	}
	if n.succeeded+n.ignored+n.given != plan.events {
		t.Errorf("%d events succeeded, %d were ignored, %d failed; want %d together", n.succeeded, n.ignored, n.given, plan.events)
	}
	t.Logf("inbox: %d events brought in %s, done after %s: %d succeeded, %d ignored, %d failed for good; %d effects, %d lost, %d doubled, 0 stuck; "+
		"%d runs, %d of them failed, %d cut off by %d kills, run again after %s (median), %s at most; "+
		"%d requests, %d without an answer, %d refused for now, %d duplicates, %d keys with another body; %d ordering keys in order",
		plan.events, brought.Round(time.Millisecond), drained.Round(time.Millisecond), n.succeeded, n.ignored, n.given, len(f.effects), n.lost, n.doubled,
		n.runs, n.failed, n.cutOff, n.kills, n.again[len(n.again)/2].Round(time.Millisecond), n.again[len(n.again)-1].Round(time.Millisecond),
		load.posts.Load(), load.unanswered.Load(), load.refused.Load(), load.duplicates.Load(), load.reused.Load(), plan.keys)
}

// operate ignores, as an operator, what blocks its ordering key.
func (s *chaosStage) operate(l *chaosLoad) {
	ops := inboxops.New(s.pool)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for freed := int64(0); freed < poisoned; {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		for n := range poisoned {
			done, err := ops.Ignore(s.ctx, inboxops.Selection{OrderingKey: "order-" + strconv.Itoa(n), States: []string{inboxops.Failed}}, nil)
			if err != nil && s.ctx.Err() == nil {
				s.end(err)
			}
			freed += done.Done
		}
	}
}

// gather collects the facts, when nothing moves any more.
func (s *chaosStage) gather(l *chaosLoad) *chaosFacts {
	s.t.Helper()
	f := &chaosFacts{events: map[string]*brought{}, strange: l.strange, rows: map[string]kept{}, runs: s.runs, kills: s.kills}
	f.strange = append(f.strange, s.errs...)
	for _, e := range l.events {
		f.events[e.Key] = e
	}
	rows, err := s.pool.Query(s.t.Context(), `
		SELECT idempotency_key, coalesce(CASE p.processing_state WHEN 'recorded' THEN e.processing_state END, 'in one table only'),
			coalesce(e.attempts, 0), coalesce(e.claim, 0)
		FROM processed_events p FULL JOIN inbox_events e USING (receiver, source, idempotency_key) WHERE receiver = 'test'`)
	pgtest.Must(s.t, err)
	var key string
	var row kept
	if _, err := pgx.ForEachRow(rows, []any{&key, &row.state, &row.attempts, &row.claims}, func() error {
		f.rows[key] = row
		return nil
	}); err != nil {
		s.t.Fatal(err)
	}
	if rows, err = s.pool.Query(s.t.Context(), `SELECT key, ordering_key, sequence, in_turn FROM effect ORDER BY id`); err != nil {
		s.t.Fatal(err)
	}
	if f.effects, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e made, err error) {
		return e, row.Scan(&e.key, &e.orderingKey, &e.sequence, &e.inTurn)
	}); err != nil {
		s.t.Fatal(err)
	}
	return f
}

// chaosFigures are what a chaos came to.
type chaosFigures struct {
	succeeded, ignored, given int
	lost, doubled             int
	runs, failed, cutOff      int
	kills                     int
	again                     []time.Duration // from a kill to the next run of what it cut off; sorted
}

func (f *chaosFacts) figures() (n chaosFigures) {
	n.kills, n.again = len(f.kills), []time.Duration{0}
	for _, row := range f.rows {
		switch row.state {
		case "succeeded":
			n.succeeded++
		case "ignored":
			n.ignored++
		case "failed":
			n.given++
		}
	}
	effects := map[string]int{}
	for _, effect := range f.effects {
		effects[effect.key]++
	}
	for key, e := range f.events {
		if e.Bidding == toSucceed {
			n.lost += max(0, 1-effects[key])
			n.doubled += max(0, effects[key]-1)
		}
		runs := f.runs[key]
		slices.SortStableFunc(runs, func(a, b run) int { return cmp.Compare(a.began.UnixNano(), b.began.UnixNano()) })
		for i, r := range runs {
			n.runs++
			switch r.outcome {
			case "failed":
				n.failed++
			case "":
				n.cutOff++
				if i+1 < len(runs) {
					n.again = append(n.again, runs[i+1].began.Sub(f.kills[r.life]))
				}
			}
		}
	}
	slices.Sort(n.again)
	return n
}
